"""Layers that are frozen and thawed within fit: the first step behind the new wrapping is sparse like all others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import lightning_sparse as ls
from tests.covering import by_default
from tests.integrations.test_strategy import strategy_class
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "ours": lambda parameters: ls.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}
FROZEN = (2, 3)
"""Batches in which the first layer needs no gradient, of six."""


def fit(package: str, kind: str, by_hand: bool, options: dict[str, Any]) -> tuple[list[float], list[set[str]]]:
    """The parameters, and what the optimizer remembers of each after the last step."""
    base: Any = type(module := make_module(package))

    class Thawing(base):  # type: ignore[misc]
        automatic_optimization = not by_hand

        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[kind](self.parameters())

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net[0].requires_grad_(batch_idx not in FROZEN)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not by_hand:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

    module.__class__ = Thawing
    strategy = strategy_class(package)(density=0.1, rules=EVERYTHING_SPARSE, watch=None)
    trainer = make_trainer(package, strategy=strategy, max_epochs=1, **options)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, make_data())
    states = trainer.optimizers[0].state
    return flat(module).tolist(), [set(states.get(p, {})) for p in module.parameters()]


@pytest.mark.parametrize("kind", by_default(["adamw", "sgd", "ours"], 2))
def test_a_step_whose_closure_wraps_the_model_again_is_as_any_other(two_ranks: Ranks, kind: str) -> None:
    # By hand, the model is wrapped again before the optimizer's step begins.
    [expected, _], results = (two_ranks(fit, PACKAGES[0], kind, by_hand, {}) for by_hand in (True, False))
    kept = {"momentum_buffer", "waited"} if kind == "sgd" else set()
    for weights, states in results:
        assert states == expected[1] == [kept] * 4
        assert weights == expected[0]
