"""How long trainings take: ten steps of each, extrapolated."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.drift.plan import ENTRIES, Entry
from benchmarks.race.run import Run, Simulation
from benchmarks.race.runner import loaded
from benchmarks.race.tasks import TASKS

WARM, TIMED = 2, 10
"""Steps before, and steps that are timed."""


def seconds_of(entry: Entry, data: Path) -> float:
    """Of one training, by the processor's time."""
    task, known = TASKS[entry.task], loaded(entry.task, data)
    at_rest = Run(entry.task, entry.method, 1.0, outer=(("warm_up", 0),))  # the first steps are not dearer
    simulation = Simulation(at_rest, known)
    simulation.train(lambda: simulation.done == WARM, None)
    begin = simulation.seconds
    simulation.train(lambda: simulation.done == WARM + TIMED, None)
    each = (simulation.seconds - begin) / TIMED
    begin = time.process_time()
    simulation.ranks[0].validate()
    return each * task.steps + (time.process_time() - begin) * task.steps / task.every


def estimate(data: Path, tasks: list[str] | None) -> None:
    """Print a line for each entry: trainings if the grid does not grow, and seconds of each."""
    total = 0.0
    for entry in ENTRIES:
        if tasks is not None and entry.task not in tasks:
            continue
        count, each = max(1, len(entry.rates)) + len(entry.seeds), seconds_of(entry, data)
        total += count * each
        print(
            f"{entry.task} {entry.method}: {count} trainings of {each:.0f} s, {total / 3600:.2f} h so far", flush=True
        )
