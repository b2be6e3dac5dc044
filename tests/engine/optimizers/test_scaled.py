"""Averages that are multiplied, or changed otherwise, between backward and the optimizer's step."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning_sparse.engine.delivery import Handed, Lengths, factors_of
from torch import Tensor, nn

from lightning_sparse.ops.length import LengthChanges
from lightning_sparse.ops.sampled import Sampler
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
            with warnings.catch_warnings(action="ignore"):  # masks are warned of
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


def unshown_scaler(growth_interval: int) -> list[float]:
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


# Where the scale is doubled in the middle of so few steps, what waits is of two scales for a while.
@pytest.mark.parametrize(("growth_interval", "near"), by_default([(1000, 0.01), (15, 0.5)]))
def test_a_scaler_that_the_engine_was_not_shown_costs_no_progress(
    two_ranks: Ranks, growth_interval: int, near: float
) -> None:
    for plain, scaled in two_ranks(unshown_scaler, growth_interval):
        assert scaled == pytest.approx(plain, rel=near)


def reference_lengths(factors: list[float], beta2: float) -> list[float]:
    """Adam's second moment of gradients of size 1 that were multiplied, beside that of those that were not."""
    of_scaled = of_plain = 0.0
    lengths = []
    for factor in factors:
        of_scaled = beta2 * of_scaled + (1 - beta2) * factor**2
        of_plain = beta2 * of_plain + (1 - beta2)
        lengths.append(math.sqrt(of_scaled / of_plain))
    return lengths


@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999])
def test_lengths_are_those_of_adams_second_moment(beta2: float) -> None:
    factors = [1.0, 1.0, 0.5, 1.0, 3.0, 1e-4, 1.0, 1e4]
    lengths = Lengths()
    found = [float(lengths.follow(["a"], torch.tensor([s], dtype=torch.float64), beta2)) for s in factors]
    assert found == pytest.approx(reference_lengths(factors, beta2), rel=1e-6)


def test_where_no_factor_is_known_nothing_changes() -> None:
    lengths = Lengths()
    lengths.follow(["a", "b"], torch.tensor([0.5, 0.5], dtype=torch.float64), 0.9)
    found = lengths.follow(["a", "b"], torch.tensor([0.5, math.nan], dtype=torch.float64), 0.9)
    assert found.tolist() == pytest.approx([0.5, 1.0])
    again = Lengths()
    again.load(lengths.state())
    one = torch.tensor([1.0, 1.0], dtype=torch.float64)
    assert torch.equal(lengths.follow(["a", "b"], one, 0.9), again.follow(["a", "b"], one, 0.9))
    assert float(Lengths().follow(["c"], one[:1], 0.9)) == 1.0


def test_lengths_go_on_where_parameters_come_in_other_groups() -> None:
    lengths, alone = Lengths(), Lengths()
    for names in (["a", "b", "c"], ["c"], ["b", "a"], ["a", "b", "c"], ["d", "c"]):
        factors = torch.tensor([0.5 + ord(name) - ord("a") for name in names], dtype=torch.float64)
        found = lengths.follow(names, factors, 0.9)
        apart = [alone.follow([name], one.view(1), 0.9) for name, one in zip(names, factors, strict=True)]
        assert torch.equal(found, torch.cat(apart))
    for names in (["a", "b"], ["c", "d"]) * 2:  # groups take turns
        lengths.follow(names, torch.ones(2, dtype=torch.float64), 0.9)
        for name in names:
            alone.follow([name], torch.ones(1, dtype=torch.float64), 0.9)
    state = lengths.state()
    assert state == alone.state() and sorted(state) == ["a", "b", "c", "d"]
    again = Lengths()
    again.load(state)
    one = torch.tensor([2.0], dtype=torch.float64)
    assert torch.equal(again.follow(["b"], one, 0.9), lengths.follow(["b"], one, 0.9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("arrived", ["all", "some", "few", "unsorted", "none"])
def test_factors_are_those_of_each_parameter(dtype: torch.dtype, arrived: str) -> None:
    generator = torch.Generator().manual_seed(1)
    spans = {"a": slice(0, 500), "b": slice(500, 530), "c": slice(530, 930)}
    flat = torch.randn(930, generator=generator, dtype=torch.float64).to(dtype)
    indices = {
        "all": None,
        "some": torch.arange(0, 930, 7),
        "few": torch.tensor([3, 501, 540]),
        "unsorted": torch.randperm(930, generator=generator)[:200],
        "none": torch.arange(0),
    }[arrived]
    if indices is not None:
        flat = torch.zeros_like(flat).index_copy(0, indices, flat[indices])
    pieces = {name: flat[span] for name, span in spans.items()}
    bounds = torch.tensor([0, 500, 530]), torch.tensor([500, 530, 930])
    handed = Handed.of(bounds, list(pieces.values()), indices, None, Sampler())
    shapes = {"a": (20, 25), "b": (30,), "c": (4, 100)}
    now: list[Tensor | None] = [
        (pieces[name].double() * s).to(dtype).view(shapes[name])
        for name, s in zip(spans, (0.25, 3.0, 1.0), strict=True)
    ]
    factors = factors_of(handed, now, None, Sampler())
    if arrived == "none":
        assert factors.by.isnan().all()
    else:
        assert factors.by.tolist() == pytest.approx([0.25, 3.0, 1.0], rel=5e-3)
    assert float(factors.odd) == 0.0
    now[1] = None  # of another optimizer
    assert factors_of(handed, now, None, Sampler()).by.isnan().tolist()[1]


def test_a_mask_is_no_factor() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    handed = Handed.of((torch.tensor([0]), torch.tensor([1000])), [values], None, None, Sampler())
    masked = values * 0.5
    masked[:300] = 0
    factors = factors_of(handed, [masked], None, Sampler())
    assert float(factors.by) == 0.5 and 0.2 < float(factors.odd) < 0.4
    noisy = values + torch.randn(1000, generator=torch.Generator().manual_seed(3))
    assert float(factors_of(handed, [noisy], None, Sampler()).odd) > 0.5


def changed(kind: str) -> tuple[list[str], bool]:
    def change(step: int, parameters: list[nn.Parameter]) -> None:
        grads: list[Any] = [p.grad for p in parameters]
        if kind == "noise":
            for grad in grads:
                grad.add_(torch.randn(grad.shape, generator=torch.Generator().manual_seed(step)), alpha=0.1)
        elif kind == "value":
            torch.nn.utils.clip_grad_value_(parameters, 1e-4)
        elif kind == "value that is taken over":  # from the second step on
            if not training.engine._binding.clip_in_place_of_averages(1e-4, "value", training.optimizer):
                torch.nn.utils.clip_grad_value_(parameters, 1e-4)
        elif kind == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, 0.01)

    with warnings.catch_warnings(record=True, action="always") as caught:
        training = Training()
        for step in range(8):
            training.step(step, change)
    return [str(w.message) for w in caught], all(bool(w.isfinite().all()) for w in training.weights())


@pytest.mark.parametrize(
    ("kind", "warned"),
    [
        *(pytest.param(kind, 1, marks=pytest.mark.in_backward) for kind in ("noise", "value")),
        *((kind, 0) for kind in ("noise", "value", "value that is taken over", "norm", "nothing")),
    ],
)
def test_changes_that_are_no_factor_are_warned_of_once(two_ranks: Ranks, kind: str, warned: int) -> None:
    (first, finite), (others, _) = two_ranks(changed, kind)
    assert finite and len(first) == warned and others == []
    assert all("register_hook" in sentence for sentence in first)


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


def test_a_resumed_run_knows_earlier_factors(two_ranks: Ranks) -> None:
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
    engine, of_group = falling.engine, next(iter(falling.engine.group_summaries().values()))
    logged = [steady.engine.summary(), engine.summary(), of_group]
    every = engine._mean_over_ranks(torch.tensor(engine.length_changes, dtype=torch.float64)).tolist()
    assert [logged[1][f"lengths/{name}"] for name in LengthChanges._fields] == every
    with Lines() as lines:
        steady.engine.close()
        falling.engine.close()
    return steady.engine.length_changes, falling.engine.length_changes, list(lines), logged


def test_it_is_counted_and_said_where_gradients_have_changed_their_length(two_ranks: Ranks) -> None:
    for rank, (steady, falling, said, logged) in enumerate(two_ranks(fallen)):
        assert [row["lengths/clipped"] for row in logged] == [0, 0, 0]
        assert [row["lengths/measured_anew"] > 0 for row in logged] == [False, True, True]
        assert steady == (0, 0)
        assert falling.clipped == 0 and falling.measured_anew > 1
        if rank == 0:
            assert ["measured anew" in line for line in said] == [False, True]
