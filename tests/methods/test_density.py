"""Densities become counts in one place; schedules over steps."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.core.layout import Gradient
from lightning_sparse.methods.density import Constant, Warmup, as_schedule, check_density, count

NUMBERS = st.floats(min_value=1e-9, max_value=1.0)


@settings(deadline=None, max_examples=200)
@given(NUMBERS, st.integers(1, 2**31 - 2))
def test_count_is_the_floor_of_the_product(density: float, numel: int) -> None:
    exact = Fraction(density) * numel  # of the float as it is, without rounding
    k = count(density, numel)
    assert 1 <= k <= numel
    # A product that misses an integer by a relative 1e-12 may count as that integer.
    assert k in (max(1, math.floor(exact)), max(1, math.floor(exact * (1 + Fraction(2, 10**12)))))


@pytest.mark.parametrize("numel", [100, 1000, 10_000, 12_300])
def test_a_decimal_density_that_divides_the_group_gives_the_exact_share(numel: int) -> None:
    # 0.29 * 100 is 28.999999999999996 in floating point.
    for percent in range(1, 101):
        assert count(percent / 100, numel) == percent * numel // 100


@settings(deadline=None, max_examples=100)
@given(NUMBERS, NUMBERS, st.integers(1, 10**9))
def test_a_higher_density_never_gives_fewer(a: float, b: float, numel: int) -> None:
    assert count(min(a, b), numel) <= count(max(a, b), numel)


def test_count_is_at_least_one_and_all_at_full_density() -> None:
    assert count(1e-9, 1) == count(1e-9, 1000) == 1
    assert [count(1.0, numel) for numel in (1, 7, 2**31 - 2)] == [1, 7, 2**31 - 2]


@pytest.mark.parametrize("density", [0, -0.1, 1.0000001, 2, float("nan"), float("inf"), True, "0.1", None, 1j])
def test_a_density_outside_its_range_is_refused_with_its_name(density: object) -> None:
    with pytest.raises(ValueError, match=r"Expected share to be a number in \(0, 1\].*, but got"):
        check_density(density, "share")
    for make in (Constant, as_schedule):
        with pytest.raises(ValueError, match=r"Expected density to be a number in \(0, 1\]"):
            make(density)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("1%", "0.01"), (" 2.5 %", "0.025"), ("0.01", "0.01"), ("1e-3", "0.001"), ("100%", "1"),
     ("200%", None), ("0", None), ("-1%", None), ("nan", None), ("1%%", None), ("much", None), (0.0, None)],
)  # fmt: skip
def test_a_density_that_is_written_as_text_is_answered_with_the_number(given: object, meant: str | None) -> None:
    with pytest.raises(ValueError, match="Expected density to be") as raised:
        as_schedule(given)  # type: ignore[arg-type]
    said = str(raised.value)
    assert said.endswith(f"but got {given!r}." if meant is None else f"but got {given!r}. Did you mean {meant}?")


def test_a_number_becomes_a_constant_schedule_and_a_schedule_stays_itself() -> None:
    assert as_schedule(1) == Constant(1)
    assert as_schedule(0.25)(10**6) == 0.25
    warmup = Warmup(0.25, 0.01, steps=3)
    assert as_schedule(warmup) is warmup


def test_warmup_goes_from_start_to_end_in_equal_factors() -> None:
    # 0.16 to 0.01 in 4 steps: a factor 16, 2 a step.
    schedule = Warmup(0.16, 0.01, steps=4)
    assert [schedule(t) for t in range(7)] == pytest.approx([0.16, 0.08, 0.04, 0.02, 0.01, 0.01, 0.01], rel=1e-14)
    assert schedule(4) == 0.01  # exactly, from here on


@settings(deadline=None, max_examples=100)
@given(NUMBERS, NUMBERS, st.integers(1, 1000), st.integers(0, 2000))
def test_warmup_stays_between_its_ends_and_moves_one_way(start: float, end: float, steps: int, t: int) -> None:
    schedule = Warmup(start, end, steps)
    low, high = sorted([start, end])
    slack = 1 + 1e-12  # powers are rounded
    assert low / slack <= schedule(t) <= high * slack
    assert 0 < schedule(t) <= 1
    if start > end:
        assert schedule(t + 1) <= schedule(t) * slack
    else:
        assert schedule(t + 1) * slack >= schedule(t)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ((0.0, 0.01, 5), "Expected start to be"),
        ((0.25, 1.5, 5), "Expected end to be"),
        ((0.25, 0.01, 0), "Expected steps to be a positive integer, but got 0"),
        ((0.25, 0.01, 2.0), "Expected steps to be a positive integer, but got 2.0"),
        ((0.25, 0.01, True), "Expected steps to be a positive integer, but got True"),
    ],
)
def test_warmup_says_which_setting_is_wrong(settings_: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Warmup(*settings_)


def regimes(gradients: list[torch.Tensor], **settings: Any) -> list[float]:
    schedule = ls.density.Accordion(low=0.1, high=0.5, interval=4, **settings)
    return [step.target_density for step in ls.simulate(gradients, sparsifier="everything", density=schedule)]


def constant(level: float, steps: int) -> list[torch.Tensor]:
    return [torch.full((2, 40), level)] * steps


def test_accordion_is_critical_until_two_norms_can_be_compared_and_calm_then() -> None:
    assert regimes(constant(1.0, 20)) == [0.5] * 8 + [0.1] * 12


def test_accordion_reacts_in_the_next_interval_to_a_change_of_the_norm_by_the_threshold() -> None:
    seen = regimes(constant(1.0, 16) + constant(3.0, 16))
    assert seen == [0.5] * 8 + [0.1] * 12 + [0.5] * 8 + [0.1] * 4


def test_accordion_compares_only_intervals_of_equal_density() -> None:
    # Residuals take up more when the density falls: the norm may change without any change of the gradients.
    group = ls.density.Accordion(low=0.1, high=0.5, interval=1).for_group()
    seen = []
    for step, norm in enumerate([1.0, 1.0, 9.0, 9.0, 1.0, 8.0, 8.0]):
        seen.append(group(step))
        group.observe(step, Gradient([torch.tensor([norm])]))
    assert seen == [0.5, 0.5, 0.1, 0.1, 0.1, 0.5, 0.5]
    assert group(7) == 0.1


@pytest.mark.parametrize(("norms", "critical"), [((1.0, 1.49), False), ((1.0, 1.5), True), ((1.0, 0.5), True)])
def test_accordion_compares_norms_relative_to_the_one_before(norms: tuple[float, float], critical: bool) -> None:
    group = ls.density.Accordion(low=0.1, high=0.5, interval=2).for_group()
    for step, norm in enumerate([norms[0], 0.0, norms[1], 0.0]):
        group.observe(step, Gradient([torch.tensor([norm, 0.0], dtype=torch.float64)]))
    assert group(4) == (0.5 if critical else 0.1)


def test_accordion_adds_updates_up_before_it_takes_the_norm_and_leaves_skipped_steps_out() -> None:
    group = ls.density.Accordion(low=0.1, high=0.5, interval=3).for_group()
    cancelling = [torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 2.0]), torch.full((2,), float("nan"))]
    for step, update in enumerate(cancelling * 2):
        group.observe(step, Gradient([update]))
    assert group.before == {0.5: 2.0}
    assert group(6) == 0.1


@pytest.mark.parametrize("sparsifier", ["everything", "top_k"])
def test_accordion_does_not_see_the_loss_scale(one_rank: None, sparsifier: str) -> None:
    def densities(scaled: bool) -> list[float]:
        model = nn.Linear(40, 40, bias=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10, enabled=scaled)
        schedule = ls.density.Accordion(low=0.1, high=0.5, interval=4)
        options: dict[str, Any] = {"sparsifier": sparsifier, "density": schedule, "scaler": scaler if scaled else None}
        ddp = DistributedDataParallel(model)
        engine = ls.attach(ddp, single_device="sparse", watch=None, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        seen = []
        for _ in range(24):
            optimizer.zero_grad()
            scaler.scale(ddp(torch.ones(4, 40)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(engine.groups[0].density(engine.step))
        engine.close()
        return seen

    assert densities(scaled=True) == densities(scaled=False)


def test_accordion_is_critical_for_an_interval_after_each_milestone() -> None:
    seen = regimes(constant(1.0, 24), milestones=[18, 10])
    assert seen == [0.5] * 8 + [0.1] * 2 + [0.5] * 4 + [0.1] * 4 + [0.5] * 4 + [0.1] * 2


def test_accordion_decides_late_where_a_group_was_not_used_at_the_end_of_an_interval() -> None:
    group = ls.density.Accordion(low=0.1, high=0.5, interval=2).for_group()
    for step in (0, 2, 4):  # even steps only
        assert group(step) == (0.1 if step == 4 else 0.5)
        group.observe(step, Gradient([torch.ones(3)]))


def test_accordion_does_not_compare_an_interval_that_had_two_densities() -> None:
    schedule = ls.density.Accordion(low=0.1, high=0.5, interval=10, milestones=[25])
    # 20 to 29 are half low, half high, and loud: the calm ones before and after must not be compared with them.
    updates = [torch.tensor([5.0 if 20 <= step < 30 else 1.0]) for step in range(60)]
    traces = ls.simulate((u.expand(1, 1) for u in updates), sparsifier="everything", density=schedule)
    assert [trace.target_density for trace in traces] == [0.5] * 20 + [0.1] * 5 + [0.5] * 10 + [0.1] * 25


def test_accordion_is_calm_where_nothing_happens() -> None:
    assert regimes(constant(0.0, 9)) == [0.5] * 8 + [0.1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 0.5, "high": 0.1, "interval": 5}, "low to be at most high"),
        ({"low": 0.1, "high": 0.2, "interval": 5, "milestones": ("a",)}, "milestones to be a sequence of steps"),
        ({"low": 0.1, "high": 0.2, "interval": 5, "milestones": 7}, "milestones to be a sequence of steps, but got 7"),
        ({"low": 0.0, "high": 0.1, "interval": 5}, "low to be a number in"),
        ({"low": 0.1, "high": 0.2, "interval": 0}, "interval to be a positive integer"),
        ({"low": 0.1, "high": 0.2, "interval": 5, "threshold": 0.0}, "threshold to be a positive number"),
    ],
)
def test_accordion_refuses_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ls.density.Accordion(**settings)
