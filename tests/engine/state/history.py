"""Trainings in which anything may happen, the same on all ranks, that keep account of what they were given."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import lightning_sparse as ls
from lightning_sparse.core.layout import own
from lightning_sparse.methods.density.schedules import DensitySchedule
from lightning_sparse.methods.grouping import ParameterSize, make_plan
from tests.nodes.model import part
from tests.sums import SPARSE, Sums


@dataclass(frozen=True)
class InTurn(DensitySchedule):
    """Dense for a step now and then."""

    def __call__(self, step: int) -> float:
        return (0.05, 0.05, 0.3, 0.02, 1.0)[step % 5]


class History:
    """A training in which anything may happen, the same on all ranks; what it has given, and stepped with.

    With DDP; ``number`` and ``several`` are of those who have gradients of their own, and ``group`` are ranks that
    exchange theirs.

    Args:
        seed: of what happens.
        dense: whether some steps are.
        size: ranks of a node, whose means are given: each rank of it exchanges a part.
    """

    def __init__(self, seed: int, dense: bool, size: int = 1) -> None:
        self.random, self.module, self.size = random.Random(seed), self.made(), size
        self.density: Any = InTurn() if dense else 0.05
        self.parameters = dict(self.module.named_parameters())
        self.given, self.stepped = (
            {n: torch.zeros_like(own(p).detach()) for n, p in self.parameters.items()} for _ in range(2)
        )
        self.attach()
        self.make_optimizers()

    def made(self) -> Any:
        self.number, self.several, self.group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        return Sums().double()

    def attach(self) -> None:
        self.ddp = DistributedDataParallel(self.module, find_unused_parameters=True, bucket_cap_mb=0.002)
        self.engine = ls.attach(self.ddp, **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        return {**SPARSE, "density": self.density, "memory": "residual", "node_size": self.size}

    def loss(self, without: Collection[str]) -> Tensor:
        loss: Tensor = self.ddp(self.number, without)
        return loss

    def alone(self) -> AbstractContextManager[None]:
        """Leave gradients of backwards to a later one."""
        return self.ddp.no_sync()

    def run(self, steps: int) -> tuple[int, int]:
        """Steps that were taken, and skipped ones."""
        for _ in range(steps):
            self.backward()
            self.check("backward")
            self.step()
            self.check("step")
            self.check(self.between())
        taken = self.engine.step, self.engine.skipped_steps
        self.engine.close()
        return taken

    def make_optimizers(self) -> None:
        every, cut = list(self.parameters.values()), self.random.choice([1, 2, 4])
        parts = [every[:cut], every[cut:]] if cut < len(every) else [every]
        self.optimizers = [SGD(part, lr=1.0) for part in parts]

    def drop(self, optimizer: SGD) -> None:
        optimizer.zero_grad(set_to_none=self.random.random() < 0.5)

    def backward(self) -> None:
        kind = self.random.choice(["one", "one", "local", "several", "discarded", "not finite"])
        for number in range({"one": 1, "not finite": 1}.get(kind, 2)):
            with self.alone() if kind == "local" and number == 0 else nullcontext():
                without = self.random.choice([(), (), ("first",), ("second", "third")])
                odd = self.random.randrange(self.several)
                bad = math.nan if kind == "not finite" and self.number == odd else 1.0
                only_here = ("fourth",) if self.number != odd else ()
                (self.loss((*without, *only_here)) * bad).backward()
            if kind == "discarded" and number == 0:
                for optimizer in self.optimizers:
                    self.drop(optimizer)

    def step(self) -> None:
        order = self.random.sample(self.optimizers, len(self.optimizers))
        for optimizer in order:
            what = self.random.choice(["step", "step", "step", "rate of 0", "leave", "drop"])
            if what in ("step", "rate of 0"):
                self._step(optimizer, 1.0 if what == "step" else 0.0)
            if what != "leave":
                self.drop(optimizer)

    def _step(self, optimizer: SGD, rate: float) -> None:
        held = {n: p for n, p in self.parameters.items() if any(p is q for q in optimizer.param_groups[0]["params"])}
        mine = {name: own(p.grad).clone() for name, p in held.items() if p.grad is not None}
        before = {name: own(p).detach().clone() for name, p in held.items()}
        finite = torch.tensor(int(all(bool(grad.isfinite().all()) for grad in mine.values())))
        dist.all_reduce(finite, dist.ReduceOp.MIN)  # of a parameter, a rank may have no part
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1.0
        for name, p in held.items():
            moved = before[name] - own(p).detach()
            assert finite or not moved.any()
            if finite:
                self.given[name] += mine.get(name, 0.0)
                self.stepped[name] += moved if rate or p.grad is None else own(p.grad)

    def between(self) -> str:
        what = self.random.choice(["nothing", "nothing", "regroup", "flush", "load", "optimizers", "send all"])
        if what == "regroup":
            sizes = [ParameterSize.of(name, p) for name, p in self.parameters.items()]
            self.random.shuffle(sizes)
            grouping: Any = self.random.choice(["model", "layer"])
            self.engine.regroup(make_plan(sizes, grouping, rules=ls.Rules(dense_ndim=0, dense_numel=0)))
        elif what == "flush":
            before = {name: own(p).detach().clone() for name, p in self.parameters.items()}
            ls.flush(self.engine, self.optimizers)
            for name, p in self.parameters.items():
                self.stepped[name] += before[name] - own(p).detach()
        elif what == "load":
            state = self.engine.state_dict()
            self.engine.close()
            self.attach()
            self.engine.load_state_dict(state)
        elif what == "optimizers":
            self.make_optimizers()
        elif what == "send all":
            self.engine._flush_next_step()
        return what

    def check(self, what: str) -> None:
        """Whether all that was given is stepped with, or waits; and weights are equal on all ranks."""
        place = self.number % self.size
        for name, p in self.parameters.items():
            residual, given = self.engine.residual(name), self.given[name].flatten()
            lost = torch.zeros_like(given)
            part(lost, place, self.size).copy_(part(given, place, self.size))
            part(lost, place, self.size).sub_(0 if residual is None else residual)
            dist.all_reduce(lost, group=self.group)
            lost -= self.several // self.size * self.stepped[name].flatten()
            assert not lost.numel() or lost.abs().max() < 1e-8, (what, name, self.engine.step)
            here = own(p).detach()
            others = [torch.empty_like(here) for _ in range(self.several)]
            dist.all_gather(others, here, self.group)
            assert all(torch.equal(other, here) for other in others), (what, name, self.engine.step)
