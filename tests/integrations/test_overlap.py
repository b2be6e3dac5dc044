"""`overlap=True` in the Trainer: the weights are those without it, and what cannot be is refused at the start."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from tests.covering import by_default
from tests.ranks import Ranks, error_of
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer


class Looks:
    """Notes messages that are on their way when the optimizer steps."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def callback(self, package: str) -> Any:
        noted = self.sent

        class Callback(importlib.import_module(package).Callback):  # type: ignore[misc, name-defined]
            def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
                waiting = getattr(trainer.strategy.engine.router, "_waiting", None)
                noted.append(0 if waiting is None else len(waiting.sent))

        return Callback()


def fit(package: str, settings: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, list[int]]:
    looks = Looks()
    strategy = {"density": 0.1, "rules": EVERYTHING_SPARSE, "bucket_cap_mb": 0.0005, **settings}
    trainer = make_trainer(package, strategy=strategy, callbacks=[looks.callback(package)], **options)
    module = make_module(package)
    trainer.fit(module, make_data(), make_data(16))
    return flat(module), looks.sent


@pytest.mark.parametrize("package", by_default(PACKAGES))
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_weights_are_those_without_overlap(two_ranks: Ranks, package: str, options: dict[str, Any]) -> None:
    plain = two_ranks(fit, package, {}, options)
    hidden = two_ranks(fit, package, {"overlap": True}, options)
    assert all(torch.equal(weights, plain[0][0]) for weights, _ in (*plain, *hidden))
    assert all(not any(sent) for _, sent in plain)
    assert all(min(sent) >= 1 for _, sent in hidden)  # from the first step on: the optimizer was shown


def refused(package: str, options: dict[str, Any], several: bool) -> str:
    module = make_module(package)
    if several:
        halves = module.net[0].parameters(), module.net[2].parameters()
        module.configure_optimizers = lambda: [torch.optim.SGD(half, lr=0.1) for half in halves]
        module.automatic_optimization = False
    trainer = make_trainer(package, strategy={"overlap": True, "rules": EVERYTHING_SPARSE}, **options)
    return error_of(lambda: trainer.fit(module, make_data(), make_data(16)))


@pytest.mark.parametrize("package", by_default(PACKAGES))
@pytest.mark.parametrize(
    ("options", "several", "sentence"),
    [
        ({"gradient_clip_val": 0.5}, False, "Expected no clipping with overlap=True, which exchanges gradients within"),
        ({}, True, "Expected one optimizer with overlap=True"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    package: str, options: dict[str, Any], several: bool, sentence: str
) -> None:
    with Ranks(2) as ranks:
        for said in ranks(refused, package, options, several):
            assert sentence in said


def test_buckets_of_ddp_are_small_unless_they_are_given() -> None:
    assert "bucket_cap_mb" not in ls.SparseDDPStrategy()._ddp_kwargs
    assert ls.SparseDDPStrategy(overlap=True)._ddp_kwargs["bucket_cap_mb"] == 4.0
    assert ls.SparseDDPStrategy(overlap=True, bucket_cap_mb=10)._ddp_kwargs["bucket_cap_mb"] == 10
