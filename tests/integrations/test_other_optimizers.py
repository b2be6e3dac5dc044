"""Optimizers that take the place of others while training goes on are followed, as the first ones were."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import lightning_sparse as ls
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
        [engine.takes_steps_of(optimizer)],
        seen,
        flat(module).tolist(),
    )


def fit(package: str, before: str, after: str) -> Found:
    module, strategy = make_module(package), strategy_class(package)(**SPARSE)

    class Changing(type(module)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return KINDS[before](self.parameters())

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.optimizers = [KINDS[after](self.parameters())]

    module.__class__ = Changing
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(package, strategy=strategy, max_epochs=3).fit(module, make_data())
    seen = [str(warning.message) for warning in caught if "sparse" in str(warning.message)]
    return found_of(strategy.engine, strategy.optimizers[0], seen, module)


def fit_fabric(package: str, before: str, after: str) -> Found:
    fabric = make_fabric(package, SPARSE)
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
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


@pytest.mark.parametrize(("before", "after"), [("sgd", "sgd"), ("sgd", "adamw"), ("adamw", "sgd"), ("adamw", "adamw")])
@pytest.mark.parametrize(
    ("job", "package"),
    [
        (fit, PACKAGES[0]),
        (fit_fabric, FABRICS[0]),
        pytest.param(fit, PACKAGES[1], marks=pytest.mark.thorough),
        pytest.param(fit_fabric, FABRICS[1], marks=pytest.mark.thorough),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_an_optimizer_that_takes_the_place_of_another_is_served(
    two_ranks: Ranks, job: Any, package: str, before: str, after: str
) -> None:
    first, second = two_ranks(job, package, before, after)
    assert first[:3] == second[:3] and first[4] == second[4]
    memory, waited, [taken], seen, _ = first
    assert memory == ("SecondMoment" if after == "adamw" else "Adapting")
    assert taken == (after == "adamw")
    assert waited == ([True] * 4 if after == "sgd" else [])
    assert seen == second[3] == []


def attach_and_step_by_another() -> list[str]:
    ddp = torch.nn.parallel.DistributedDataParallel(make_model())
    engine = ls.attach(ddp, **SPARSE)
    engine.follow([KINDS["sgd"](ddp.parameters())])
    other = KINDS["sgd"](ddp.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in batches(3):
            ddp(x).square().mean().backward()
            other.step()
            other.zero_grad()
    engine.close()
    return [str(warning.message) for warning in caught if "was not shown" in str(warning.message)]


def test_momentum_of_an_optimizer_that_was_not_shown_is_warned_of(two_ranks: Ranks) -> None:
    [sentence], others = two_ranks(attach_and_step_by_another)
    assert others == []
    assert "engine.follow([...])" in sentence
