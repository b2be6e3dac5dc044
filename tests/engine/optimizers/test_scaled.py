"""Gradients that are multiplied, or changed otherwise, between backward and the optimizer's step of Adam."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.ops.length import LengthChanges
from tests.covering import by_default, covering, in_turns
from tests.engine.optimizers import test_adam_rule
from tests.engine.optimizers.test_adam_rule import WIDTH, loss_of
from tests.integrations.test_telling import Lines
from tests.ranks import Ranks

STEPS, BETA2 = 30, 0.95


class Training(test_adam_rule.Training):
    """A plain loop, in which something is done with `.grad` before each step."""

    hyper: ClassVar = {"lr": 0.01, "betas": (0.9, BETA2), "eps": 1e-12}
    options: ClassVar = {"density": 0.1}

    def step(self, number: int, change: Any = None, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        (scale * loss_of(self.ddp, number, self.rank)).backward()
        if change is not None:
            change(number, list(self.module.parameters()))
        self.optimizer.step()


def by(factor: float) -> Any:
    return lambda step, parameters: [p.grad.mul_(factor) for p in parameters]


def scaled(factor: float, options: dict[str, Any]) -> list[list[Tensor]]:
    runs = []
    for change in (None, by(factor)):
        training = Training(**options)
        for step in range(STEPS):
            training.step(step, change)
        runs.append(training.weights())
    return runs


SETTINGS: dict[str, dict[str, Any]] = {"packed": {}, "union": {"exchange": "reduce_union", "grouping": "layer"}}


@pytest.mark.parametrize(
    ("factor", "settings"),
    by_default(covering(in_turns([1 / 4096, 0.25, 64.0, 1.0], list(SETTINGS)), together=1, thorough={64.0, 1.0})),
)
def test_a_factor_changes_no_step_of_adam(two_ranks: Ranks, factor: float, settings: str) -> None:
    # Products are exact. Others round, and gradients that are nearly equal may be selected in another order.
    for plain, changed in two_ranks(scaled, factor, SETTINGS[settings]):
        torch.testing.assert_close(changed, plain, rtol=1e-5, atol=1e-6)


def masked(step: int, parameters: list[Any]) -> None:
    for p in parameters:
        p.grad[: len(p.grad) * 3 // 4] = 0


def other_strides(step: int, parameters: list[Any]) -> None:
    for p in parameters:
        p.grad = p.grad.t().contiguous().t() if p.dim() == 2 else p.grad


def moved() -> dict[str, tuple[float, list[Tensor]]]:
    """The largest move of a weight in one step, and the weights, with each change: Adam minds none."""
    found = {}
    for kind, (change, scale) in CHANGES.items():
        training, largest = Training(watch=None), 0.0
        for step in range(STEPS):
            before = training.weights()
            training.step(step, change, scale)
            moves = [(a - b).abs().max() for a, b in zip(training.weights(), before, strict=True)]
            largest = max(largest, float(torch.stack(moves).max()))
        found[kind] = largest, training.weights()
    return found


CHANGES: dict[str, tuple[Any, float]] = {
    "nothing": (None, 1.0),
    "masks": (masked, 1.0),
    "strides": (other_strides, 1.0),
    "divisors": (by(2.0**-30), 2.0**30),
}


@pytest.mark.thorough
def test_masks_strides_and_large_divisors_make_no_step_longer(two_ranks: Ranks) -> None:
    for found in two_ranks(moved):
        largest, plain = found.pop("nothing")
        for kind, (other, weights) in found.items():
            assert other <= 1.5 * largest, kind
            if kind != "masks":
                torch.testing.assert_close(weights, plain, rtol=1e-3, atol=1e-4)


def with_a_scaler(growth_interval: int) -> list[float]:
    losses = []
    for scale in (None, 2.0**12):
        training = Training()
        options: dict[str, Any] = {"init_scale": scale or 1.0, "growth_interval": growth_interval}
        scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, **options)
        for step in range(STEPS):
            training.optimizer.zero_grad()
            scaler.scale(loss_of(training.ddp, step, training.rank)).backward()
            scaler.step(training.optimizer)
            scaler.update()
        losses.append((training.module(torch.ones(1, WIDTH)) - 1).square().mean().item())
    return losses


@pytest.mark.parametrize("growth_interval", [1000, 15])
def test_a_scaler_costs_no_progress(two_ranks: Ranks, growth_interval: int) -> None:
    for plain, scaled in two_ranks(with_a_scaler, growth_interval):
        assert scaled == pytest.approx(plain, rel=1e-3)


def changed(kind: str) -> tuple[list[str], bool]:
    def change(step: int, parameters: list[nn.Parameter]) -> None:
        grads: list[Any] = [p.grad for p in parameters]
        if kind == "noise":
            for grad in grads:
                grad.add_(torch.randn(grad.shape, generator=torch.Generator().manual_seed(step)), alpha=0.1)
        elif kind == "value":
            torch.nn.utils.clip_grad_value_(parameters, 1e-4)
        elif kind == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, 0.01)

    with warnings.catch_warnings(record=True, action="always") as caught:
        training = Training()
        for step in range(8):
            training.step(step, change)
    return [str(w.message) for w in caught], all(bool(w.isfinite().all()) for w in training.weights())


@pytest.mark.parametrize("kind", ["noise", "value", "norm"])
def test_changes_that_are_no_factor_are_no_trouble(two_ranks: Ranks, kind: str) -> None:
    assert two_ranks(changed, kind) == [([], True)] * 2


def resumed() -> tuple[list[Tensor], list[Tensor]]:
    def change(step: int, parameters: list[nn.Parameter]) -> None:
        by(1.0 if step % 3 else 0.1)(step, parameters)

    whole = Training()
    for step in range(10):
        whole.step(step, change)
        if step == 5:
            kept = whole.saved()
    again = Training()
    assert again.load(kept) == []
    for step in range(6, 10):
        again.step(step, change)
    return whole.weights(), again.weights()


def test_a_resumed_run_goes_on_bit_for_bit(two_ranks: Ranks) -> None:
    for whole, again in two_ranks(resumed):
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def fallen() -> tuple[LengthChanges, LengthChanges, list[str], list[dict[str, float]]]:
    steady, falling = Training(), Training()
    for training in (steady, falling):
        for step in range(12):
            training.optimizer.zero_grad()
            seed = torch.Generator().manual_seed(dist.get_rank())
            size = 0.1 if training is falling and step > 4 else 1.0
            (size * training.ddp(torch.randn(50, WIDTH, generator=seed)).square().mean()).backward()
            training.optimizer.param_groups[0]["lr"] = 0.0
            training.optimizer.step()
    engine, of_group = falling.engine, next(iter(falling.engine._group_summaries().values()))
    logged = [steady.engine.summary(), engine.summary(), of_group]
    every = engine._mean_over_ranks(torch.tensor(engine._length_changes, dtype=torch.float64)).tolist()
    assert [logged[1][f"lengths/{name}"] for name in LengthChanges._fields] == every
    with Lines() as lines:
        steady.engine.close()
        falling.engine.close()
    return steady.engine._length_changes, falling.engine._length_changes, list(lines), logged


def test_it_is_counted_and_said_where_gradients_have_changed_their_length(two_ranks: Ranks) -> None:
    for rank, (steady, falling, said, logged) in enumerate(two_ranks(fallen)):
        assert [row["lengths/clipped"] for row in logged] == [0, 0, 0]
        assert [row["lengths/measured_anew"] > 0 for row in logged] == [False, True, True]
        assert steady == (0, 0)
        assert falling.clipped == 0 and falling.measured_anew > 1
        if rank == 0:
            assert ["measured anew" in line for line in said] == [False, True]
