"""Many trainings: which ones, in how many processes, and what is kept of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import torch

from lightning_sparse.bench.judge import train
from lightning_sparse.bench.methods import DENSE, choose
from lightning_sparse.bench.tasks import TASKS, check, label, make
from lightning_sparse.density import check_density
from lightning_sparse.memory import MomentumCorrection


class Job(NamedTuple):
    """One training that is wanted."""

    task: str
    ranks: int
    density: float
    """Whose bytes every method may send: those of MiCRO at this density. 1 for dense."""
    method: str
    seed: int
    steps: int
    every: int
    """Steps between points of the curve."""
    text: str | None = None
    """Text file of the task ``text``; None: the one that comes with Python."""

    @property
    def key(self) -> tuple[str, int, float, str, int, int]:
        """What makes it the same training as another."""
        return self.name, self.ranks, self.density, self.method, self.seed, self.steps

    @property
    def name(self) -> str:
        """Of the task, with its text file if one is given."""
        return label(self.task, self.text)


class Result(NamedTuple):
    """How a training ended; a line of ``judge.csv``. NaN where it diverged."""

    task: str
    ranks: int
    density: float
    """Whose bytes every method may send: those of MiCRO at this density. 1 for dense."""
    method: str
    seed: int
    steps: int
    given_density: float
    """That the method was given, so that it sends as many bytes."""
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
        """As of its job."""
        return self.task, self.ranks, self.density, self.method, self.seed, self.steps


class CurvePoint(NamedTuple):
    """A training after some steps; a line of ``judge_curves.csv``."""

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


def plan(
    *,
    tasks: Sequence[str],
    ranks: int,
    densities: Sequence[float],
    methods: Sequence[str] | None,
    seeds: Sequence[int],
    steps: int,
    every: int = 50,
    text: str | None = None,
) -> list[Job]:
    """Every method on every task at every density with every seed; dense once for each task and seed.

    Args:
        tasks: names in :data:`~lightning_sparse.bench.tasks.TASKS`.
        ranks: number of simulated ranks, at least 2: one alone sends nothing.
        densities: each in (0, 1].
        methods: names in :data:`~lightning_sparse.bench.methods.METHODS`; None: all.
        seeds: of the tasks.
        steps: length of each training, at least 1.
        every: steps between points of the curves, at least 1.
        text: file for the task ``text``.

    Raises:
        ValueError: for unknown names, impossible numbers, and a text that cannot be used.

    Example:
        >>> jobs = plan(tasks=["digits"], ranks=2, densities=[0.1], methods=["topk"], seeds=[0], steps=5)
        >>> [(job.method, job.density) for job in jobs]
        [('dense', 1.0), ('topk', 0.1)]
    """
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise ValueError(f"Unknown tasks {', '.join(unknown)}. Known: {', '.join(TASKS)}.")
    for name, number, least in (("ranks", ranks, 2), ("steps", steps, 1), ("every", every, 1)):
        if number < least:
            raise ValueError(f"Expected {name} to be at least {least} but got {number}.")
    for kind, given in (("tasks", tasks), ("densities", densities), ("seeds", seeds)):
        if not given:
            raise ValueError(f"Expected at least one of {kind} but got none.")
    check(tasks, ranks=ranks, text=text)
    names = [method.name for method in choose(None if methods is None else list(methods)) if method != DENSE]
    contests = [(1.0, DENSE.name), *((check_density(d), name) for d in densities for name in names)]
    jobs = [
        Job(task, ranks, density, name, seed, steps, every, text)
        for task in tasks
        for seed in seeds
        for density, name in contests
    ]
    return list(dict.fromkeys(jobs))


def execute(job: Job) -> tuple[Result, list[CurvePoint]]:
    """Train once. If it diverges, the numbers are NaN and there is no curve."""
    [method] = choose([job.method])
    settings = {"momentum": 0.0} if isinstance(method.memory, MomentumCorrection) else {}
    task = make(job.task, ranks=job.ranks, seed=job.seed, text=job.text, **settings)
    given = 1.0 if method is DENSE else method.equal_density(job.density, job.ranks, task.numel)
    try:
        run = train(task, method, given, steps=job.steps, every=job.every)
    except FloatingPointError:
        nan = float("nan")
        return Result(*job.key, given, nan, nan, nan, nan, task.quality), []
    last = run.last
    result = Result(*job.key, given, run.actual_density, last.megabytes, last.loss, last.quality, task.quality)
    return result, [CurvePoint(*job.key, *point) for point in run.points]


def execute_all(jobs: Iterable[Job], processes: int) -> Iterator[tuple[Result, list[CurvePoint]]]:
    """Train in several processes of one torch thread each, and yield what they have as they finish.

    Args:
        jobs: the trainings.
        processes: at least 1. With 1, this process does the work.

    Raises:
        ValueError: if there is no process.
    """
    if processes < 1:
        raise ValueError(f"Expected at least 1 process but got {processes}.")
    if processes == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from map(execute, jobs)
        finally:
            torch.set_num_threads(before)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,))
    with pool:
        try:
            for future in as_completed([pool.submit(execute, job) for job in jobs]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
