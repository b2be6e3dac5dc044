"""A small model between real ranks, and tuning in a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import Engine
from tests.trainers import EVERYTHING_SPARSE


class Net(nn.Module):
    """Two branches of which a forward may use any; registered in another order than used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(60, 5, bias=False)
        self.left = nn.Linear(60, 60)
        self.right = nn.Linear(60, 60)
        self.trunk = nn.Linear(20, 60)

    def forward(self, x: Tensor, use: str = "both") -> Tensor:
        x = self.trunk(x).relu()
        left = self.left(x) if use in ("left", "both") else 0
        right = self.right(x) if use in ("right", "both") else 0
        return self.head((left + right).relu())


def wrapped(
    options: dict[str, Any] | None, ddp: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """The model and its engine; None: plain DDP without one. Each layer fills a bucket."""
    model = DistributedDataParallel(Net().to(dtype), **{"bucket_cap_mb": 0.001, **(ddp or {})})
    return model, None if options is None else ls.attach(model, **{"rules": EVERYTHING_SPARSE, **options})


def batches(steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [torch.randn(8, 20, generator=generator).to(dtype) for _ in range(steps)]


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def grads(module: nn.Module) -> Tensor:
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in module.parameters()])


def residuals(ddp: Any, engine: Engine) -> Tensor:
    """(numel,) sum over ranks of what has not been sent yet."""
    pieces = [(engine.residual(name), p) for name, p in ddp.module.named_parameters()]
    held = torch.cat([torch.zeros(p.numel(), dtype=p.dtype) if r is None else r for r, p in pieces])
    dist.all_reduce(held)
    return held


def still(module: nn.Module) -> torch.optim.Optimizer:
    """What lets gradients be exchanged, and leaves parameters as they are."""
    return torch.optim.SGD(module.parameters(), lr=0.0)


class Balance:
    """What was given so far by all ranks and has not been applied, (numel,), at fixed parameters in float64."""

    def __init__(self, ddp: Any) -> None:
        self.ddp, self.alone, self.optimizer = ddp, Net().double(), still(ddp)
        self.missing = torch.zeros_like(flat(self.alone))

    def step(self, batch: Tensor, use: str = "both", between: Callable[[nn.Module], None] = lambda model: None) -> None:
        """One backward of both, what is done to gradients then, and a step."""
        for model in (self.ddp, self.alone):
            model.zero_grad()
            model(batch, use).square().mean().backward()
        thrown_away = bool(grads(self.ddp).isnan().any())
        between(self.ddp)
        between(self.alone)
        self.optimizer.step()
        given = grads(self.alone).nan_to_num(nan=0.0) * (not thrown_away)  # the rest waits
        dist.all_reduce(given)
        self.missing += given - dist.get_world_size() * grads(self.ddp).nan_to_num(nan=0.0)
