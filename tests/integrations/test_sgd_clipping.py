"""SGD: gradients are clipped before they wait, also in the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from tests.covering import by_default
from tests.integrations.test_adamw import SPARSE, with_optimizer
from tests.integrations.test_fabric import close, make_fabric
from tests.integrations.test_strategy import strategy_class
from tests.ranks import Ranks
from tests.trainers import PACKAGES, make_data, make_trainer

LIMIT = 1e-3
STEPS = 6
PACKAGE = "pytorch_lightning"
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def waiting(engine: ls.Engine) -> Tensor:
    return torch.cat(
        [residual for name in engine.stepper.parameters if (residual := engine.residual(name)) is not None]
    )


def fit(kind: str, algorithm: str, options: dict[str, Any]) -> Tensor:
    """What waits at the end."""
    strategy = strategy_class(PACKAGE)(**{**SPARSE, **options})
    found: list[Tensor] = []
    module = with_optimizer(PACKAGE, OPTIMIZERS[kind])
    module.on_train_end = lambda: found.append(waiting(strategy.engine))
    clip = {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": algorithm}
    make_trainer(PACKAGE, strategy=strategy, max_epochs=1, **clip).fit(module, make_data(96), make_data(16))
    assert strategy.engine.step == STEPS
    return found[0]


@pytest.mark.parametrize(
    ("kind", "algorithm", "options"),
    [
        ("momentum", "norm", {}),
        ("momentum", "value", {"memory": "residual"}),
        ("plain", "norm", {}),
        ("plain", "value", {}),
    ],
)
def test_what_waits_in_the_trainer_is_clipped(
    two_ranks: Ranks, kind: str, algorithm: str, options: dict[str, Any]
) -> None:
    waits = torch.stack(two_ranks(fit, kind, algorithm, options))
    if algorithm == "value":  # of each rank's own
        assert 0 < float(waits.abs().max()) <= STEPS * LIMIT * 2**0.5 * (1 + 1e-5)
    else:  # of the mean, which a sketch estimates
        assert 0 < float(waits.mean(0).norm()) <= STEPS * LIMIT * 1.05


def in_fabric(limit: dict[str, float]) -> tuple[list[float], list[float]]:
    """The largest value of each step's clipped gradients, and of what waits after it."""
    fabric = make_fabric("lightning_fabric", SPARSE)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.Linear(30, 3))
    model, optimizer = fabric.setup(module, OPTIMIZERS["momentum"](module.parameters()))
    clipped: list[Tensor] = []
    waits = []
    for step in range(STEPS):
        optimizer.zero_grad()
        data = torch.full((4, 10), 1.0 + step + fabric.global_rank)
        fabric.backward(model(data).square().mean())
        fabric.clip_gradients(model, optimizer, **limit)
        clipped.append(torch.cat([p.grad.flatten() for p in module.parameters()]))  # type: ignore[union-attr]
        optimizer.step()
        waits.append(float(waiting(fabric.strategy.engine).abs().max()))
    close(fabric)
    return [float(grads.abs().max()) for grads in clipped], waits


def test_in_fabric_each_ranks_own_values_are_clipped(two_ranks: Ranks) -> None:
    for largest_values, waits in two_ranks(in_fabric, {"clip_val": LIMIT}):
        assert max(largest_values) == pytest.approx(LIMIT * 2**0.5)
        assert 0 < waits[-1] <= STEPS * LIMIT * 2**0.5 * (1 + 1e-5)


def clip_nothing(module: Any) -> None:
    """A hook of the user's."""
    module.configure_gradient_clipping = lambda *args, **kwargs: None


def take_limit_away(module: Any) -> None:
    """After two steps."""

    def take_away(*_: Any) -> None:
        if module.trainer.global_step == 2:
            module.trainer.gradient_clip_val = None

    module.on_train_batch_start = take_away


def changed(package: str, change: Any) -> Tensor:
    """What waits at the end."""
    strategy = strategy_class(package)(**SPARSE)
    module = with_optimizer(package, OPTIMIZERS["momentum"])
    change(module)
    clip = {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": "value"}
    make_trainer(package, strategy=strategy, max_epochs=1, **clip).fit(module, make_data(96), make_data(16))
    return waiting(strategy.engine)


@pytest.mark.parametrize(
    ("change", "package"),
    [(take_limit_away, PACKAGE), *by_default((clip_nothing, package) for package in PACKAGES[::-1])],
)
def test_a_hook_of_the_user_and_a_limit_that_is_taken_away_clip_nothing_more(
    two_ranks: Ranks, change: Any, package: str
) -> None:
    for waits in two_ranks(changed, package, change):
        assert float(waits.abs().max()) > 2 * STEPS * LIMIT
