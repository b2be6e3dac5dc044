"""Muon and Lion behind a sparse exchange: dense, as today, and by drift, with an equal search of rates.

    python -m benchmarks.drift --minutes 600 --workers 2 --data FOLDER
    python -m benchmarks.drift --report
    python -m benchmarks.drift --seconds --data FOLDER

A finished training is a line in `benchmarks/results/optimizers`; the same command again does what is missing, those
that decide the gate first, and goes on with trainings that were interrupted. Nothing is committed. For `--data` see
`python -m benchmarks.race`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from benchmarks.drift.plan import TASKS, wanted
from benchmarks.drift.report import report
from benchmarks.drift.seconds import estimate
from benchmarks.machine import processor
from benchmarks.race.results import FOLDER, Results
from benchmarks.race.run import Run
from benchmarks.race.runner import SCRATCH, race

OWN = FOLDER / "optimizers"
"""Apart from the race's, whose page counts all that lies beside it."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drift", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="that trainings may take (default: 60)")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each (default: 1)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=f"of {', '.join(TASKS)}")
    data = Path(os.environ.get("RACE_DATA", "data"))
    parser.add_argument("--data", type=Path, default=data, help="folder of the texts (default: RACE_DATA, or data)")
    parser.add_argument("--results", type=Path, default=OWN, help="folder of the results")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="folder of trainings that were interrupted")
    parser.add_argument("--device", default="cpu", help="of the trainings (default: cpu); results tell devices apart")
    parser.add_argument("--nice", type=int, default=10, help="niceness of the workers (default: 10)")
    parser.add_argument("--report", action="store_true", help="print tables and the verdict, and train nothing")
    parser.add_argument("--seconds", action="store_true", help="print how long trainings take, by ten steps of each")
    return parser.parse_args()


def main() -> None:
    chosen = parse_arguments()
    torch.set_num_threads(1)
    if chosen.report:
        print(report(Results(chosen.results)))
    elif chosen.seconds:
        estimate(chosen.data, chosen.tasks)
    else:
        results = Results(chosen.results, on=processor(chosen.device))
        where = chosen.data, chosen.scratch

        def missing(results: Results) -> list[Run]:
            return [run for run in wanted(results) if chosen.tasks is None or run.task in chosen.tasks]

        race(results, missing, chosen.minutes, chosen.workers, *where, chosen.nice, chosen.device)


if __name__ == "__main__":
    main()
