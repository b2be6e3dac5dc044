"""The closed loop: training with n simulated ranks, with the same number of bytes for every method.

The captured energy of one step does not decide the quality of training. Here the next gradient is computed at the
parameters after the last update, and methods are compared by the loss that they reach with equal traffic.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse import simulate
from lightning_sparse.memories import MomentumCorrection
from lightning_sparse.tools.compare import jobs
from lightning_sparse.tools.compare.jobs import Job
from lightning_sparse.tools.compare.methods import DENSE, Method, choose
from lightning_sparse.tools.compare.tasks import TASKS, Task, make

WINDOW = 20
"""Training losses are means over this many steps."""


class Point(NamedTuple):
    """State of a run after some steps."""

    step: int
    megabytes: float
    """Sent by each rank so far, mean over ranks."""
    loss: float
    """Mean training loss of the latest steps."""
    quality: float
    """Accuracy in percent or perplexity on the validation data."""


class Run(NamedTuple):
    """One training."""

    method: str
    density: float
    """Target density of the method."""
    points: list[Point]
    actual_density: float
    """Mean share of coordinates in the updates."""

    @property
    def last(self) -> Point:
        """The end of the training."""
        return self.points[-1]


def train(task: Task, method: Method, density: float, *, steps: int, every: int = 50) -> Run:
    """Train a task behind a sparsified exchange of simulated ranks.

    Args:
        task: fresh; trained in place.
        method: exchanges the gradients.
        density: target for the method.
        steps: length of the training.
        every: steps between the points that are kept; the last step is always kept.

    Raises:
        FloatingPointError: if the loss becomes non-finite.
    """
    points: list[Point] = []
    losses: list[float] = []
    sent = updated = 0.0

    def gradients() -> Iterator[Tensor]:
        for _ in range(steps):
            yield task.gradients()

    traces = simulate(
        gradients(),
        sparsifier=method.sparsifier,
        density=density,
        memory=method.memory,
        exchange=method.exchange,
    )
    for trace in traces:
        task.apply(trace.update, method.early)
        losses.append(task.loss)
        if not math.isfinite(task.loss):
            raise FloatingPointError(f"{method.name} diverged at step {trace.step}.")
        sent += float(trace.bytes_sent.mean()) / 1e6
        updated += trace.density
        if (trace.step + 1) % every == 0 or trace.step + 1 == steps:
            recent = losses[-WINDOW:]
            points.append(Point(trace.step + 1, sent, sum(recent) / len(recent), task.evaluate()))
    return Run(method.name, density, points, updated / steps)


class Result(NamedTuple):
    """End of a training; a line of ``judge.csv``. NaN if it diverged."""

    task: str
    ranks: int
    density: float
    """Density of MiCRO, whose bytes every method may send. 1 for dense."""
    method: str
    seed: int
    steps: int
    given_density: float
    """Target density of the method, at which it sends as many bytes."""
    actual_density: float
    """Mean share of coordinates in the updates."""
    megabytes: float
    """Sent by each rank, mean over ranks."""
    loss: float
    """Mean training loss of the last steps."""
    quality: float
    quality_name: str
    """Accuracy in percent or perplexity, on the validation data."""

    @property
    def key(self) -> tuple[str, int, float, str, int, int]:
        """Key of its job."""
        return self.task, self.ranks, self.density, self.method, self.seed, self.steps


class CurvePoint(NamedTuple):
    """State of a training after some steps; a line of ``judge_curves.csv``."""

    task: str
    ranks: int
    density: float
    method: str
    seed: int
    steps: int
    step: int
    megabytes: float
    loss: float
    quality: float


def plan(*, tasks: Sequence[str], ranks: int, methods: Sequence[str] | None, **settings: Any) -> list[Job]:
    """Return jobs for every method on every task, density and seed; dense once for each task and seed.

    Args:
        tasks: names in :data:`~lightning_sparse.tools.compare.tasks.TASKS`.
        ranks: number of simulated ranks, at least 2: a single rank sends nothing.
        methods: names in :data:`~lightning_sparse.tools.compare.methods.METHODS`; None: all.
        settings: densities, seeds and other arguments of :func:`~lightning_sparse.tools.compare.jobs.plan`. A method
            may send the bytes of MiCRO at a density.

    Example:
        >>> jobs = plan(tasks=["digits"], ranks=2, densities=[0.1], methods=["top_k"], seeds=[0], steps=5)
        >>> [(job.method, job.density) for job in jobs]
        [('dense', 1.0), ('top_k', 0.1)]
    """
    chosen = [DENSE, *choose(methods)]
    return jobs.plan(tasks, kind="task", known=list(TASKS), ranks=[ranks], least_ranks=2, methods=chosen, **settings)


def execute(job: Job) -> tuple[Result, list[CurvePoint]]:
    """Train once. If it diverges, the numbers are NaN and there is no curve."""
    [method] = choose([job.method])
    settings = {"momentum": 0.0} if isinstance(method.memory, MomentumCorrection) else {}
    task = make(job.source, ranks=job.ranks, seed=job.seed, text=job.text, **settings)
    given = 1.0 if method is DENSE else method.equal_density(job.density, job.ranks, task.numel)
    try:
        run = train(task, method, given, steps=job.steps, every=job.every)
    except FloatingPointError:
        nan = float("nan")
        return Result(*job.key, given, nan, nan, nan, nan, task.quality), []
    last = run.last
    result = Result(*job.key, given, run.actual_density, last.megabytes, last.loss, last.quality, task.quality)
    return result, [CurvePoint(*job.key, *point) for point in run.points]


def execute_all(wanted: Iterable[Job], processes: int) -> Iterator[tuple[Result, list[CurvePoint]]]:
    """Train in several processes of one torch thread each, and yield results as they finish.

    Trainings that nobody waits for any more end, after Ctrl-C or an error, and with this process.

    Args:
        wanted: the trainings.
        processes: at least 1. With 1, this process does the work.

    Raises:
        ValueError: if there is no process.
    """
    if processes < 1:
        raise ValueError(f"Expected at least 1 process, but got {processes}.")
    if processes == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from map(execute, wanted)
        finally:
            torch.set_num_threads(before)
        return
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=serve) as pool:
        try:
            for future in as_completed([pool.submit(execute, job) for job in wanted]):
                yield future.result()
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def serve() -> None:
    """Let this process work for its parent: with one torch thread, until that ends it, or is gone itself."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
