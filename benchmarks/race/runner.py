"""Trains what is missing, in several processes, until time is up."""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.results import Results, commit, line_of
from benchmarks.race.run import CPU, Run, Simulation
from benchmarks.race.tasks import CACHE, TASKS, Loaded

SCRATCH = CACHE
"""Interrupted trainings; git ignores it."""


def add_arguments(parser: argparse.ArgumentParser, results: Path) -> None:
    """Add what says how trainings run, and where their results are kept by default."""
    parser.add_argument("--minutes", type=float, default=60.0, help="that trainings may take (default: 60)")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each (default: 1)")
    data = Path(os.environ.get("RACE_DATA", "data"))
    parser.add_argument("--data", type=Path, default=data, help="folder of the texts (default: RACE_DATA, or data)")
    parser.add_argument("--results", type=Path, default=results, help="folder of the results")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="folder of trainings that were interrupted")
    parser.add_argument("--device", default="cpu", help="of the trainings (default: cpu); results tell devices apart")
    parser.add_argument("--nice", type=int, default=10, help="niceness of the workers (default: 10)")


@functools.cache
def loaded(task: str, data: Path) -> Loaded:
    """The data of a task, read once in a process."""
    with CPU:
        return TASKS[task].load(data)


def train(run: Run, data: Path, scratch: Path, deadline: float) -> dict[str, Any] | None:
    """Train in this process, from where it was interrupted; return the line to keep, or None if time is up."""
    simulation = Simulation(run, loaded(run.task, data))
    saved = scratch / f"{run.key}.pt"
    if saved.exists():
        simulation.load(torch.load(saved, weights_only=False))
    if not simulation.train(lambda: time.time() > deadline, saved):
        return None
    saved.unlink(missing_ok=True)
    return line_of(simulation)


def race(
    results: Results,
    wanted: Callable[[Results], Sequence[Run]],
    minutes: float,
    workers: int,
    data: Path,
    scratch: Path,
    niceness: int,
    device: str = "cpu",
) -> None:
    """Train what is wanted, the first ones first; results are kept as they come."""
    deadline = time.time() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    running: dict[Future[Any], Run] = {}
    with ProcessPoolExecutor(workers, context, initializer=_prepare, initargs=(niceness, device)) as pool:
        while True:
            results.read()
            busy = {run.key for run in running.values()}
            ready = [run for run in wanted(results) if run.key not in busy]
            while ready and len(running) < workers and time.time() < deadline:
                run = ready.pop(0)
                running[pool.submit(train, run, data, scratch, deadline)] = run
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, line = running.pop(future), future.result()
                if line is not None:
                    results.add(line)
                    print(_told(run, results), flush=True)
    left = len(wanted(results))
    print(f"{left} trainings wait for more time." if left else "All of these trainings are done.")


def _prepare(niceness: int, device: str) -> None:
    os.nice(niceness)
    torch.set_num_threads(1)
    if device != "cpu":  # torch then looks at each call, which takes time on a CPU
        torch.set_default_device(device)
    commit()


def _told(run: Run, results: Results) -> str:
    line = results.of(run)
    assert line is not None
    step, matrices, vectors, _ = line["curve"][-1]
    loss = results.loss(run) or math.nan
    shown = f"perplexity {math.exp(loss):.2f}" if TASKS[run.task].perplexity and loss < 50 else f"loss {loss:.4f}"
    settings = " ".join(f"{name} {value}" for name, value in run.outer)
    megabytes = f"{matrices:.2f} + {vectors:.2f} MB"
    return f"{run.task} {run.method} rate {run.rate:g} {settings} seed {run.seed}: {shown}, {megabytes}, step {step}"


def look(data: Path) -> None:
    """Three methods on a short training, in about four minutes on one core, for anyone to see."""
    for method, rate in (("dense", 8.0), ("ours", 8.0), ("averaging-10", 8.0)):
        simulation = Simulation(Run("lstm-150", method, rate), loaded("lstm-150", data))
        simulation.train(lambda: False, None)
        step, matrices, vectors, loss = simulation.curve[-1]
        print(f"{method:14} {step} steps, {matrices + vectors:8.2f} MB, perplexity {math.exp(loss):.1f}", flush=True)
