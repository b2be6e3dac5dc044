"""Small models that FSDP2 shards, on a grid of replicas and ranks, for tests of the exchange between replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import lightning_sparse as ls

SPARSE: dict[str, Any] = {"density": 0.05, "watch": None}
WIDTH = 22
"""Rows that two and four ranks do not share equally."""


class Net(nn.Module):
    """Layers whose rows do not divide; the last one has fewer rows than four ranks need."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, WIDTH)
        self.second = nn.Linear(WIDTH, 31)
        self.last = nn.Linear(31, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def grid(replicas: int, ranks: int) -> DeviceMesh:
    return dist.init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, mesh: DeviceMesh, **keywords: Any) -> nn.Module:
    for layer in model.children():
        fully_shard(layer, mesh=mesh, **keywords)
    fully_shard(model, mesh=mesh, **keywords)
    return model


def made(make: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def batches(steps: int, each: int = 1, seed: int = 100) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Batches of this rank: so many for each step."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        inputs = [torch.randn(4, 13, generator=generator) for _ in range(each)]
        yield [(x, x[:, :3] - x[:, 3:6]) for x in inputs]


def backward(model: Any, step: list[tuple[Tensor, Tensor]]) -> None:
    """Gradients of the batches of a step, which replicas average once, whoever does it."""
    for number, (x, y) in enumerate(step):
        model.set_requires_all_reduce(number == len(step) - 1)
        mse_loss(model(x), y).backward()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters as a whole; collective within a replica."""
    return {name: whole(p) for name, p in model.named_parameters()}


def whole(x: Any) -> Tensor:
    full: Tensor = x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()
    return full.clone()


def part(x: Any) -> Tensor:
    """What this rank has of a tensor."""
    with torch.no_grad():
        local: Tensor = x.to_local()
    return local


def engine_of(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> ls.Engine:
    return ls.attach_hsdp(model, mesh, **{**SPARSE, **settings})


class Given(nn.Module):
    """Parameters whose gradients are given numbers: the loss is their product."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            layer = nn.Module()
            layer.register_parameter("weight", nn.Parameter(torch.zeros(shape)))
            self.add_module(name, layer)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.get_parameter(f"{name}.weight") * x).sum() for name, x in gradients.items()]).sum()


SHAPES = {"first": (9, 40), "second": (3, 100), "third": (30, 12), "few": (1, 300)}


def given(step: int, rank: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """Integers, different in each step and on each rank: sums over up to four ranks and their halves are exact."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: 4.0 * torch.randint(-9, 10, shape, generator=generator) for name, shape in shapes.items()}


def summing(mesh: DeviceMesh) -> tuple[nn.Module, ls.Engine, torch.optim.Optimizer]:
    """A model whose weights are minus the sum of its averages, with its engine and optimizer."""
    model = fully_shard(Given(SHAPES), mesh=mesh["shard"])
    engine = engine_of(model, mesh, sparsifier="top_k", rules=ls.Rules(dense_ndim=0, dense_numel=0))
    return model, engine, torch.optim.SGD(model.parameters(), lr=1.0)
