"""Optimizers that step while nothing is exchanged: one warning in a run, and none where gradients arrive."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, INTEGRATIONS, PACKAGES, make_data, make_module, make_trainer

SPARSE: dict[str, Any] = {"density": 0.1, "rules": EVERYTHING_SPARSE}


def said_in(caught: list[warnings.WarningMessage]) -> list[str]:
    """The number of steps in each warning."""
    sentences = [str(warning.message) for warning in caught]
    return [
        one.partition(" without a backward through the wrapped model")[0] for one in sentences if "manual_back" in one
    ]


def fit(package: str, raw: bool, samples: int, by: str) -> tuple[list[str], int]:
    """A fit in manual optimization, with one or two optimizers; what it said, and its exchanges."""
    module = make_module(package)
    module.automatic_optimization = False
    module.configure_optimizers = lambda: [
        getattr(torch.optim, by)(module.net[i].parameters(), lr=0.01) for i in (0, 2)
    ]

    def training_step(batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(module.net(batch[0]), batch[1])
        loss.backward() if raw else module.manual_backward(loss)
        for optimizer in module.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    module.training_step = training_step
    strategy = __import__(f"lightning_sparse.integrations.{INTEGRATIONS[package][0]}", fromlist=["_"]).SparseDDPStrategy
    trainer = make_trainer(package, strategy=strategy(**SPARSE), max_epochs=1)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(module, make_data(samples))
    return said_in(caught), trainer.strategy.engine.step


@pytest.mark.parametrize(("package", "by"), [(PACKAGES[0], "AdamW"), (PACKAGES[1], "SGD")])
def test_backward_by_hand_is_told_once(two_ranks: Ranks, package: str, by: str) -> None:
    assert two_ranks(fit, package, True, 16 * 12, by) == [(["10 steps"], 0), ([], 0)]
    assert two_ranks(fit, package, True, 16 * 3, by) == [(["3 steps"], 0), ([], 0)]
    assert two_ranks(fit, package, False, 16 * 12, by) == [([], 2 * 12)] * 2


WAYS = {
    "through the wrapper": [],
    "beside it": ["10 steps"],
    "in no_sync": ["10 steps"],
    "one step": ["1 step"],
    "without gradients": [],
    "dense": [],
    "later": ["10 steps"],
    "an error": [],
}


def loop(way: str) -> list[str]:
    """12 steps of a loop without Lightning."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.01)
    engine = ls.attach(ddp, **{**SPARSE, **({"rules": ls.Rules(["*"])} if way == "dense" else {})})
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range({"one step": 1, "an error": 3}.get(way, 12)):
            forward = ddp if way in ("through the wrapper", "in no_sync") or (way == "later" and step == 11) else model
            with ddp.no_sync() if way == "in no_sync" else nullcontext():
                loss = forward(torch.randn(4, 30)).square().sum()
                if way != "without gradients":
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        try:
            if way == "an error":
                raise KeyError(way)
            engine.close()
        except KeyError:
            engine.close()
    return said_in(caught)


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_of_ones_own_is_told_once(two_ranks: Ranks, way: str) -> None:
    assert two_ranks(loop, way) == [WAYS[way], []]


@pytest.mark.usefixtures("one_rank")
def test_one_rank_has_nobody_to_average_with() -> None:
    assert loop("beside it") == []
