"""Every way to train over a slow link, at equal bytes and with an equal search of rates.

    python -m benchmarks.race --minutes 100 --workers 2 --data FOLDER
    python -m benchmarks.race --quick --data FOLDER
    python -m benchmarks.race --report

A finished training is a line in `benchmarks/results`; the same command again does what is missing, and goes on with
trainings that time has interrupted. Nothing is committed. `--data` is a folder with `wikitext-2` and `tinyshakespeare`
in it, or where they are downloaded to; the variable RACE_DATA names it, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from jsonargparse import CLI

from benchmarks.race.results import FOLDER, Results
from benchmarks.race.runner import SCRATCH, look, race

DATA = Path(os.environ.get("RACE_DATA", "data"))


def main(
    minutes: float = 60.0,
    workers: int = 1,
    tasks: list[str] | None = None,
    data: Path = DATA,
    results: Path = FOLDER,
    scratch: Path = SCRATCH,
    niceness: int = 10,
    quick: bool = False,
    report: bool = False,
) -> None:
    """Train what is missing, as far as time goes.

    Args:
        minutes: that trainings may take.
        workers: processes, of one thread each.
        tasks: names; None: all.
        data: folder of the texts.
        results: folder of the results.
        scratch: folder of interrupted trainings.
        niceness: of the workers.
        quick: four minutes: three methods on a short task, not kept.
        report: write tables and figures, and train nothing.
    """
    torch.set_num_threads(1)
    if report:
        from benchmarks.race.report import write

        write(Results(results))
    elif quick:
        look(data)
    else:
        race(Results(results), minutes, workers, tasks, data, scratch, niceness)


if __name__ == "__main__":
    CLI(main, as_positional=False)
