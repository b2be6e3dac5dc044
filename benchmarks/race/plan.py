"""The search: which trainings are wanted next, given those that are known.

Rates go in factors of two until the best one has a worse neighbour on both sides; settings of the outer step are then
tried at that rate, all with all, and the rates around it once more if others are better. All of that is with seed 0;
fresh seeds follow, with what was best.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.race.configurations import CONFIGURATIONS
from benchmarks.race.results import Results
from benchmarks.race.run import Run
from benchmarks.race.tasks import TASKS

Outer = tuple[tuple[str, float], ...]


class Entry(NamedTuple):
    """A method on a task."""

    task: str
    method: str
    begin: float
    """Rate that the search begins at."""
    seeds: int = 3
    """Fresh ones."""
    outer: bool = True
    """Whether settings of the outer step are searched; else they are those of the configuration."""


class Search(NamedTuple):
    """How far the search of an entry is."""

    missing: list[Run]
    """Trainings that it waits for."""
    best: Run | None
    """Seed 0, with the best rate and settings; None: not known yet."""


def _entries() -> Iterator[Entry]:
    short = {
        "dense": (16, 2),
        "ours": (8, 2),
        "root": (8, 2),
        "distro": (16, 2),
        "sparseloco-10": (8, 2),
        "turned-600": (8, 2),
        "ours-600": (8, 2),
        "whole-600": (8, 2),
        "turned-whole-600": (8, 2),
        "averaging-10": (16, 2),
        "demo": (16, 4),
        "powersgd-1": (8, 2),
        "averaging-30": (16, 2),
        "diloco-30": (8, 2),
        "sparseloco-30": (4, 2),
        "top_k": (8, 2),
        "late": (8, 1),
        "late-ahead": (16, 1),
        "turned-300": (8, 2),
        "ours-300": (8, 2),
        "turned": (8, 2),
    }
    small = ("ours-600", "turned-600", "whole-600", "turned-whole-600", "sparseloco-10", "distro")
    five = ("ours", "root", "late", "late-ahead", *small)
    for method, (lstm, gpt) in short.items():
        yield Entry("lstm-600", method, lstm, 5 if method in five else 3)
        yield Entry("gpt-300", method, gpt, 5 if method in five else 3)
    for method in ("ours", "parts"):
        yield Entry("lstm-600-nodes", method, 16, 5)
        yield Entry("gpt-300-nodes", method, 2, 3)
    for method in ("dense", "ours", "root"):
        yield Entry("lstm-600-2", method, 8, 3)
        yield Entry("gpt-300-2", method, 2, 3)
    many = ("dense", "ours", "powersgd-1", "diloco-30", "sparseloco-30", "demo")
    more = {
        "lstm-600-8": ("ours-2", "root", "ours-50", "mean"),
        "gpt-300-8": ("root",),
        "lstm-600-32": ("ours-2", "ours-4"),
        "gpt-300-32": ("ours-4",),
    }
    for task, others in more.items():
        for method in (*many, *others):
            lstm, gpt = short.get(method, short["ours"])
            yield Entry(task, method, 2 * lstm if task.startswith("lstm") else gpt, 2)
    for method in ("dense", "ours", "ours-1000", "averaging-10", "diloco-30", "demo"):
        yield Entry("shakespeare-2000", method, 1, 3, outer=False)
    for method in ("dense", "ours", "root", "ours-300", "turned-300", "averaging-10"):
        yield Entry("shift-300", method, 2, 3)
    yield Entry("shakespeare-alone", "dense", 1, 3)
    for method in ("dense", "ours", "ours-1000"):
        yield Entry("shakespeare-pair", method, 1, 3)
    long = (
        "dense",
        "ours-300",
        "turned-300",
        "averaging-10",
        "ours",
        "root",
        "late",
        "ours-600",
        "turned-600",
        "ours-200",
    )
    long += "chunked-300", "decay-300"
    for method in long:
        yield Entry("lstm-3000", method, 4, 3 if method == "averaging-10" else 5)
        yield Entry("gpt-3000", method, 2)


ENTRIES = tuple(_entries())
PUBLISHED = ("shakespeare-alone", "shakespeare-pair")
"""Tasks of a known rate, which is not searched."""


def searched(entry: Entry, results: Results) -> Search:
    """Follow the search as far as results go."""
    run = Run(entry.task, entry.method, entry.begin)
    if entry.task in PUBLISHED:
        return Search([], run)
    missing, best = _bracket(run, results)
    outer = CONFIGURATIONS[entry.method].outer
    if best is None or not outer or not entry.outer:
        return Search(missing, best)
    missing, best = _outer(best, outer, results)
    return Search(missing, None) if best is None else Search(*_bracket(best, results))


def _outer(run: Run, values: Mapping[str, tuple[float, ...]], results: Results) -> tuple[list[Run], Run | None]:
    """All settings with all; the outer rate goes on in factors of two where the best one is the last on its side."""
    while True:
        tried = _grid(run, values)
        missing = [one for one in tried if results.of(one) is None]
        if missing:
            return missing, None
        best = min(tried, key=lambda one: _known(one, results))
        rates = values["outer"]
        if best.settings["outer"] == max(rates):
            values = {**values, "outer": (*rates, 2 * max(rates))}
        elif best.settings["outer"] == min(rates):
            values = {**values, "outer": (*rates, min(rates) / 2)}
        else:
            return [], best


def _bracket(run: Run, results: Results) -> tuple[list[Run], Run | None]:
    """Rates around this one, further out as long as the best is the last one on its side."""
    power = 0
    while True:
        around = [replace(run, rate=run.rate * 2.0 ** (power + i)) for i in (0, 1, -1)]
        missing = [one for one in around if results.of(one) is None]
        if missing:
            return missing, None
        middle, above, below = (_known(one, results) for one in around)
        if middle <= min(above, below):
            return [], around[0]
        power += 1 if above < below else -1
        if abs(power) > 12:
            return [], around[0]


def _grid(run: Run, outer: Mapping[str, tuple[float, ...]]) -> list[Run]:
    given = CONFIGURATIONS[run.method].settings
    found = []
    for values in itertools.product(*outer.values()):
        chosen = dict(zip(outer, values, strict=True))
        found.append(replace(run, outer=tuple((k, v) for k, v in chosen.items() if given.get(k) != v)))
    return found


def _known(run: Run, results: Results) -> float:
    loss = results.loss(run)
    assert loss is not None
    return loss


def fresh(entry: Entry, best: Run) -> list[Run]:
    """Trainings that are reported."""
    return [replace(best, seed=seed) for seed in range(1, entry.seeds + 1)]


def chosen_entries(tasks: Sequence[str] | None = None, methods: Sequence[str] | None = None) -> list[Entry]:
    """Those of some tasks and some methods; None stands for all."""
    found = [entry for entry in ENTRIES if tasks is None or entry.task in tasks]
    return [entry for entry in found if methods is None or entry.method in methods]


def wanted(results: Results, entries: Iterable[Entry]) -> list[Run]:
    """All trainings that can be done now: the longest ones first, of them those of the search."""
    searches: list[Run] = []
    reported: list[Run] = []
    for entry in entries:
        search = searched(entry, results)
        searches += search.missing
        reported += fresh(entry, search.best) if search.best else ()
    found = {run.key: run for run in (*searches, *reported) if results.of(run) is None}
    return sorted(found.values(), key=lambda run: -TASKS[run.task].steps)
