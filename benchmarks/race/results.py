"""Finished trainings: a line of JSON each, in a file for each task, and never changed."""

from __future__ import annotations

import functools
import json
import math
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import processor
from benchmarks.race.run import Run, Simulation

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"


class Results:
    """What is known of all trainings, by key, each task by one kind of processor: cells never mix them.

    Args:
        folder: of the files.
        on: the processor; None: for each task that of most of its trainings.
    """

    def __init__(self, folder: Path = FOLDER, on: str | None = None) -> None:
        self.folder, self.on = folder, on
        self.known: dict[str, dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        """Know what has been added, here or by others."""
        for path in sorted(self.folder.glob("race-*.jsonl")):
            lines = [line for line in map(json.loads, path.read_text().splitlines()) if "key" in line]
            counts = Counter(line["processor"] for line in lines)
            on = self.on or max(sorted(counts), key=counts.__getitem__, default="")
            self.known |= {line["key"]: line for line in lines if line["processor"] == on}

    def add(self, line: dict[str, Any]) -> None:
        """Keep a finished training."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.known[line["key"]] = line
        with (self.folder / f"race-{line['run']['task'][0]}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, run: Run) -> Mapping[str, Any] | None:
        """The result of a training, if there is one."""
        return self.known.get(run.key)

    def loss(self, run: Run) -> float | None:
        """At the end; infinite where it diverged; None: not known."""
        found = self.of(run)
        if found is None:
            return None
        last = found["curve"][-1][-1]
        return math.inf if last is None else float(last)


def line_of(simulation: Simulation) -> dict[str, Any]:
    """A finished training as it is kept: points of the curve are step, megabytes of matrices, of vectors, and loss."""
    run = simulation.run
    return {
        "key": run.key,
        "run": run.described(),
        "curve": [[step, round(a, 6), round(b, 6), _plain(loss)] for step, a, b, loss in simulation.curve],
        "seconds": round(simulation.seconds, 1),
        "commit": commit(),
        "torch": torch.__version__,
        "processor": processor(simulation.device),
    }


def _plain(loss: float) -> float | None:
    return round(loss, 6) if math.isfinite(loss) else None


@functools.cache
def commit() -> str:
    """That of the working tree when this process began, or an empty string where git does not know."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip()
