"""Seconds that a step of each method takes between real ranks over shaped links.

    sudo python -m benchmarks.race.timed

The LSTM of 14 million parameters in `benchmarks/models14m.py`, four ranks in namespaces of this machine with cables of
50, 100 and 1000 Mbit/s (`benchmarks/links.py`). Nothing else may run meanwhile. Exchanges begin when backward has
ended: no method overlaps them, also not those that could. A method with local steps is timed with one exchange a step,
and its step has 1/H of that. Every timing is a line in `benchmarks/results/race-times.jsonl`, and the page shows
medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.links import launch, limit, network, stop, why_not
from benchmarks.machine import processor
from benchmarks.models14m import MODELS
from benchmarks.race.configurations import CONFIGURATIONS
from benchmarks.race.flat import Flat
from benchmarks.race.methods.base import Place
from benchmarks.race.results import FOLDER, ROOT, commit
from lightning_sparse.engine.drivers import drive
from lightning_sparse.engine.network import TorchCollective

FILE = "race-times.jsonl"
METHODS = ("dense", "powersgd-1", "averaging-10", "sparseloco-10", "demo", "distro", "ours", "ours-300", "ours-600")
LINKS = (50, 100, 1000)
"""Mbit/s."""
WARM, TAKEN = 1, 3
"""Steps that are not timed, and that are."""


class Step(NamedTuple):
    """Seconds of a step, medians over rounds."""

    compute: float
    exchange: float
    """Of a step on average: where methods train alone for H steps, an H-th of an exchange."""


def read(folder: Path) -> dict[tuple[str, int], Step]:
    """Steps by method and Mbit/s; empty where nothing was timed."""
    path = folder / FILE
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        found.setdefault((line["method"], line["mbit"]), []).append(line)
    return {
        key: Step(*(median(line[name] for line in lines) for name in ("compute", "exchange")))
        for key, lines in found.items()
    }


def rank(job: dict[str, Any]) -> None:
    """Time all methods of a job, one after the other; rank 0 writes the lines."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = TorchCollective()
    for name in job["methods"]:
        compute, exchange = timed(name, comm)
        line = {"method": name, "mbit": job["mbit"], "round": job["round"], "ranks": dist.get_world_size()}
        line |= {"compute": round(compute, 5), "exchange": round(exchange, 5)}
        line |= {"commit": commit(), "torch": torch.__version__, "processor": processor()}
        if dist.get_rank() == 0:
            with Path(job["out"]).open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{job['mbit']} Mbit/s, {name}: {compute:.3f} + {exchange:.3f} s", flush=True)
    dist.destroy_process_group()


def timed(name: str, comm: TorchCollective) -> Step:
    """Take some steps on this rank."""
    here, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = MODELS["lstm"]()
    flat = Flat(model)
    configuration = CONFIGURATIONS[name]
    rounds = configuration.settings.get("every", 1)
    settings = {**configuration.settings, **({"every": 1} if rounds > 1 else {})}
    method = configuration.make(flat, Place(here, n, 10**6), **settings)
    batch = MODELS["lstm"].random_batch(torch.Generator().manual_seed(here))
    steps = []
    for step in range(WARM + TAKEN):
        flat.zero_()
        dist.barrier()
        begin = time.perf_counter()
        model(batch).backward()
        dist.barrier()  # ranks share cores: what one waits for the other's backward is no exchange
        middle = time.perf_counter()
        drive(method.step(1e-4, step), comm)
        dist.barrier()
        steps.append((middle - begin, (time.perf_counter() - middle) / rounds))
    compute, exchange = zip(*steps[WARM:], strict=True)
    return Step(median(compute), median(exchange))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=list(LINKS), help="(default: 50 100 1000)")
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    with network(chosen.ranks) as processes:
        for mbit in chosen.mbit:
            limit(mbit, chosen.ranks)
            for number in range(chosen.rounds):
                job = {"methods": chosen.methods, "mbit": mbit, "round": number, "out": str(chosen.out.resolve())}
                words = [sys.executable, "-m", "benchmarks.race.timed", "--job", json.dumps(job)]
                if problem := launch(words, chosen.ranks, processes, 1800):
                    print(f"{mbit} Mbit/s, round {number}: {problem}", flush=True)


if __name__ == "__main__":
    main()
