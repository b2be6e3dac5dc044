"""Every way to train over a slow link, at equal bytes and with an equal search of rates.

    python -m benchmarks.race --minutes 100 --workers 2 --data FOLDER
    python -m benchmarks.race --quick --data FOLDER
    python -m benchmarks.race --count --data FOLDER
    python -m benchmarks.race --report

A finished training is a line in `benchmarks/results`; the same command again does what is missing, and goes on with
trainings that time has interrupted. Nothing is committed. `--data` is a folder with `wikitext-2` and `tinyshakespeare`
in it, or where they are downloaded to; the variable RACE_DATA names it, too.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

import torch

from benchmarks.machine import processor
from benchmarks.race.configurations import CONFIGURATIONS
from benchmarks.race.counted import count
from benchmarks.race.plan import chosen_entries, wanted
from benchmarks.race.results import FOLDER, Results
from benchmarks.race.runner import SCRATCH, look, race
from benchmarks.race.tasks import TASKS


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="that trainings may take (default: 60)")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each (default: 1)")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), metavar="TASK", help=f"of {', '.join(TASKS)}")
    names = ", ".join(CONFIGURATIONS)
    parser.add_argument("--methods", nargs="+", choices=list(CONFIGURATIONS), metavar="METHOD", help=f"of {names}")
    data = Path(os.environ.get("RACE_DATA", "data"))
    parser.add_argument("--data", type=Path, default=data, help="folder of the texts (default: RACE_DATA, or data)")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="folder of trainings that were interrupted")
    parser.add_argument("--device", default="cpu", help="of the trainings (default: cpu); results tell devices apart")
    parser.add_argument("--nice", type=int, default=10, help="niceness of the workers (default: 10)")
    parser.add_argument("--quick", action="store_true", help="train three methods on a short task; nothing is kept")
    parser.add_argument("--report", action="store_true", help="write tables and figures, and train nothing")
    parser.add_argument("--count", action="store_true", help="count bytes for 4, 8 and 32 ranks, on LSTM gradients")
    return parser.parse_args()


def main() -> None:
    chosen = parse_arguments()
    torch.set_num_threads(1)
    if chosen.report:
        from benchmarks.race.report import write

        write(Results(chosen.results))
    elif chosen.count:
        count("lstm-600", chosen.data, chosen.results)
    elif chosen.quick:
        look(chosen.data)
    else:
        results = Results(chosen.results, on=processor(chosen.device))
        missing = functools.partial(wanted, entries=chosen_entries(chosen.tasks, chosen.methods))
        where = chosen.data, chosen.scratch
        race(results, missing, chosen.minutes, chosen.workers, *where, chosen.nice, chosen.device)


if __name__ == "__main__":
    main()
