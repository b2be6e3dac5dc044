"""Adam and AdamW in the Trainer and in Fabric: adapted by themselves, clipped on each rank, resumed bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from tests.covering import by_default, covering, in_turns
from tests.integrations.test_fabric import close, make_fabric
from tests.integrations.test_strategy import strategy_class
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer

SPARSE: dict[str, Any] = {"density": 0.2, "rules": EVERYTHING_SPARSE, "grouping": "model"}


def with_optimizer(package: str, make: Any) -> Any:
    module = make_module(package)
    module.configure_optimizers = lambda: make(module.parameters())
    return module


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


def rise(module: Any, *_: Any) -> None:
    """A schedule of the second beta, in a hook."""
    [group] = module.optimizers().param_groups
    group["betas"] = 0.9, 0.9 + 0.005 * module.global_step


LIMIT = 0.05
CLIPPING: dict[str, dict[str, Any]] = {
    "gradient_clip_val": {"gradient_clip_val": LIMIT},
    "configure_gradient_clipping": {},
    "self.clip_gradients": {},
}
"""Ways to ask for it, and what the Trainer gets."""


def clip_by(module: Any, how: str) -> None:
    """Let a module ask for clipping by itself, in one of the ways."""

    def clip(optimizer: Any, *_: Any, **__: Any) -> None:
        module.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")

    if how == "configure_gradient_clipping":
        module.configure_gradient_clipping = clip
    if how == "self.clip_gradients":
        by_hand(module, clip)


def by_hand(module: Any, clip: Any) -> None:
    """Optimize by hand, with clipping in between."""
    training_step, module.automatic_optimization = module.training_step, False

    def step(batch: list[Tensor], batch_idx: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(training_step(batch, batch_idx))
        clip(optimizer)
        optimizer.step()

    module.training_step = step


def fit(
    package: str,
    options: dict[str, Any],
    checkpoint: Path | None,
    trainer: dict[str, Any],
    clip: str = "",
    scheduled: bool = False,
) -> Any:
    """Parameters, the memory at work, what was warned of, whether the last step was clipped."""
    module = with_optimizer(package, adamw)
    if scheduled:
        type(module).on_train_batch_start = rise
    clip_by(module, clip)
    strategy = strategy_class(package)(**{**SPARSE, **options})
    runner = make_trainer(package, strategy=strategy, **trainer)
    with warnings.catch_warnings(record=True, action="always") as caught:
        runner.fit(module, make_data(), ckpt_path=checkpoint)
    engine = strategy.engine
    assert engine is not None
    told = [str(w.message) for w in caught if "moment" in str(w.message) or "residual" in str(w.message).lower()]
    return flat(module), engine.settings.memory, told, engine.stepper.grad_norm is not None


@pytest.mark.parametrize(("package", "precision"), covering(in_turns(PACKAGES, ["32-true", "bf16-mixed"]), together=1))
def test_torchs_adamw_is_adapted(two_ranks: Ranks, package: str, precision: str) -> None:
    (weights, *first), (others, *second) = two_ranks(fit, package, {}, None, {"max_epochs": 1, "precision": precision})
    assert first == second == [ls.memories.SecondMoment(0.95), [], False]
    assert torch.equal(weights, others)


@pytest.mark.parametrize(
    ("clip", "precision", "scheduled"),
    by_default([("", "64-true", True), ("", "32-true", True), *((clip, "32-true", False) for clip in (*CLIPPING, ""))]),
)
def test_a_resumed_fit_goes_on_bit_for_bit(
    two_ranks: Ranks, tmp_path: Path, clip: str, precision: str, scheduled: bool
) -> None:
    trainer = {"max_epochs": 3, "precision": precision, **CLIPPING.get(clip, {})}
    whole = two_ranks(fit, "pytorch_lightning", {}, None, trainer, clip, scheduled)
    saving = {**trainer, "max_epochs": 2, "enable_checkpointing": True, "default_root_dir": tmp_path}
    two_ranks(fit, "pytorch_lightning", {}, None, saving, clip, scheduled)
    [checkpoint] = tmp_path.rglob("*.ckpt")
    going_on = [{"strict_resume": True}, checkpoint, trainer, clip, scheduled]
    resumed = two_ranks(fit, "pytorch_lightning", *going_on)
    for (weights, _, _, clipped), (again, memory, told, again_clipped) in zip(whole, resumed, strict=True):
        assert torch.equal(weights, again)
        assert memory == ls.memories.SecondMoment(0.9 + 0.005 * 8 if scheduled else 0.95) and told == []
        assert clipped == again_clipped == bool(clip)


def test_adam_does_not_feel_how_far_gradients_are_clipped(two_ranks: Ranks) -> None:
    """Steps stay about as long, where clipped averages would have stopped."""
    options, start = {"memory": None}, flat(make_module("pytorch_lightning"))
    free = two_ranks(fit, "pytorch_lightning", options, None, {"max_epochs": 1})[0][0]
    for algorithm in ("norm", "value"):
        clip = {"max_epochs": 1, "gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}
        clipped, _, _, known = two_ranks(fit, "pytorch_lightning", options, None, clip)[0]
        assert known == (algorithm == "norm")
        assert not torch.equal(clipped, free)
        assert 0.5 < float((clipped - start).norm() / (free - start).norm()) < 2


def asked_for_at_first(manual: bool) -> list[bool]:
    """Whether each step was clipped, where two steps ask for it."""
    module, found = with_optimizer("pytorch_lightning", adamw), []

    def clip(optimizer: Any, *_: Any, **__: Any) -> None:
        if module.global_step < 2:
            module.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")

    def look(*_: Any) -> None:
        found.append(strategy.engine.stepper.grad_norm is not None)

    if manual:
        by_hand(module, clip)
    else:
        module.configure_gradient_clipping = clip
    module.on_train_batch_end = look
    strategy = strategy_class("pytorch_lightning")(**SPARSE)
    trainer = make_trainer("pytorch_lightning", strategy=strategy, max_epochs=1, limit_train_batches=4)
    trainer.fit(module, make_data(96), make_data(16))
    return found


@pytest.mark.parametrize("manual", [False, True])
def test_a_limit_that_is_not_asked_for_any_more_clips_nothing(two_ranks: Ranks, manual: bool) -> None:
    assert two_ranks(asked_for_at_first, manual) == [[True, True, False, False]] * 2


def goes_on_in_fabric(folder: str, precision: str, early: bool) -> None:
    """Four steps, then four more; and these again from a checkpoint, loaded before or after the module is set up."""

    def setup() -> tuple[Any, Any, Any]:
        fabric = make_fabric("lightning_fabric", {**SPARSE, "strict_resume": True}, precision=precision)
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.Linear(30, 3))
        return fabric, module, adamw(module.parameters())

    def train(fabric: Any, model: Any, optimizer: Any, steps: range) -> Tensor:
        for step in steps:
            optimizer.zero_grad()
            data = torch.linspace(step, 10, 40).view(4, 10).sin() * (1 + fabric.global_rank)
            fabric.backward(model(data).square().mean())
            fabric.clip_gradients(model, optimizer, max_norm=LIMIT)
            optimizer.step()
        return flat(model)

    path = f"{folder}/checkpoint.pt"
    fabric, module, optimizer = setup()
    model, optimizer = fabric.setup(module, optimizer)
    train(fabric, model, optimizer, range(4))
    fabric.save(path, {"model": model, "optimizer": optimizer})
    expected = train(fabric, model, optimizer, range(4, 8))
    close(fabric)
    fabric, model, optimizer = setup()
    if early:
        fabric.load(path, {"model": model, "optimizer": optimizer})
    model, optimizer = fabric.setup(model, optimizer)
    if not early:
        fabric.load(path, {"model": model, "optimizer": optimizer})
    assert torch.equal(train(fabric, model, optimizer, range(4, 8)), expected)
    close(fabric)


@pytest.mark.parametrize(
    ("precision", "early"),
    covering([("32-true", True), ("64-true", False), ("32-true", False), ("64-true", True)], together=1),
)
def test_a_resumed_run_of_fabrics_goes_on_bit_for_bit(
    two_ranks: Ranks, tmp_path: Path, precision: str, early: bool
) -> None:
    two_ranks(goes_on_in_fabric, str(tmp_path), precision, early)


def in_fabric() -> tuple[Tensor, Any, float, Any]:
    fabric = make_fabric("lightning_fabric", SPARSE)
    module = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.Linear(30, 3))
    model, optimizer = fabric.setup(module, adamw(module.parameters()))
    data = torch.ones(4, 10) * (1 + fabric.global_rank)
    for _ in range(4):
        optimizer.zero_grad()
        fabric.backward(model(data).square().mean())
        norm = fabric.clip_gradients(model, optimizer, max_norm=1e-3)
        optimizer.step()
    engine = fabric.strategy.engine
    result = flat(module), engine.settings.memory, float(norm), engine.latest_step().grad_norm
    close(fabric)
    return result


def test_fabric_adapts_and_clips_alike(two_ranks: Ranks) -> None:
    for weights, memory, norm, known in two_ranks(in_fabric):
        assert memory == ls.memories.SecondMoment(0.95)
        assert norm == float(known) > 1e-3
        assert bool(weights.isfinite().all())
