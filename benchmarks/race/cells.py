"""What the results say of a method on a task: the best settings, fresh seeds, and the distance from another method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from benchmarks.race.plan import ENTRIES, Entry, fresh, searched
from benchmarks.race.results import Results
from benchmarks.race.run import Run
from benchmarks.race.tasks import TASKS

ERRORS = 2.0
"""Standard errors from which on a method is ahead or behind."""


class Cell(NamedTuple):
    """A method on a task."""

    entry: Entry
    best: Run | None
    """Seed 0; None: the search goes on."""
    searched: float | None
    """Loss of the best so far, with seed 0."""
    tried: list[Run]
    """All that is known with seed 0."""
    lines: dict[int, dict[str, Any]]
    """Results of fresh seeds."""

    @property
    def losses(self) -> dict[int, float]:
        """At the end, by fresh seed."""
        ends = {seed: line["curve"][-1][-1] for seed, line in self.lines.items()}
        return {seed: math.inf if loss is None else loss for seed, loss in ends.items()}

    @property
    def megabytes(self) -> tuple[float, float] | None:
        """Sent by a rank: for matrices and for vectors."""
        ends = [line["curve"][-1] for line in self.lines.values()]
        return (fmean(end[1] for end in ends), fmean(end[2] for end in ends)) if ends else None


class Distance(NamedTuple):
    """How far a method ends from another one with the same seeds, in nats."""

    mean: float
    error: float
    """Standard error of the mean."""
    seeds: int

    @property
    def verdict(self) -> str:
        """One word."""
        if self.seeds < 2:
            return "one seed"
        if abs(self.mean) <= ERRORS * self.error:
            return "level"
        return "ahead" if self.mean < 0 else "behind"


def cells(results: Results, task: str) -> list[Cell]:
    """All methods of a task, in the order of the plan."""
    return [_cell(entry, results) for entry in ENTRIES if entry.task == task]


def _cell(entry: Entry, results: Results) -> Cell:
    best = searched(entry, results).best
    tried = known(entry, results)
    some = [loss for run in tried if (loss := results.loss(run)) is not None]
    lines = {run.seed: dict(line) for run in (fresh(entry, best) if best else ()) if (line := results.of(run))}
    return Cell(entry, best, min(some, default=None), tried, lines)


def known(entry: Entry, results: Results) -> list[Run]:
    """Trainings of the search, by settings and rate."""
    found = []
    for line in results.known.values():
        run = line["run"]
        if (run["task"][0], run["method"][0], run["seed"]) != (entry.task, entry.method, 0):
            continue  # most are, and a key takes time
        made = Run(entry.task, entry.method, run["rate"], 0)
        outer = tuple((name, value) for name, value in run["settings"].items() if made.settings.get(name) != value)
        made = Run(entry.task, entry.method, run["rate"], 0, outer)
        if made.key == line["key"]:
            found.append(made)
    return sorted(found, key=lambda run: (run.outer, run.rate))


def distance(one: Cell, other: Cell) -> Distance | None:
    """Paired over the seeds that both have; None: there is none."""
    seeds = sorted(one.losses.keys() & other.losses.keys())
    if not seeds:
        return None
    differences = [one.losses[seed] - other.losses[seed] for seed in seeds]
    error = stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.inf
    return Distance(fmean(differences), error, len(seeds))


def steps_to(lines: Sequence[dict[str, Any]], target: float) -> int | None:
    """The first point of the mean curve that is not above a loss; None: never."""
    if not lines:
        return None
    for points in zip(*(line["curve"] for line in lines), strict=False):
        losses = [math.inf if point[-1] is None else point[-1] for point in points]
        if fmean(losses) <= target:
            return int(points[0][0])
    return None


def shown(loss: float, task: str) -> str:
    """As perplexity or as a loss.

    Example:
        >>> shown(4.0, "lstm-600"), shown(1.912, "shakespeare-2000")
        ('54.6', '1.912')
    """
    if not math.isfinite(loss):
        return "diverged"
    if not TASKS[task].perplexity:
        return f"{loss:.3f}"
    perplexity = math.exp(loss)
    return f"{perplexity:.1f}"
