"""Tables of what is known, and whether drift passes the gate: from kept results only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from benchmarks.drift.plan import (
    ENTRIES,
    FRESH,
    JOINT,
    KNOWN,
    OPTIMIZERS,
    OTHER_ENTRIES,
    SHORT,
    TASKS,
    WIDE,
    Entry,
    fresh,
    searched,
    wanted,
)
from benchmarks.race.cells import shown
from benchmarks.race.configurations import ALL
from benchmarks.race.report import table
from benchmarks.race.results import Results
from benchmarks.race.run import Run

BEHIND, CLOSED, LONG_BEHIND = 0.06, 2 / 3, 0.03
"""The gate: how far drift may end behind dense, which share of today's gap it has to close, and how far a long
training may end behind dense."""


class Cell(NamedTuple):
    """A method on a task."""

    entry: Entry
    tried: list[Run]
    """Of the search, as far as they are known."""
    best: Run | None
    ends: dict[int, float]
    """Loss in nats, by seed: fresh ones, or that of the search where the entry has no others."""
    lines: list[dict[str, Any]]

    @property
    def whole(self) -> bool:
        return self.best is not None and len(self.ends) == max(1, len(self.entry.seeds))


class Distance(NamedTuple):
    """Of a variant from dense, in nats, by seeds that both have."""

    mean: float
    error: float | None
    seeds: int

    @property
    def percent(self) -> str:
        if not math.isfinite(self.mean):
            return "diverged"
        error = "" if self.error is None else f" ± {100 * self.error:.1f}"
        return f"{100 * math.expm1(self.mean):+.1f}{error} %"


def cell(entry: Entry, results: Results) -> Cell:
    """What is known of an entry."""
    search = searched(entry, results)
    best = search.best
    runs = [] if best is None else fresh(entry, best) or [best]
    lines = {run.seed: dict(line) for run in runs if (line := results.of(run))}
    ends = {seed: math.inf if (end := line["curve"][-1][-1]) is None else end for seed, line in lines.items()}
    return Cell(entry, [run for run in search.tried if results.of(run)], best, ends, list(lines.values()))


def apart(one: Cell, other: Cell) -> Distance | None:
    """Paired over seeds; None: no seed is known of both."""
    seeds = sorted(one.ends.keys() & other.ends.keys())
    if not seeds:
        return None
    each = [one.ends[seed] - other.ends[seed] for seed in seeds]
    finite = len(each) > 1 and all(map(math.isfinite, each))
    return Distance(fmean(each), stdev(each) / math.sqrt(len(each)) if finite else None, len(seeds))


def closed(one: Cell, today: Cell, dense: Cell) -> float | None:
    """Share of the gap in nats between today and dense that a variant closes; None: not known, or there is no gap."""
    own, gap = apart(one, dense), apart(today, dense)
    if own is None or gap is None or not gap.mean > 0:
        return None
    return 1.0 if math.isinf(gap.mean) and math.isfinite(own.mean) else 1 - own.mean / gap.mean


class Judged(NamedTuple):
    """A variant at the gate: on both short tasks, or on a long one."""

    title: str
    passes: bool | None
    """None: trainings are missing."""
    numbers: str
    worst: float
    """How far behind dense it ends, in nats."""


def judged(results: Results) -> Iterator[Judged]:
    """All variants that may pass."""
    every = {(entry.task, entry.method): cell(entry, results) for entry in ENTRIES}
    for optimizer in OPTIMIZERS:
        names = dict.fromkeys(e.method for e in ENTRIES if e.task in SHORT and e.optimizer == optimizer)
        for method in names:
            if ALL[method].make.__name__ == "Drift" and not method.endswith(JOINT):
                yield _both(method, optimizer, every)
    for entry in ENTRIES:
        if entry.task not in SHORT and not entry.method.endswith("dense"):
            yield _long(entry, every)


def _both(method: str, optimizer: str, every: dict[tuple[str, str], Cell]) -> Judged:
    told, worst, passes, whole = [], 0.0, True, True
    for task in SHORT:
        own, today, dense = (every[task, name] for name in (method, f"{optimizer}-today", f"{optimizer}-dense"))
        behind, share = apart(own, dense), closed(own, today, dense)
        whole &= own.whole and today.whole and dense.whole
        if behind is None:
            continue
        worst = max(worst, behind.mean)
        passes &= behind.mean <= math.log1p(BEHIND) and (share is None or share >= CLOSED)
        gap = "today has no gap" if share is None else f"{100 * share:.0f} % of today's gap closed"
        told.append(f"{behind.percent} on {task} ({gap})")
    return Judged(ALL[method].title, passes if whole else None, " and ".join(told), worst)


def _long(entry: Entry, every: dict[tuple[str, str], Cell]) -> Judged:
    own, dense = every[entry.task, entry.method], every[entry.task, f"{entry.optimizer}-dense"]
    behind, title = apart(own, dense), f"{ALL[entry.method].title} on {entry.task}"
    if behind is None or not (own.whole and dense.whole):
        return Judged(title, None, "", math.inf)
    return Judged(title, behind.mean <= math.log1p(LONG_BEHIND), behind.percent, behind.mean)


def verdict(results: Results) -> str:
    """One sentence."""
    every = list(judged(results))
    passed = [f"{one.title}: {one.numbers}" for one in every if one.passes]
    unknown = [one.title for one in every if one.passes is None]
    if passed:
        return f"Gate passed, measured against dense by paired seeds, by {'; by '.join(passed)}."
    if unknown:
        known = [one for one in every if one.passes is False]
        far = "; ".join(f"not by {one.title}: {one.numbers}" for one in known)
        return f"Gate not decided: {len(unknown)} of {len(every)} ways to pass wait for trainings{far and ', ' + far}."
    far = "; ".join(f"{one.title} ends {one.numbers}" for one in sorted(every, key=lambda one: one.worst))
    return f"Gate not passed, measured against dense by paired seeds: {far}."


def rows(entries: Sequence[Entry], results: Results) -> list[list[str]]:
    """Of a task, each method in the order of the plan, optimizer by optimizer."""
    found = {entry.method: cell(entry, results) for entry in entries}
    order = list(dict.fromkeys(entry.optimizer for entry in entries))
    return [_row(one, found) for one in sorted(found.values(), key=lambda one: order.index(one.entry.optimizer))]


def _row(one: Cell, found: dict[str, Cell]) -> list[str]:
    task, optimizer = one.entry.task, one.entry.optimizer
    joint = JOINT if one.entry.method.endswith(JOINT) else ""
    dense, today = found[f"{optimizer}-dense{joint}"], None if joint else found.get(f"{optimizer}-today")
    title, rate = ALL[one.entry.method].title, "" if one.best is None else f"{one.best.rate:g}"
    if not one.ends:
        return [title, rate, *[""] * 7]
    losses = list(one.ends.values())
    perplexities = [math.exp(loss) for loss in losses]
    error = f"{stdev(perplexities) / math.sqrt(len(losses)):.2g}" if len(losses) > 1 else ""
    behind = apart(one, dense) if one is not dense else None
    share = closed(one, today, dense) if today is not None and one not in (dense, today) else None
    ends = [line["curve"][-1] for line in one.lines]
    sent = [f"{fmean(end[place] for end in ends):.1f}" for place in (1, 2)]
    gap = "" if share is None else f"{100 * share:.0f} %"
    against = "" if behind is None else behind.percent
    return [title, rate, shown(fmean(losses), task), error, str(len(losses)), against, gap, *sent]


HEADS = ("method", "rate", "perplexity", "± s.e.", "seeds", "against dense", "of today's gap", "MB", "MB, the rest")


def search(entries: Sequence[Entry], results: Results) -> str:
    """The grid of a task."""
    found = []
    for entry in entries:
        one = cell(entry, results)
        losses = [(run.rate, loss) for run in one.tried if (loss := results.loss(run)) is not None]
        tried = [f"{rate:g}: {shown(loss, entry.task)}" for rate, loss in losses]
        if tried:
            found.append([ALL[entry.method].title, ", ".join(tried), "" if one.best is None else "done"])
    return table(["method", "rate: perplexity", ""], found) if found else "Nothing is known yet."


def left(results: Results) -> str:
    """What is missing."""
    lines = []
    for task in TASKS:
        lacking = [entry for entry in ENTRIES if entry.task == task and not cell(entry, results).whole]
        if lacking:
            lines.append(f"- {task}: " + ", ".join(_lacks(entry, results) for entry in lacking))
    first = next(iter(wanted(results)), None)
    if first is not None:
        lines.append(f"- Next: {first.task} {first.method}, rate {first.rate:g}, seed {first.seed}")
    return "\n".join(lines) or "Nothing."


def _lacks(entry: Entry, results: Results) -> str:
    one = cell(entry, results)
    if one.best is None:
        return f"{entry.method} (search, {len(one.tried)} trainings known)"
    return f"{entry.method} ({len(one.ends)} of {max(1, len(entry.seeds))} seeds)"


def known(results: Results) -> str:
    """Perplexities that are known from elsewhere, and those found here."""
    lines = []
    for run, expected in KNOWN.items():
        loss = results.loss(run)
        own = "" if loss is None else shown(loss, run.task)
        lines.append([f"{run.task}, {ALL[run.method].title}", f"{run.rate:g}", f"{expected:g}", own])
    return table(["training with seed 0", "rate", "elsewhere", "here"], lines)


def report(results: Results) -> str:
    """All tables, and the verdict."""
    parts = [
        f"Rates by a search with one seed, ends with seeds {', '.join(map(str, FRESH))}; long trainings: one seed."
    ]
    for task in TASKS:
        wide = f", at the rates of {WIDE[task]}" if task in WIDE else ""
        entries = [entry for entry in ENTRIES if entry.task == task]
        parts += [f"## {task}{wide}", table(HEADS, rows(entries, results)), search(entries, results)]
    seeds = ", ".join(map(str, OTHER_ENTRIES[0].seeds))
    others = table(HEADS, rows(OTHER_ENTRIES, results)), search(OTHER_ENTRIES, results)
    parts += [f"## {OTHER_ENTRIES[0].task}, other optimizers, seeds {seeds}", *others]
    parts += ["## Known from elsewhere", known(results), "## Missing", left(results), "## Verdict", verdict(results)]
    return "\n\n".join(parts)
