"""Which trainings are wanted next: those that decide first.

Rates are searched with one seed on a grid in factors of two, which grows as long as the best rate is its last one.
Fresh seeds then train at the best rate. Long trainings have the search alone; those with larger batches take over the
rates of the same training with small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.race.configurations import OTHERS
from benchmarks.race.results import Results
from benchmarks.race.run import Run

SEED = 1
"""Of the search."""
FRESH = 2, 3, 4
"""Seeds of results."""
SHORT = "gpt-300", "lstm-600"
LONG = "lstm-3000", "gpt-3000"
WIDE = {"lstm-3000-wide": "lstm-3000", "gpt-3000-wide": "gpt-3000"}
"""Trainings with four times the batch, and those whose rates they take over."""
OPTIMIZERS = "muon", "lion"
RULES = {"muon": ("average-gain", "steps-gain"), "lion": ("steps-gain", "average-gain")}
"""The two that may pass the gate, the expected one first."""
RATES = {"muon": (4.0, 8.0, 16.0, 32.0), "lion": (0.5, 1.0, 2.0)}
HIGHER_RATES = {"adafactor": (16.0, 32.0, 64.0), "sgd": (200.0, 400.0, 800.0)}
OTHER_RATES = dict.fromkeys(OTHERS, (4.0, 8.0, 16.0)) | HIGHER_RATES
LONG_RATES = {"muon": (4.0, 8.0, 16.0), "lion": (0.25, 0.5, 1.0)}
JOINT = "-joint"
"""End of names where gradients are clipped by the norm of their mean, at the rates of those that each rank clips."""
WIDEST = 8
"""Factors of two that a grid may grow by."""
KNOWN = {
    Run("gpt-300", "muon-dense", 1.0): 121.7,
    Run("gpt-300", "muon-today", 1.0): 154.0,
    Run("gpt-300", "muon-steps-drift", 1.0): 123.5,
    Run("gpt-300", "lion-dense", 0.3): 179.0,
    Run("gpt-300", "lion-today", 0.3): 280.0,
    Run("gpt-300", "lion-steps-agreed", 0.3): 170.6,
}
"""Trainings with seed 0 whose perplexity other programs have found: docs/reports/adam-earlier.md for the first
two of each optimizer, and a trial of drift in which weights that are agreed on decay, and not copies."""


class Entry(NamedTuple):
    """A method on a task."""

    task: str
    method: str
    rates: tuple[float, ...]
    """Multiples of the task's rate that the search begins with; empty: those of another entry."""
    seeds: tuple[int, ...] = FRESH

    @property
    def optimizer(self) -> str:
        return self.method.split("-")[0]


class Search(NamedTuple):
    """How far the search of an entry is."""

    tried: list[Run]
    missing: list[Run]
    best: Run | None
    """None: not known yet."""


def _entries() -> Iterator[Entry]:
    def short(optimizer: str, names: tuple[str, ...]) -> Iterator[Entry]:
        for task in SHORT:
            for name in names:
                yield Entry(task, f"{optimizer}-{name}", RATES[optimizer])

    for optimizer in OPTIMIZERS:
        yield from short(optimizer, ("dense", "today", RULES[optimizer][0]))
    for optimizer in OPTIMIZERS:
        yield from short(optimizer, (RULES[optimizer][1],))
    long = {optimizer: ("dense", RULES[optimizer][0].replace("gain", "warm")) for optimizer in OPTIMIZERS}
    for optimizer, names in long.items():
        for name in names:
            yield Entry("lstm-3000", f"{optimizer}-{name}", LONG_RATES[optimizer], ())
    for optimizer, names in long.items():
        for name in names:
            yield Entry("lstm-3000-wide", f"{optimizer}-{name}", (), ())
    for optimizer in OPTIMIZERS:
        for name in ("dense", RULES[optimizer][0]):
            yield Entry("lstm-600", f"{optimizer}-{name}{JOINT}", ())
    yield from short("muon", ("average-sparse",))
    for optimizer in OPTIMIZERS:
        scored = tuple(name.replace("gain", "drift") for name in RULES[optimizer])
        yield from short(optimizer, (*scored, RULES[optimizer][0].replace("gain", "agreed")))
    for task in ("gpt-3000", "gpt-3000-wide"):
        for optimizer, names in long.items():
            for name in names:
                yield Entry(task, f"{optimizer}-{name}", () if task in WIDE else LONG_RATES[optimizer], ())


ENTRIES = tuple(_entries())
"""In the order of their trainings."""
OTHER_ENTRIES = tuple(
    Entry("lstm-600", f"{optimizer}-{name}", OTHER_RATES[optimizer], FRESH[:2])
    for optimizer in OTHERS
    for name in ("dense", "today", "steps-gain", *(["ours"] if optimizer == "adamw" else []))
)
"""Other optimizers, which decide nothing."""
# Seconds of one training on one core of an AMD EPYC that other work kept busy, in the mean over dense, today and drift.
# Ten steps of some of them were timed (`--seconds`); the first two rows of 3000 steps are five and ten times those of
# the short ones, and large batches were timed densely, those of the GPT with three steps. Of dense training's time,
# today's exchange took 1.01 to 1.04 times, and drift 0.97 to 1.27 times: most with Lion on the LSTM.
#
#                    Muon    Lion
#   gpt-300           109      83
#   lstm-600           38      30
#   lstm-3000         190     150
#   gpt-3000         1090     830
#   lstm-3000-wide    330     280
#   gpt-3000-wide    3700    3600
#
# If no grid grows, the first rule of both optimizers on both short tasks takes 1.6 hours of one core in 78 trainings,
# the second rule 0.5 hours in 26; long LSTM trainings 0.9 hours; embeddings by second moments, other scores and other
# decays 1.7 hours; long GPT trainings 3.2 hours, and 4.1 hours more with large batches.
TASKS = tuple(dict.fromkeys(entry.task for entry in ENTRIES))


def entry_of(task: str, method: str) -> Entry:
    """The entry of a method on a task."""
    return next(entry for entry in ENTRIES if (entry.task, entry.method) == (task, method))


def searched(entry: Entry, results: Results) -> Search:
    """Follow the search as far as results go."""
    if not entry.rates:
        like = entry_of(WIDE.get(entry.task, entry.task), entry.method.removesuffix(JOINT))
        other = searched(like, results)
        if other.best is None:
            return Search([], other.missing, None)
        run = replace(other.best, task=entry.task, method=entry.method)
        return Search([run], [], run) if results.of(run) else Search([run], [run], None)
    rates = sorted(entry.rates)
    while True:
        tried = [Run(entry.task, entry.method, rate, SEED) for rate in rates]
        missing = [run for run in tried if results.of(run) is None]
        if missing:
            return Search(tried, missing, None)
        best = min(tried, key=lambda run: results.loss(run) or 0.0)
        if best is tried[-1] and len(tried) < len(entry.rates) + WIDEST:
            rates = [*rates, 2 * rates[-1]]
        elif best is tried[0] and len(tried) < len(entry.rates) + WIDEST:
            rates = [rates[0] / 2, *rates]
        else:
            return Search(tried, [], best)


def fresh(entry: Entry, best: Run) -> list[Run]:
    """Trainings that are reported beside the search."""
    return [replace(best, seed=seed) for seed in entry.seeds]


def missing(entry: Entry, results: Results) -> list[Run]:
    """Trainings of an entry that can be done now."""
    search = searched(entry, results)
    return search.missing or [run for run in fresh(entry, search.best or search.tried[0]) if results.of(run) is None]


def wanted(results: Results, entries: Sequence[Entry] = ENTRIES) -> list[Run]:
    """All trainings that can be done now, in the order of the plan."""
    found = {run.key: run for run in KNOWN if entries is ENTRIES and results.of(run) is None}
    for entry in entries:
        found |= {run.key: run for run in missing(entry, results)}
    return list(found.values())
