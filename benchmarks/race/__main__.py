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

import torch

from benchmarks.machine import processor
from benchmarks.race.configurations import CONFIGURATIONS
from benchmarks.race.counted import count
from benchmarks.race.plan import chosen_entries, wanted
from benchmarks.race.results import FOLDER, Results
from benchmarks.race.runner import add_arguments, look, race
from benchmarks.race.tasks import TASKS


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, FOLDER)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), metavar="TASK", help=f"of {', '.join(TASKS)}")
    names = ", ".join(CONFIGURATIONS)
    parser.add_argument("--methods", nargs="+", choices=list(CONFIGURATIONS), metavar="METHOD", help=f"of {names}")
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
