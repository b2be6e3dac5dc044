"""Muon and Lion behind a sparse exchange: dense, as today, and by drift, with an equal search of rates.

    python -m benchmarks.drift --minutes 600 --workers 2 --data FOLDER
    python -m benchmarks.drift --others --minutes 90 --data FOLDER
    python -m benchmarks.drift --report
    python -m benchmarks.drift --seconds --data FOLDER

A finished training is a line in `benchmarks/results/optimizers`; the same command again does what is missing, those
that decide the gate first, and goes on with trainings that were interrupted. Nothing is committed. For `--data` see
`python -m benchmarks.race`. `--others` trains further optimizers on the LSTM alone; of these, SOAP needs
`pip install pytorch-optimizer`, and AdamW with 8 bits `pip install bitsandbytes`.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.drift.plan import ENTRIES, OTHER_ENTRIES, TASKS, wanted
from benchmarks.drift.report import report
from benchmarks.drift.seconds import estimate
from benchmarks.machine import processor
from benchmarks.race.results import FOLDER, Results
from benchmarks.race.run import Run
from benchmarks.race.runner import add_arguments, race

OWN = FOLDER / "optimizers"
"""Apart from the race's, whose page counts all that lies beside it."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drift", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, OWN)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--others", action="store_true", help="train other optimizers, which decide nothing")
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
            runs = wanted(results, OTHER_ENTRIES if chosen.others else ENTRIES)
            return [run for run in runs if chosen.tasks is None or run.task in chosen.tasks]

        race(results, missing, chosen.minutes, chosen.workers, *where, chosen.nice, chosen.device)


if __name__ == "__main__":
    main()
