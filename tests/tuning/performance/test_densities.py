"""Densities that follow from a profile: against a scan of densities."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.tools.advisor.networks import ring
from lightning_sparse.tuning.performance.cost import Line, Timeline
from lightning_sparse.tuning.performance.densities import hidden_densities
from lightning_sparse.tuning.performance.profile import GroupCost, LayerTime, Profile

SCAN = 500
FLOOR, CAP = 0.001, 0.5
GRID = [FLOOR * (CAP / FLOOR) ** (i / (SCAN - 1)) for i in range(SCAN)]


def rising(generator: random.Random, overlap: Any, scale: float, timeline: Timeline) -> Profile:
    """Costs that grow with density, measured at three densities of which one lies between floor and cap."""

    def prices() -> list[Line]:
        alphas = sorted(generator.uniform(0, 0.2) for _ in range(3))
        betas = sorted(generator.uniform(0, 1e-3) for _ in range(3))
        return [Line(scale * alpha, scale * beta) for alpha, beta in zip(alphas, betas, strict=True)]

    parts = zip([0.001, 0.02, 0.4], prices(), prices(), prices(), strict=True)
    layers = [LayerTime(f"m{i}", (f"m{i}.p",), *pair) for i, pair in enumerate(zip(*timeline, strict=True))]
    costs = [GroupCost(*part) for part in parts]
    return Profile(layers, generator.uniform(0, 3), ring(2, 0, 1e9), costs, overlap, (0, 0))


def drawn(generator: random.Random) -> tuple[list[int], list[float]]:
    count = generator.randint(1, 8)
    return (
        [int(10 ** generator.uniform(0, 3.5)) for _ in range(count)],
        [generator.uniform(0, 1) for _ in range(count)],
    )


def in_line(profile: Profile, density: float, numel: int, where: str) -> float:
    """Seconds of a group at one place, "processor" or "network", straight from the measured points."""
    points = [(cost.density, cost.select, cost.process, cost.transfer) for cost in profile.costs]
    places = {"none": ("processor",) * 3, "comm": ("processor", "processor", "network"), "full": ("network",) * 3}
    total = 0.0
    for part, place in enumerate(places[profile.overlap]):
        if place == where:
            seconds = [point[1 + part].alpha + point[1 + part].beta * numel for point in points]
            total += interpolated(density, [point[0] for point in points], seconds)
    return total


def interpolated(x: float, xs: list[float], ys: list[float]) -> float:
    if x <= xs[0]:
        return ys[0]
    for i in range(len(xs) - 1):
        if x <= xs[i + 1]:
            share = (x - xs[i]) / (xs[i + 1] - xs[i])
            return (1 - share) * ys[i] + share * ys[i + 1]
    return ys[-1]


def moments(profile: Profile, timeline: Timeline, densities: list[float]) -> tuple[float, float]:
    """When the gradient of the group after the first few is complete, and when the network is free, by intervals."""
    numels, backward = timeline
    processor: list[tuple[float, float]] = [(0.0, 0.0)]
    network: list[tuple[float, float]] = [(0.0, 0.0)]
    for numel, computing, density in zip(numels, backward, densities, strict=False):
        for task in (computing, in_line(profile, density, numel, "processor")):
            processor.append((processor[-1][1], processor[-1][1] + task))
        start = max(processor[-1][1], network[-1][1])
        network.append((start, start + in_line(profile, density, numel, "network")))
    return processor[-1][1] + backward[len(densities)], network[-1][1]


def lateness(profile: Profile, timeline: Timeline, before: list[float]) -> Callable[[float], float]:
    """By how much the exchange of the group after these ends too late: select + exchange against the next backward."""
    place = len(before)
    numels, backward = timeline
    complete, free = moments(profile, timeline, before)
    following = backward[place + 1] if place + 1 < len(numels) else 0.0

    def at(density: float) -> float:
        start = max(complete + in_line(profile, density, numels[place], "processor"), free)
        return start + in_line(profile, density, numels[place], "network") - (complete + following)

    return at


@pytest.mark.parametrize("overlap", ["comm", "full"])
def test_densities_are_the_largest_that_hide(overlap: str) -> None:
    generator = random.Random(1)
    outcomes = {"floor": 0, "cap": 0, "between": 0}
    for _ in range(14):
        timeline = drawn(generator)
        profile = rising(generator, overlap, 10 ** generator.uniform(-2, 0.3), timeline)
        found = hidden_densities(timeline, profile, FLOOR, CAP)
        assert len(found) == len(timeline[0])
        for place, density in enumerate(found):
            late = lateness(profile, timeline, found[:place])
            hide = [d for d in GRID if late(d) <= 0]
            if not hide:
                assert density == FLOOR
            elif len(hide) == SCAN:
                assert density == CAP
            else:
                assert max(hide) <= density * (1 + 1e-9)
                assert density <= GRID[len(hide)] * (1 + 1e-9)
                assert abs(late(density)) < 1e-6
            outcomes["floor" if not hide else "cap" if len(hide) == SCAN else "between"] += 1
    assert min(outcomes.values()) > 5, outcomes


def test_late_exchanges_delay_the_next_ones() -> None:
    # The price is 1 s per unit of density; backward takes 1 s a group.
    timeline = [1, 1, 1, 1], [1.0, 1.0, 1.0, 1.0]
    costs = [GroupCost(d, Line(0, 0), Line(0, 0), Line(transfer, 0)) for d, transfer in ((0.1, 0.1), (1.0, 1.0))]
    layers = [LayerTime(f"m{i}", (f"m{i}.p",), 1, 1.0) for i in range(4)]
    profile = Profile(layers, 0.0, ring(2, 0, 1e9), costs, "comm", (0, 0))
    assert hidden_densities(timeline, profile, 0.1, 1.0) == [1.0, 1.0, 1.0, 0.1]
    # The floor of 0.3 cannot hide behind 0.2 s, and leaves 0.9 s to the next exchange.
    found = hidden_densities(([1, 1, 1, 1], [1.0, 0.2, 1.0, 1.0]), profile, 0.3, 1.0)
    assert found == [0.3, pytest.approx(0.9), 1.0, 0.3]
    # Nothing hides where messages travel together when backward is over.
    assert hidden_densities(timeline, replace(profile, messages="step"), 0.1, 1.0) == [0.1] * 4


@pytest.mark.thorough
def test_what_hides_exactly_at_the_floor_does_not_fall_below_it() -> None:
    for floor in (i / 1000 for i in range(1, 400)):
        costs = [GroupCost(d, Line(0, 0), Line(0, 0), Line(d, 0)) for d in (1e-4, 1.0)]
        layers = [LayerTime(name, (name,), 1, 1.0) for name in "ab"]
        profile = Profile(layers, 0.0, ring(2, 0, 1e9), costs, "full", (0, 0))
        window = profile.cost(floor).exchange_seconds(1)
        found = hidden_densities(([1, 1], [0.0, window]), profile, floor, 1.0)
        assert found[0] >= floor
        assert found[0] == pytest.approx(floor)


def test_nothing_hides_where_nothing_overlaps() -> None:
    timeline = [1000, 1000, 1000], [1e6, 1e6, 1e6]
    profile = rising(random.Random(2), "none", 1e-6, timeline)
    assert hidden_densities(timeline, profile, 0.01, 0.1) == [0.01] * 3
    assert hidden_densities(([], []), profile, 0.01, 0.1) == []


numbers = st.floats(0, 10)
prices = st.builds(Line, numbers, st.floats(0, 1e-2))


@settings(deadline=None, max_examples=60)
@given(
    groups=st.lists(st.tuples(st.integers(1, 10_000), numbers), min_size=1, max_size=6),
    costs=st.lists(
        st.builds(GroupCost, st.floats(1e-4, 1), prices, prices, prices),
        min_size=1,
        max_size=3,
        unique_by=lambda cost: cost.density,
    ),
    overlap=st.sampled_from(["none", "comm", "full"]),
    bounds=st.tuples(st.floats(1e-4, 1), st.floats(1e-4, 1)).map(sorted),
)
def test_whatever_was_measured_densities_keep_their_bounds(
    groups: list[tuple[int, float]], costs: list[GroupCost], overlap: Any, bounds: list[float]
) -> None:
    # Noise may let costs fall with density.
    floor, cap = bounds
    timeline = [numel for numel, _ in groups], [seconds for _, seconds in groups]
    layers = [LayerTime("m", ("m.p",), 1, sum(timeline[1]))]
    profile = Profile(layers, 1.0, ring(2, 0, 1e9), costs, overlap, (0, 0))
    for density in hidden_densities(timeline, profile, floor, cap):
        assert floor <= density <= cap
