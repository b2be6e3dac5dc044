"""Seconds that a step of each method takes between real ranks over shaped links.

    sudo python -m benchmarks.race.timed

The LSTM of 14 million parameters in `benchmarks/models14m.py`, four ranks in namespaces of this machine with cables of
50, 100 and 1000 Mbit/s (`benchmarks/links.py`). Nothing else may run meanwhile. Exchanges begin when backward has
ended: no method overlaps them, also not those that could. A method with local steps is timed with one exchange a step,
and its step is the computing and 1/H of the rest. Every timing is a line in `benchmarks/results/race-times.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.links import launch, limit, network, why_not
from benchmarks.machine import processor
from benchmarks.models14m import MODELS
from benchmarks.race.configurations import CONFIGURATIONS
from benchmarks.race.flat import Flat
from benchmarks.race.methods.base import Place
from benchmarks.race.results import FOLDER, ROOT, commit
from lightning_sparse.engine.network import TorchCollective, drive

FILE = "race-times.jsonl"
METHODS = ("dense", "powersgd-1", "averaging-10", "sparseloco-10", "demo", "distro", "ours", "ours-300", "ours-600")
WARM, TAKEN = 2, 5
"""Steps that are not timed, and that are."""


def rank(job: dict[str, Any]) -> None:
    """What a rank does; rank 0 writes the line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    here, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = MODELS["lstm"]()
    flat = Flat(model)
    configuration = CONFIGURATIONS[job["method"]]
    settings = dict(configuration.settings)
    rounds = settings.get("every", 1)
    settings |= {"every": 1} if rounds > 1 else {}
    method = configuration.make(flat, Place(here, n, 10**6), **settings)
    batch = MODELS["lstm"].random_batch(torch.Generator().manual_seed(here))
    comm = TorchCollective()
    computing, whole = [], []
    for step in range(WARM + TAKEN):
        dist.barrier()
        begin = time.perf_counter()
        flat.zero_()
        model(batch).backward()
        middle = time.perf_counter()
        drive(method.step(1e-4, step), comm)
        computing.append(middle - begin)
        whole.append(time.perf_counter() - begin)
    compute, exchange = (
        median(computing[WARM:]),
        median(b - a for a, b in zip(computing[WARM:], whole[WARM:], strict=True)),
    )
    if here == 0:
        line = job | {"ranks": n, "compute": compute, "step": compute + exchange / rounds}
        line |= {"commit": commit(), "torch": torch.__version__, "processor": processor()}
        with Path(job["out"]).open("a") as file:
            file.write(json.dumps({k: v for k, v in line.items() if k != "out"}) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[50, 100, 1000], help="(default: 50 100 1000)")
    parser.add_argument("--methods", nargs="+", choices=list(CONFIGURATIONS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--ranks", type=int, default=4, help="(default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each (default: 3)")
    parser.add_argument("--out", type=Path, default=FOLDER / FILE)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        rank(chosen.job)
        return
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    os.environ["PYTHONPATH"] = str(ROOT)
    with network(chosen.ranks) as processes:
        for mbit in chosen.mbit:
            limit(mbit, chosen.ranks)
            for number in range(chosen.rounds):
                for method in chosen.methods:
                    job = {"method": method, "mbit": mbit, "round": number, "out": str(chosen.out.resolve())}
                    words = [sys.executable, "-m", "benchmarks.race.timed", "--job", json.dumps(job)]
                    problem = launch(words, chosen.ranks, processes, 1200)
                    print(f"{mbit} Mbit/s, {method}: {problem or 'done'}", flush=True)


if __name__ == "__main__":
    main()
