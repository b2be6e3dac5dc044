"""What Lightning's training loops do with optimizers: at a density of 1 weights are those of plain DDP, to the bit."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.covering import by_default, covering, in_turns
from tests.integrations.test_strategy import strategy_class
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer


def adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def lbfgs(module: Any) -> torch.optim.Optimizer:
    """Without a line search, which goes by a rank's own loss: behind plain DDP ranks wait for each other for ever."""
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4)


def in_turns_by_hand(module: Any) -> list[torch.optim.Optimizer]:
    """Optimize by hand, two optimizers in turn, each toggled."""
    module.automatic_optimization = False

    def step(batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in module.optimizers():
            module.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            module.manual_backward(nn.functional.cross_entropy(module.net(batch[0]), batch[1]))
            optimizer.step()
            module.untoggle_optimizer(optimizer)

    module.training_step = step
    return [adamw(module.net[0]), adamw(module.net[2])]


Case = tuple[Callable[[Any], Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    # What makes the optimizers, and options of the Trainer and of the strategy.
    "accumulate": (adamw, {"accumulate_grad_batches": 2}, {}),
    "clip by norm": (adamw, {"gradient_clip_val": 0.05}, {}),
    "clip by value": (adamw, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}, {}),
    "two by hand": (in_turns_by_hand, {}, {"find_unused_parameters": True}),
    "LBFGS": (lbfgs, {}, {}),
    "SWA": (adamw, {"max_epochs": 4}, {}),
}


def fit(package: str, case: str, density: float | None) -> tuple[Tensor, int]:
    """Weights, and exchanges; None: of plain DDP."""
    make, options, ddp = CASES[case]
    made = make_module(package)

    class Module(type(made)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return make(self)

    made.__class__ = Module
    if case == "SWA":
        averaging = importlib.import_module(package).callbacks.StochasticWeightAveraging
        options = {**options, "callbacks": [averaging(0.05, swa_epoch_start=2, annealing_epochs=1)]}
    if density is None:
        strategy = importlib.import_module(package).strategies.DDPStrategy(**ddp)
    else:
        strategy = strategy_class(package)(density=density, rules=EVERYTHING_SPARSE, **ddp)
    trainer = make_trainer(package, strategy=strategy, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Swapping scheduler")
        trainer.fit(made, make_data(80), make_data(16))
    return flat(made), 0 if density is None else strategy.engine.step


@pytest.mark.parametrize(("case", "package"), by_default(covering(in_turns(CASES, PACKAGES), together=1), 5))
def test_loops_train_like_ddp_at_density_1_and_alike_on_all_ranks_below(
    two_ranks: Ranks, case: str, package: str
) -> None:
    plain = two_ranks(fit, package, case, None)
    for (weights, steps), (expected, _) in zip(two_ranks(fit, package, case, 1.0), plain, strict=True):
        assert torch.equal(weights, expected)
        assert steps >= 6
    if case == "LBFGS":  # it calls its closure several times in a step
        return
    (weights, _), (other, _) = two_ranks(fit, package, case, 0.05)
    assert torch.equal(weights, other)
    assert not torch.equal(weights, plain[0][0])
