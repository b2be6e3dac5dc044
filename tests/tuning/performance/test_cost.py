"""Costs: by hand, against what exchanges really send, and lines through measurements."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.tools.advisor.networks import line_of, ring
from lightning_sparse.tuning.performance.cost import CostModel, Curve, Line
from lightning_sparse.tuning.performance.network import Network

seconds = st.floats(0, 1e3)
NETWORK = Network(all_reduce=Line(100, 1), all_gather=Line(10_000, 3))


def test_costs_by_hand() -> None:
    cost = CostModel(exchange=Line(3, 0.5), selection=Line(2, 0.25))
    assert cost.exchange_seconds(8) == 3 + 4
    assert cost.select_seconds(8) == 2 + 2
    assert cost.select_seconds(1) == 2.25
    assert CostModel(Line(3, 0.5)).select_seconds(1000) == 0


@settings(deadline=None, max_examples=100)
@given(
    prices=st.tuples(seconds, seconds, seconds, seconds),
    small=st.integers(0, 10**9),
    more=st.integers(0, 10**9),
)
def test_costs_are_monotone_and_nothing_costs_nothing(prices: tuple[float, ...], small: int, more: int) -> None:
    alpha, beta, fixed, each = prices
    cost = CostModel(Line(alpha, beta), Line(fixed, each))
    for function in (cost.select_seconds, cost.exchange_seconds):
        assert function(0) == 0
        assert 0 <= function(small) <= function(small + more)


def test_lines_add_up_and_change_their_unit() -> None:
    assert Line(1, 2) + Line(3, 4) == Line(4, 6)
    assert Line(1, 2).per(8) == Line(1, 16)
    assert (Line(1, 2) + Line(3, 4))(10) == Line(1, 2)(10) + Line(3, 4)(10)


def ring_seconds(ranks: int, chunk_bytes: float, steps: int, latency: float, bits_per_second: float) -> float:
    """Rank after rank hands chunks on; all links work at the same time, so that steps add up."""
    clock = [0.0] * ranks
    for _ in range(steps):
        sent = [time + latency + 8 * chunk_bytes / bits_per_second for time in clock]
        clock = [max(sent[rank], sent[rank - 1]) for rank in range(ranks)]
    return max(clock)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_ring_takes_as_long_as_its_steps(ranks: int) -> None:
    network = ring(ranks, latency=1e-4, bits_per_second=1e9)
    reduced = ring_seconds(ranks, 6000 / ranks, 2 * (ranks - 1), 1e-4, 1e9)
    assert network.all_reduce(6000) == pytest.approx(reduced, rel=1e-12)
    gathered = ring_seconds(ranks, 6000, ranks - 1, 1e-4, 1e9)
    assert network.all_gather(6000) == pytest.approx(gathered, rel=1e-12)


def test_an_infinite_rate_leaves_latencies() -> None:
    assert ring(4, 1e-3, math.inf) == Network(Line(6e-3, 0), Line(3e-3, 0), ranks=4)


@pytest.mark.parametrize("alpha", [0.0, 1e-5, 2e-3])
@pytest.mark.parametrize("beta", [0.0, 1e-10, 3e-8])
def test_a_line_without_noise_is_found(alpha: float, beta: float) -> None:
    if alpha == beta == 0:
        return  # no time can be measured
    sizes = [4**i for i in range(2, 13)]
    fitted = Line.fit(sizes, [alpha + beta * size for size in sizes])
    assert fitted.alpha == pytest.approx(alpha, rel=1e-9, abs=1e-15)
    assert fitted.beta == pytest.approx(beta, rel=1e-9, abs=1e-20)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_outliers_do_not_bend_the_line(seed: int) -> None:
    generator = random.Random(seed)
    sizes = [4**i for i in range(4, 13) for _ in range(15)]
    times = [(5e-5 + 1e-9 * size) * generator.lognormvariate(0, 0.1) for size in sizes]
    # A third of all repetitions hang, and all of one size.
    times = [t * (50 if generator.random() < 0.3 or size == 4**8 else 1) for size, t in zip(sizes, times, strict=True)]
    fitted = Line.fit(sizes, times)
    assert fitted.alpha == pytest.approx(5e-5, rel=0.15)
    assert fitted.beta == pytest.approx(1e-9, rel=0.15)


@settings(deadline=None, max_examples=100)
@given(
    points=st.dictionaries(st.integers(1, 10**9), st.floats(1e-7, 1e2), min_size=2, max_size=8),
    near=st.floats(0.5, 2),
    shift=st.floats(-1, 1),
)
def test_no_other_line_is_closer(points: dict[int, float], near: float, shift: float) -> None:
    def deviation(line: Line) -> float:
        return sum(abs(line(x) / y - 1) for x, y in points.items())

    best = Line.fit(list(points), list(points.values()))
    assert best.alpha >= 0
    assert best.beta >= 0
    largest = max(points.values()) / max(points)
    others = [
        Line(best.alpha * near, best.beta),
        Line(best.alpha, best.beta * near),
        Line(best.alpha * near, best.beta / near),
        Line(max(0.0, best.alpha + shift * min(points.values())), best.beta),
        Line(best.alpha, max(0.0, best.beta + shift * largest)),
    ]
    assert all(deviation(best) <= deviation(other) * (1 + 1e-9) + 1e-9 for other in others)


def test_repetitions_count_by_their_median() -> None:
    line = Line.fit([1, 1, 1, 2, 2, 2], [1.0, 3.0, 900.0, 5.0, 0.1, 700.0])
    assert line == Line(1.0, 2.0)  # through (1, 3) and (2, 5)


def test_coefficients_are_not_negative() -> None:
    falling = Line.fit([1, 2, 4], [4.0, 2.0, 1.0])
    assert falling.beta == 0
    steep = Line.fit([1, 2, 4], [0.1, 1.0, 3.0])
    assert steep.alpha == 0
    assert steep.beta > 0


@pytest.mark.parametrize(
    ("amounts", "times", "sentence"),
    [
        ([1, 2], [1.0], "one time for each amount, but got 2 amounts and 1 times"),
        ([1, 1], [1.0, 2.0], "at least 2 different amounts, but got 1"),
        ([], [], "at least 2 different amounts, but got 0"),
        ([0, 1], [1.0, 2.0], r"positive and finite, but got \(0, 1\.0\)"),
        ([1, 2], [1.0, 0.0], r"positive and finite, but got \(2, 0\.0\)"),
        ([1, 2], [1.0, math.nan], r"positive and finite, but got \(2, nan\)"),
        ([1, math.inf], [1.0, 1.0], r"positive and finite, but got \(inf, 1\.0\)"),
    ],
)
def test_bad_measurements_are_refused(amounts: list[float], times: list[float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Line.fit(amounts, times)


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, True, "1"])
def test_bad_prices_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="Expected alpha to be a finite number of seconds of at least 0, but got"):
        Line(value, 0)
    with pytest.raises(ValueError, match="Expected beta to be a finite number of seconds per unit of at least 0"):
        Line(0, value)
    with pytest.raises(ValueError, match="Expected latency to be a finite number of seconds of at least 0, but got"):
        ring(2, value, 1e9)


def test_other_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected exchange to be a Line, but got 1\.0"):
        CostModel(1.0)
    with pytest.raises(ValueError, match="Expected selection to be a Line or a Curve, but got None"):
        CostModel(Line(1, 1), None)
    for ranks in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="Expected ranks to be a positive integer, but got"):
            ring(ranks, 0, 1e9)
    for rate in (0, -1, math.nan, True, "1e9"):
        with pytest.raises(ValueError, match="Expected bits_per_second to be a positive number, but got"):
            ring(2, 0, rate)
    with pytest.raises(ValueError, match="Expected amount to be a finite number of at least 0, but got -1"):
        CostModel(Line(1, 1)).exchange_seconds(-1)
    with pytest.raises(ValueError, match="Expected amount to be a finite number of at least 0, but got -1"):
        CostModel(Line(1, 1)).select_seconds(-1)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_other_operations_follow_from_a_hop_of_the_ring(ranks: int) -> None:
    network = ring(ranks, latency=1e-4, bits_per_second=1e9)
    one, steps = 6000, ranks - 1
    expected = {
        "all_reduce": ring_seconds(ranks, one / ranks, 2 * steps, 1e-4, 1e9),
        "all_gather": ring_seconds(ranks, one, steps, 1e-4, 1e9),
        "send_recv": ring_seconds(ranks, one, 1, 1e-4, 1e9),
        "all_to_all": ring_seconds(ranks, one / ranks, steps, 1e-4, 1e9),
        # In pieces so small that the last rank has the last one as soon as the source has sent it, but for latencies.
        "broadcast": steps * 1e-4 + 8 * one / 1e9,
    }
    for operation, seconds in expected.items():
        assert line_of(network, operation)(one) == pytest.approx(seconds, rel=1e-12), operation


def test_one_rank_needs_no_operation_and_unknown_ones_are_refused() -> None:
    alone = ring(1, 1e-3, 1e9)
    for operation in ("all_reduce", "all_gather", "broadcast", "all_to_all", "send_recv"):
        assert line_of(alone, operation)(1000) == 0
    with pytest.raises(
        ValueError, match=r"Expected operation to be one of library_all_reduce, .*, broadcast, but got 'scatter'"
    ):
        line_of(NETWORK, "scatter")


def test_a_curve_goes_through_what_was_measured() -> None:
    curve = Curve((10, 100, 1000), (1.0, 2.0, 30.0))
    for amount, seconds in [
        (0, 0.0),
        (1, 1.0),
        (10, 1.0),
        (55, 1.5),
        (100, 2.0),
        (550, 16.0),
        (1000, 30.0),
        (2000, 60.0),
    ]:
        assert curve(amount) == pytest.approx(seconds)
    assert curve.line() == Line.fit(curve.amounts, curve.seconds)
    assert Curve((5,), (2.0,)).line() == Line(2.0, 0.0)
    assert Curve((5, 6), (0.0, 0.0)).line() == Line(0, 0)


def test_curves_and_lines_add_up() -> None:
    curve, other, line = Curve((10, 100), (1.0, 2.0)), Curve((20, 50, 100), (3.0, 5.0, 6.0)), Line(0.5, 0.1)
    for amount in (3, 10, 20, 33, 50, 77, 100):
        if amount >= 10:  # below its smallest amount, a curve is flat
            assert (curve + line)(amount) == pytest.approx(curve(amount) + line(amount))
            assert (line + curve)(amount) == pytest.approx(curve(amount) + line(amount))
        assert (curve + other)(amount) == pytest.approx(curve(amount) + other(amount))
    assert CostModel(Line(0, 1), curve).select_seconds(55) == 1.5


@pytest.mark.parametrize(
    ("amounts", "seconds"),
    [
        ((), ()),
        ((1, 2), (1,)),
        ((2, 1), (1, 1)),
        ((1, 1), (1, 1)),
        ((0, 1), (1, 1)),
        ((1,), (-1,)),
        ((1,), (math.nan,)),
    ],
)
def test_what_is_no_curve_is_refused(amounts: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        Curve(amounts, seconds)
    with pytest.raises(ValueError, match="Expected amount to be"):
        Curve((1,), (1,))(-1)
