"""The exchange within backward: the same averages as in the step, nothing lost, and errors on all ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import Engine
from lightning_sparse.engine.overlap import Overlapped
from lightning_sparse.methods.grouping import ParameterSize, make_plan
from tests.covering import by_default, covering
from tests.ranks import Ranks, error_of
from tests.static_path import static_path

KINDS = ["sgd", "momentum", "adamw"]
GROUPINGS = ["layer", "bucket", "model", ls.grouping.MergeBelow(1500)]
EVERYTHING = ls.Rules(dense_ndim=0, dense_numel=0)
BUCKET_MB = 0.002
"""Of DDP's buckets: gradients of each layer come alone."""
WITHIN = 5.0
"""Seconds in which ranks have to end."""


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(30, 20)).to(dtype)


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)


class Run:
    """A model, DDP, an engine and an optimizer."""

    def __init__(self, kind: str = "sgd", dtype: torch.dtype = torch.float32, views: bool = False, **settings: Any):
        self.model = network(dtype)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=views)
        given = {"density": 0.05, "watch": None, "overlap": True, "grouping": "layer", "bucket_cap_mb": 0.01}
        self.engine = ls.attach(self.ddp, **{**given, **settings})
        self.optimizer = optimizer_of(kind, self.model.parameters())
        self._random, self._dtype = torch.Generator().manual_seed(dist.get_rank() + 1), dtype

    @property
    def sent(self) -> int:
        """Messages that travel alone, of those that wait for the step."""
        waiting = getattr(self.engine.router, "_waiting", None)
        return 0 if waiting is None else len(waiting.sent)

    def backward(self, factor: float = 1.0) -> None:
        x = torch.randn(8, 30, generator=self._random).to(self._dtype)
        (factor * (self.ddp(x) - x[:, :20].sin()).square().mean()).backward()

    def step(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.backward(factor)
        self.optimizer.step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def gradient(self) -> Tensor:
        every = self.engine._parameters.values()
        return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in every])

    def residual(self) -> Tensor:
        every = map(self.engine.residual, self.engine._parameters)
        return torch.cat([one for one in every if one is not None] or [torch.empty(0)])


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


# ------------------------------------------------------------------------------------------------ equal averages


def averages(kind: str, settings: dict[str, Any], more: str = "", steps: int = 5) -> tuple[list[Tensor], int]:
    """Averages and weights of each step, and the most messages of a backward."""
    dtype = torch.bfloat16 if more == "bfloat16" else torch.float32
    with static_path() if more == "static" else contextlib.nullcontext():
        run = Run(kind, dtype, views=more == "views", **settings)
        found, most = [], 0
        for step in range(steps):
            run.optimizer.zero_grad(set_to_none=more != "zeros")
            with run.ddp.no_sync() if more == "micro-batches" else contextlib.nullcontext():
                if more == "micro-batches":
                    run.backward()
            if more == "flush" and step == 2:
                run.engine._flush_next_step()
            if more == "rates":
                run.optimizer.param_groups[0]["lr"] = [0.1, 0.05, 0.0, 0.2, 0.1][step]
            run.backward()
            most = max(most, run.sent)
            run.optimizer.step()
            found += [run.gradient(), run.weights(), run.residual()]
        run.engine.close()
    return found, most


def assert_alike(ranks: Ranks, kind: str, settings: dict[str, Any], more: str = "") -> int:
    plain = ranks(averages, kind, {**settings, "overlap": False}, more)
    hidden = ranks(averages, kind, settings, more)
    for (expected, none), (found, most) in zip(plain, hidden, strict=True):
        assert none == 0
        assert most > 0
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(one, other), (number, (one - other).abs().max())
    return hidden[0][1]


@pytest.mark.parametrize(
    ("kind", "grouping", "n"), covering((k, g, n) for k in KINDS for g in GROUPINGS for n in (2, 3, 4))
)
def test_averages_are_those_of_the_step_bit_for_bit(request: Any, kind: str, grouping: Any, n: int) -> None:
    ranks = request.getfixturevalue({2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[n])
    most = assert_alike(ranks, kind, {"grouping": grouping})
    assert most == 1 if grouping == "model" else most > 1


SPARSIFIERS = ["top_k", "shared_top_k", "gtop_k", "ok_top_k", "random_k", "clt_k", "exdyna", "micro", "sidco_e", "dgc"]
SPARSIFIERS += ["redsync", "gaussian_k", "striped_top_k"]


@pytest.mark.parametrize("sparsifier", SPARSIFIERS)
def test_averages_of_every_sparsifier(two_ranks: Ranks, four_ranks: Ranks, sparsifier: str) -> None:
    ranks = four_ranks if SPARSIFIERS.index(sparsifier) % 3 == 0 else two_ranks
    assert_alike(ranks, "sgd", {"sparsifier": sparsifier, "rules": EVERYTHING})


MORE = ["views", "zeros", "micro-batches", "flush", "bfloat16", "static"]


@pytest.mark.parametrize(("kind", "more"), covering((k, m) for k in KINDS[1:] for m in MORE))
def test_averages_where_gradients_lie_and_come_otherwise(three_ranks: Ranks, kind: str, more: str) -> None:
    assert_alike(three_ranks, kind, {"rules": EVERYTHING}, more)


@pytest.mark.parametrize(
    "settings",
    [
        {"memory": ls.memories.Residual(rates=True)},
        {"memory": ls.memories.MomentumCorrection(0.5)},
        {"memory": "low_pass"},
        {"density": ls.Warmup(1.0, 0.02, steps=3)},
        {"rules": ls.Rules(densities={"0.*": 0.5})},
        {"sparsifier": "top_k", "exchange": "reduce_union"},
        {"sparsifier": "everything"},
    ],
    ids=str,
)
def test_averages_with_other_settings(two_ranks: Ranks, settings: dict[str, Any]) -> None:
    if settings == {"sparsifier": "everything"}:  # DDP averages by itself
        plain = two_ranks(averages, "sgd", {**settings, "overlap": False})
        hidden = two_ranks(averages, "sgd", settings)
        assert all(torch.equal(a, b) for a, b in zip(plain[0][0], hidden[0][0], strict=True) if a.numel())
        return
    assert_alike(two_ranks, "sgd", settings, "rates" if "rates=True" in str(settings) else "")
