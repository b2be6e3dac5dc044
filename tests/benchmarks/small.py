"""Small models and tasks for the race, and jobs of real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.race.configurations import ALL as CONFIGURED
from benchmarks.race.flat import Flat
from benchmarks.race.methods.base import Method, Place
from benchmarks.race.methods.dense import PowerSGD
from benchmarks.race.methods.local import Local
from benchmarks.race.run import Rank, Run
from benchmarks.race.tasks import TASKS, Loaded, Task
from lightning_sparse.core.messages import Steps
from lightning_sparse.engine.drivers import drive, drive_ranks
from lightning_sparse.engine.network import TorchCollective

SHAPES = [(64, 32), (32, 80), (10,), (96, 65)]


class Holder(nn.Module):
    """Parameters of some shapes, and nothing else."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)


def methods(
    make: Callable[..., Method], n: int, shapes: Sequence[tuple[int, ...]] = SHAPES, steps: int = 100, **settings: Any
) -> list[Method]:
    """The ranks of a method, with equal parameters."""
    found = []
    for rank in range(n):
        torch.manual_seed(0)
        found.append(make(Flat(Holder(shapes)), Place(rank, n, steps), **settings))
    return found


def take(ranks: Sequence[Method], gradients: Tensor, rate: float, step: int) -> None:
    """A step with given (n, numel) gradients: of matrices, then of vectors."""
    for method, row in zip(ranks, gradients, strict=True):
        sizes = [p.numel() for p in method.flat.both]
        for p, part in zip(method.flat.both, row.split(sizes), strict=True):
            p.grad.copy_(part)
    drive_ranks([method.step(rate, step) for method in ranks])


def values(method: Method) -> Tensor:
    """All parameters."""
    return torch.cat([p.data for p in method.flat.both])


class Words(nn.Module):
    """A language model of 0.01 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mixed, self.out = nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mixed(self.words(x))))


def load(folder: Path) -> Loaded:
    tokens = torch.randint(50, (2000,), generator=torch.Generator().manual_seed(0))
    tokens[1::2] = (tokens[::2] * 7 + 3) % 50

    def draw(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        starts = 2 * torch.randint(900, (rows,), generator=generator)
        window = tokens[starts[:, None] + torch.arange(9)]
        return window[:, :-1], window[:, 1:]

    x, y = draw(torch.Generator().manual_seed(5), 20)

    def evaluate(model: nn.Module) -> float:
        return float(functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))

    return Loaded(Words, draw, evaluate)


SMALL = Task("small", load, steps=25, batch=4, rate=1e-3, warm_up=3, every=5, ranks=2)


def small_task(**changes: Any) -> str:
    """Let the race know the small task; returns its name."""
    from dataclasses import replace

    TASKS["small"] = replace(SMALL, **changes)
    return "small"


def steps_of(ranks: Sequence[Rank]) -> Iterator[list[Steps[Tensor]]]:
    """Ten steps of some of the ranks."""
    task, generator = TASKS["small"], torch.Generator().manual_seed(1)
    for step in range(10):
        batches = [load(Path()).draw(generator, task.batch) for _ in range(task.ranks)]
        yield [rank.step(step, task.rate_at(step, 4.0), *batches[rank.rank]) for rank in ranks]


def trained_between_processes(names: Sequence[str]) -> list[tuple[list[Tensor], float]]:
    """Parameters and bytes of each method after ten steps on this rank."""
    small_task(ranks=dist.get_world_size(), steps=10)
    found = []
    for name in names:
        rank = Rank(Run("small", name, 4.0), TASKS["small"], load(Path()), dist.get_rank())
        for (step,) in steps_of([rank]):
            drive(step, TorchCollective())
        sent = rank.method.matrices.bytes_sent + rank.method.vectors.bytes_sent
        found.append((rank.method.shared(), sent))
    return found


def powersgd_of_torch(steps: int) -> tuple[float, float]:
    """The largest difference between torch's own hook and ours after some steps, and the largest number."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    shapes = [(40, 30), (7,), (20, 50), (3, 2)]
    model = Holder(shapes)
    flat = Flat(Holder(shapes))
    flat.load(
        [torch.cat([p.detach().flatten() for p in model.each if (p.dim() > 1) == kind]) for kind in (True, False)]
    )
    state = torch_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=2, random_seed=3)
    order: list[tuple[int, ...]] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP does not read annotations that are strings
        order[:] = [tuple(g.shape) for g in bucket.gradients()]
        return torch_hook.powerSGD_hook(state, bucket)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, rows: Tensor) -> Tensor:
            return (torch.cat([p.flatten() for p in self.inner.each]) * rows).sum()

    wrapped = DistributedDataParallel(Product())
    wrapped.register_comm_hook(state, hook)
    ours = PowerSGD(flat, Place(rank, n, steps))
    grads = torch.Generator().manual_seed(rank)
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    apart = size = 0.0
    for step in range(steps):
        row = torch.randn(numel, generator=grads) + torch.randn(numel, generator=torch.Generator().manual_seed(9))
        model.zero_grad()
        wrapped(row).backward()
        theirs = [p.grad.flatten() for p in model.each]
        parts = row.split([torch.Size(shape).numel() for shape in shapes])
        kinds = [torch.cat([p for p, s in zip(parts, shapes, strict=True) if (len(s) > 1) == k]) for k in (True, False)]
        for p, g in zip(flat.both, kinds, strict=True):
            p.grad.copy_(g)
        if step == 2:  # the hook draws in the order of the bucket
            with torch.random.fork_rng():
                torch.manual_seed(np.random.RandomState(3).randint(1_000_000_000))
                drawn = {s: torch.randn(1, s[1], 1)[0] for s in order if len(s) > 1 and sum(s) * 2 < s[0] * s[1]}
            ours.qs = [drawn[shape] for shape in flat.shapes if shape in drawn]
        drive(ours.step(0.0, step), TorchCollective())
        mine = dict(zip(flat.shapes, flat.matrices.grad.split([a * b for a, b in flat.shapes]), strict=True))
        mine[(7,)] = flat.vectors.grad
        apart = max(apart, *(float((mine[s] - t).abs().max()) for s, t in zip(shapes, theirs, strict=True)))
        size = max(size, *(float(t.abs().max()) for t in theirs))
    return apart, size


def one_local_step_and_ddp(momentum: float) -> bool:
    """Whether averaging after each step of SGD equals DDP, bit for bit, on whole numbers."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(6, 5).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-4, 5, p.shape))
    torch.set_default_dtype(torch.float64)
    try:
        other = nn.Linear(6, 5)
        other.load_state_dict(model.state_dict())
        flat = Flat(other)
        local = Local(flat, Place(rank, n, 5), every=1, outer=1.0, momentum=momentum, inner="sgd")
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=momentum, nesterov=momentum > 0)
        generator = torch.Generator().manual_seed(rank)
        for step in range(5):
            x, y = (torch.randint(-3, 4, (4, size), generator=generator).double() for size in (6, 5))
            optimizer.zero_grad()
            ((wrapped(x) - y) ** 2).sum().div(8).backward()
            optimizer.step()
            flat.zero_()
            ((other(x) - y) ** 2).sum().div(8).backward()
            drive(local.step(0.125, step), TorchCollective())
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    finally:
        torch.set_default_dtype(torch.float32)


def simulated(names: Sequence[str], n: int) -> list[tuple[list[Tensor], float]]:
    """The same as :func:`trained_between_processes` in this process; of rank 0."""
    small_task(ranks=n, steps=10)
    found = []
    for name in names:
        ranks = [Rank(Run("small", name, 4.0), TASKS["small"], load(Path()), rank) for rank in range(n)]
        for steps in steps_of(ranks):
            drive_ranks(steps)
        sent = ranks[0].method.matrices.bytes_sent + ranks[0].method.vectors.bytes_sent
        found.append((ranks[0].method.shared(), sent))
    return found


NEEDED = {"soap": "pytorch_optimizer", "adamw8": "bitsandbytes"}
"""What an optimizer comes from, where that is neither torch nor here."""


def installed(optimizer: str) -> bool:
    """Whether this optimizer can be made."""
    return optimizer not in NEEDED or find_spec(NEEDED[optimizer]) is not None


ALL = [name for name in CONFIGURED if installed(name.split("-")[0])]
