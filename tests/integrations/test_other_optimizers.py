"""Optimizers that take the place of others while training goes on are followed, as the first ones were."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lightning_sparse as ls
from tests.covering import covering
from tests.integrations.test_fabric import FABRICS, batches, close, make_fabric, make_model
from tests.integrations.test_strategy import strategy_class
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer

SPARSE: dict[str, Any] = {"rules": EVERYTHING_SPARSE, "density": 0.1}
KINDS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
}
Found = tuple[str, list[bool], list[bool], list[str], list[float]]


def found_of(engine: ls.Engine, optimizer: Any, seen: list[Any], module: Any) -> Found:
    """The memory, whether momentum is spent early, whether steps are taken, warnings, and the parameters."""
    states = [optimizer.state[p] for p in module.parameters() if p in optimizer.state]
    waited = ["waited" in state for state in states]
    return (
        type(engine.settings.memory).__name__,
        waited,
        [engine._binding.takes(optimizer)],
        seen,
        flat(module).tolist(),
    )


def changing(package: str, before: str, make_after: Callable[[Any], torch.optim.Optimizer]) -> Any:
    """A module whose optimizer is replaced in the second epoch, by one that is made of its parameters."""
    module = make_module(package)

    class Changing(type(module)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return KINDS[before](self.parameters())

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.optimizers = [make_after(self.parameters())]

    module.__class__ = Changing
    return module


def fit(package: str, before: str, after: str) -> Found:
    module, strategy = changing(package, before, KINDS[after]), strategy_class(package)(**SPARSE)
    with warnings.catch_warnings(record=True, action="always") as caught:
        make_trainer(package, strategy=strategy).fit(module, make_data())
    seen = [str(warning.message) for warning in caught if "sparse" in str(warning.message)]
    return found_of(strategy.engine, strategy.optimizers[0], seen, module)


def fit_fabric(package: str, before: str, after: str) -> Found:
    fabric = make_fabric(package, SPARSE)
    model = make_model()
    with warnings.catch_warnings(record=True, action="always") as caught:
        model, optimizer = fabric.setup(model, KINDS[before](model.parameters()))
        for step, x in enumerate(batches(6)):
            if step == 3:
                optimizer = fabric.setup_optimizers(KINDS[after](model.parameters()))
            fabric.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    seen = [str(warning.message) for warning in caught if "sparse" in str(warning.message)]
    found = found_of(fabric.strategy.engine, optimizer.optimizer, seen, model)
    close(fabric)
    return found


@pytest.mark.parametrize(
    ("before", "after", "job", "package"),
    covering(
        (
            (before, after, job, package)
            for before, after in [("sgd", "sgd"), ("sgd", "adamw"), ("adamw", "sgd"), ("adamw", "adamw")]
            for job, packages in [(fit, PACKAGES), (fit_fabric, FABRICS)]
            for package in packages
        ),
        together=1,
        seen_as=lambda before, after, job, package: ((before, after), (after, job)),
    ),
)
def test_an_optimizer_that_takes_the_place_of_another_is_served(
    two_ranks: Ranks, job: Any, package: str, before: str, after: str
) -> None:
    first, second = two_ranks(job, package, before, after)
    assert first[:3] == second[:3] and first[4] == second[4]
    memory, waited, [taken], seen, _ = first
    assert memory == ("SecondMoment" if after == "adamw" else "Residual")
    assert taken == (after == "adamw")
    assert waited == ([True] * 4 if after == "sgd" else [])
    assert seen == second[3] == []


def fit_by_hand(package: str) -> tuple[bool, list[bool], list[str]]:
    """An optimizer that Lightning does not know."""
    module, strategy = make_module(package), strategy_class(package)(**SPARSE)

    class Own(type(module)):  # type: ignore[misc]
        automatic_optimization = False

        def configure_optimizers(self) -> None:
            return None

        def on_train_start(self) -> None:
            self.own = KINDS["sgd"](self.parameters())

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            self.own.step()
            self.own.zero_grad()

    module.__class__ = Own
    with warnings.catch_warnings(record=True, action="always") as caught:
        make_trainer(package, strategy=strategy).fit(module, make_data())
    waited = ["waited" in state for state in module.own.state.values()]
    seen = [str(warning.message) for warning in caught if "sparse" in str(warning.message)]
    return strategy.engine._binding.optimizers[0] is module.own, waited, seen


def test_an_optimizer_that_lightning_does_not_know_is_found(two_ranks: Ranks) -> None:
    assert two_ranks(fit_by_hand, PACKAGES[0]) == [(True, [True] * 4, [])] * 2


def fewer_parameters(package: str) -> list[str]:
    """An AdamW of all parameters is followed by an SGD of some; it is kept, and steps no more."""
    kept: list[Any] = []

    def of_some(parameters: Any) -> torch.optim.Optimizer:
        kept.append(strategy.optimizers)
        made: torch.optim.Optimizer = KINDS["sgd"](list(parameters)[1:])
        return made

    module, strategy = changing(package, "adamw", of_some), strategy_class(package)(**SPARSE)
    with warnings.catch_warnings(record=True, action="always") as caught:
        make_trainer(package, strategy=strategy).fit(module, make_data())
    return [str(warning.message) for warning in caught if "first moment" in str(warning.message)]


def test_an_optimizer_that_steps_no_more_is_not_warned_of(two_ranks: Ranks) -> None:
    assert two_ranks(fewer_parameters, PACKAGES[0]) == [[], []]
