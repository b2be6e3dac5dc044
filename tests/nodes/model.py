"""A model whose gradients are given numbers, behind DDP on ranks of nodes; and what nodes exchange, by plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import Engine
from tests.trainers import EVERYTHING_SPARSE

SHAPES = {"long": (41, 33), "bias": (37,), "wide": (9, 101), "few": (3,)}
"""None of them divides by two, and one has fewer coordinates than a node of four has ranks."""
SPARSE: dict[str, Any] = {
    "rules": EVERYTHING_SPARSE,
    "density": 0.05,
    "grouping": "model",
    "watch": None,
    "single_device": "sparse",
}
DDP = "find_unused_parameters", "static_graph", "gradient_as_bucket_view"
"""Arguments of :func:`wrapped` that are those of DistributedDataParallel."""
Given = Callable[[int, int, str], Tensor]


def normal(step: int, rank: int, name: str) -> Tensor:
    """A gradient of a step on a rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def integers(step: int, rank: int, name: str) -> Tensor:
    """Multiples of 8: means over up to eight ranks are exact."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + list(SHAPES).index(name))
    return 8.0 * torch.randint(-9, 10, SHAPES[name], generator=generator)


class Linear(nn.Module):
    """The loss is the sum of weights times numbers, which are the gradients."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in SHAPES.items():
            start = torch.randint(-8, 9, shape, generator=generator)
            self.register_parameter(name, nn.Parameter(start.to(dtype) / 8))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(self.get_parameter(name) * x).sum() for name, x in gradients.items()]).sum()


def wrapped(size: Any, module: nn.Module | None = None, **options: Any) -> tuple[DistributedDataParallel, Engine]:
    """A model in DDP with small buckets, and its engine."""
    ddp = {name: options.pop(name) for name in DDP if name in options}
    wrapper = DistributedDataParallel(module or Linear(), bucket_cap_mb=0.001, **ddp)
    return wrapper, ls.attach(wrapper, **{**SPARSE, **options}, node_size=size)


def here(step: int, given: Given = normal, names: Sequence[str] = tuple(SHAPES)) -> dict[str, Tensor]:
    """The gradients of this rank."""
    return {name: given(step, dist.get_rank(), name) for name in names}


class Averages:
    """Lets an optimizer of rate 0 step, which exchanges gradients and moves nothing.

    Args:
        ddp: the model.
        memory: of the engine; None: one that goes with SGD.
    """

    def __init__(self, ddp: DistributedDataParallel, memory: ls.memories.Memory | None = None) -> None:
        self._module, needs = ddp.module, memory is not None and memory.needs_second
        kind: Any = partial(torch.optim.Adam, betas=(0.9, memory.beta2)) if needs else torch.optim.SGD
        self._optimizer = kind(ddp.parameters(), lr=0.0)

    def __call__(self) -> dict[str, Tensor]:
        """What is in ``.grad`` afterwards, where there is anything; a next backward begins without."""
        self._optimizer.step()
        named = self._module.named_parameters()
        found = {name: p.grad.clone() for name, p in named if p.grad is not None}
        self._optimizer.zero_grad()
        return found


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p.detach().clone() for name, p in module.named_parameters()}


def part(flat: Tensor, place: int, size: int) -> Tensor:
    """The part of a vector that one of so many ranks has: lengths differ by one at most, longer ones do not come
    before shorter ones in a fixed way, but bounds are the rounded-down shares."""
    bounds = [len(flat) * number // size for number in range(size + 1)]
    return flat[bounds[place] : bounds[place + 1]]


def node_mean(step: int, node: int, size: int, name: str, given: Given = normal) -> Tensor:
    """(numel,) mean over the ranks of a node, added up in their order."""
    total = torch.zeros(SHAPES[name]).flatten()
    for rank in range(node * size, (node + 1) * size):
        total = total + given(step, rank, name).flatten()
    return total / size


def stream(steps: int, nodes: int, size: int, place: int, names: Sequence[str], given: Given = normal) -> Tensor:
    """(steps, nodes, numel) of what the ranks with one place have of a group with these parameters."""
    rows = [
        [
            torch.cat([part(node_mean(step, node, size, name, given), place, size) for name in names])
            for node in range(nodes)
        ]
        for step in range(steps)
    ]
    return torch.stack([torch.stack(row) for row in rows])


def put_together(parts: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The gradient of each parameter, of the vectors of all places."""
    size, found = len(parts), dict[str, Tensor]()
    starts = [0] * size
    for name in names:
        numel = torch.Size(SHAPES[name]).numel()
        lengths = [len(part(torch.empty(numel), place, size)) for place in range(size)]
        pieces = [vector[start : start + length] for vector, start, length in zip(parts, starts, lengths, strict=True)]
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        found[name] = torch.cat(pieces).view(SHAPES[name])
    return found
