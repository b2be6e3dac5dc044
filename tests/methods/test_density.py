"""Densities become counts in one place; schedules over steps."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
