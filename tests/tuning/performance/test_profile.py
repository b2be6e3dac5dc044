"""Profiles: by hand, against simulations, and there and back again."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.methods.grouping import ParameterSize, make_plan
from lightning_sparse.tools.advisor.networks import on, ring
from lightning_sparse.tuning.performance.cost import Line
from lightning_sparse.tuning.performance.merge import OptimalMerge, greedy_merge, optimal_merge
from lightning_sparse.tuning.performance.network import Network
from lightning_sparse.tuning.performance.profile import GroupCost, LayerTime, Profile, Traffic
from tests.reference.merging import groupings, simulated_seconds
from tests.trainers import EVERYTHING_SPARSE

OVERLAPS = ["none", "comm", "full"]
NOTHING = Line(0.0, 0.0)
seconds = st.floats(0, 1e3)
lines = st.builds(Line, seconds, seconds)
densities = st.floats(1e-6, 1)
traffic = st.builds(Traffic, st.sampled_from(["all_gather", "broadcast"]), st.floats(0, 20), lines)
costs = st.builds(GroupCost, densities, lines, lines, lines, st.lists(traffic, max_size=2).map(tuple))
layers = st.builds(LayerTime, st.text(max_size=4), st.tuples(st.text(max_size=4)), st.integers(1, 10**9), seconds)
networks = st.builds(Network, lines, lines, st.integers(1, 64))
profiles = st.builds(
    Profile,
    st.lists(layers, min_size=1, max_size=6),
    seconds,
    networks,
    st.lists(costs, min_size=1, max_size=4, unique_by=lambda cost: cost.density),
    st.sampled_from(OVERLAPS),
    st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)),
)


def cost(density: float, select: Line = NOTHING, process: Line = NOTHING, transfer: Line = NOTHING) -> GroupCost:
    return GroupCost(density, select, process, transfer)


def profile(
    numels: list[int],
    backward: list[float],
    costs: list[GroupCost],
    overlap: Any = "comm",
    rest: float = 0.0,
    buckets: tuple[float, float] = (0.0, 0.0),
) -> Profile:
    layers = [LayerTime(f"m{i}", (f"m{i}.p",), *pair) for i, pair in enumerate(zip(numels, backward, strict=True))]
    return Profile(layers, rest, ring(2, 0, 1e9), costs, overlap, buckets)


def merge(measured: Profile, density: float, rule: Any = "optimal") -> list[list[int]]:
    """Layers that are merged, by their positions."""
    sizes = [ParameterSize(layer.parameters[0], layer.numel, 4, "float32") for layer in measured.layers]
    plan = make_plan(sizes, OptimalMerge(rule), EVERYTHING_SPARSE, profile=measured, density=density)
    places = {layer.parameters[0]: place for place, layer in enumerate(measured.layers)}
    return [[places[p.name] for p in group.parameters] for group in plan]


@settings(deadline=None, max_examples=40)
@given(measured=profiles)
def test_costs_at_measured_densities_are_the_measured_ones(measured: Profile) -> None:
    for found in measured.costs:
        assert measured.group_cost(found.density) == found
    assert measured.group_cost(0.5e-6) == measured.costs[0]
    assert measured.group_cost(1.0) == measured.costs[-1]


@settings(deadline=None, max_examples=40)
@given(measured=profiles, places=st.lists(st.floats(0, 1), min_size=2, max_size=6), numel=st.integers(1, 10**9))
def test_costs_between_are_on_a_straight_line(measured: Profile, places: list[float], numel: int) -> None:
    for low, high in pairwise(measured.costs):
        ends = low.transfer(numel), high.transfer(numel)
        for place in places:
            density = low.density + place * (high.density - low.density)
            place = (density - low.density) / (high.density - low.density)
            found = measured.group_cost(density).transfer(numel)
            assert found == pytest.approx((1 - place) * ends[0] + place * ends[1], rel=1e-9, abs=1e-12 * max(1, *ends))
        tried = [low.density, *sorted(low.density + place * (high.density - low.density) for place in places)]
        found = [measured.group_cost(density).transfer(numel) for density in tried]
        slack = 1e-9 * max(ends)
        steps = [later - before for before, later in pairwise(found)]
        assert all(step >= -slack for step in steps) if ends[0] <= ends[1] else all(step <= slack for step in steps)


def test_costs_are_put_in_order_of_density() -> None:
    dear, cheap = cost(0.5, transfer=Line(5, 0)), cost(0.1, transfer=Line(1, 0))
    measured = profile([1], [1.0], [dear, cheap])
    assert measured.costs == (cheap, dear)
    assert measured.group_cost(0.3).transfer.alpha == pytest.approx(3)
    assert measured.group_cost(0.3).density == pytest.approx(0.3)
    assert measured.group_cost(0.01) == cheap
    assert measured.group_cost(1.0) == dear


def test_what_overlaps_with_backward_decides_who_waits_for_what() -> None:
    one = GroupCost(0.1, Line(1, 0.1), Line(2, 0.2), Line(4, 0.4))
    assert one.compute(10) == pytest.approx(6)
    expected = {"none": (14, 0), "comm": (6, 8), "full": (0, 14)}
    for overlap, (select, exchange) in expected.items():
        model = one.model(overlap)
        assert model.select_seconds(10) == pytest.approx(select)
        assert model.exchange_seconds(10) == pytest.approx(exchange)


def test_messages_that_travel_together_by_hand() -> None:
    one = GroupCost(0.1, Line(1, 0.1), Line(2, 0.2), Line(4, 0.4))
    for overlap, (select, exchange) in {"none": (6, 0), "comm": (6, 0), "full": (0, 6)}.items():
        model, messages = one.joined(overlap)
        assert (model.select_seconds(10), model.exchange_seconds(10)) == pytest.approx((select, exchange))
        assert messages == Line(4, 0.4)
    # Two layers of 10 with 5 s of backward each; the dearer of two densities pays for the collective.
    costs = [one, replace(one, density=0.2, transfer=Line(8, 0.8))]
    expected = {"none": 10 + 6 + 6 + 8 + 4 + 8, "comm": 10 + 6 + 6 + 8 + 4 + 8, "full": 10 + 6 + 6 - 5 + 4 + 8 + 8}
    for overlap, seconds in expected.items():
        measured = replace(profile([10, 10], [5.0, 5.0], costs, overlap=overlap), messages="step")
        assert measured.timeline_seconds(([10, 10], [5.0, 5.0]), [0.1, 0.2]) == pytest.approx(seconds)


def test_costs_between_densities_keep_their_traffic() -> None:
    network = Network(Line(100, 1), Line(30, 6), ranks=4)
    low, high = (
        on(network, GroupCost(d, NOTHING, NOTHING, NOTHING, (Traffic("all_reduce", 2, Line(8, 40 * d)),)))
        for d in (0.1, 0.3)
    )
    half = low.towards(high, 0.5)
    assert half.traffic[0].nbytes(10) == pytest.approx(8 + 40 * 0.2 * 10)
    assert on(network, half).transfer(10) == pytest.approx(half.transfer(10))


def test_traffic_on_another_network_by_hand() -> None:
    network = Network(Line(100, 1), Line(30, 6), ranks=4)  # one hop of the all-gather: 10 + 2 x
    traffic = (
        Traffic("all_gather", 2, Line(8, 0.5)),
        Traffic("all_reduce", 1, Line(0, 4)),
        Traffic("send_recv", 3, Line(5, 0.25)),
    )
    one = GroupCost(0.1, Line(7, 7), Line(9, 9), Line(1, 1), traffic)
    moved = on(network, one)
    x = 1000
    by_hand = 2 * 30 + 6 * (8 + 500) + 100 + 4000 + 3 * 10 + 2 * (5 + 250)
    assert moved.transfer(x) == pytest.approx(by_hand)
    assert replace(moved, transfer=one.transfer) == one
    assert on(network, cost(0.1, transfer=Line(3, 3))).transfer == Line(3, 3)  # nothing is known of what travels


def drawn(generator: random.Random, count: int, overlap: str, buckets: tuple[float, float] = (0.0, 0.0)) -> Profile:
    numels = [int(10 ** generator.uniform(0, 4)) for _ in range(count)]
    backward = [generator.uniform(0, 2) for _ in range(count)]

    def price() -> Line:
        return Line(generator.uniform(0, 1), generator.uniform(0, 2e-3))

    measured = [GroupCost(density, price(), price(), price()) for density in (0.01, 0.1)]
    return profile(numels, backward, measured, overlap, generator.uniform(0, 5), buckets)


def third_from_the_top(costs: Sequence[GroupCost], parts: list[str], numel: int) -> float:
    low, high = (sum(getattr(cost, part)(numel) for part in parts) for cost in costs)
    return (low + 2 * high) / 3


def numels_of(measured: Profile) -> list[int]:
    return [layer.numel for layer in measured.layers]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_steps_take_as_long_as_in_a_simulation(overlap: str) -> None:
    generator = random.Random(1)
    for _ in range(60):
        measured = drawn(generator, generator.randint(1, 7), overlap)
        groups = generator.choice(list(groupings(len(measured.layers))))
        parts = {
            "none": (["select", "process", "transfer"], []),
            "comm": (["select", "process"], ["transfer"]),
            "full": ([], ["select", "process", "transfer"]),
        }[overlap]
        select, exchange = (partial(third_from_the_top, measured.costs, names) for names in parts)
        density = 0.01 + 2 / 3 * 0.09
        simulated = simulated_seconds(groups, numels_of(measured), measured.backward_seconds, select, exchange)
        assert measured.compute_seconds == measured.rest_seconds + sum(measured.backward_seconds)
        sizes = [sum(numels_of(measured)[i] for i in group) for group in groups]
        times = [sum(measured.backward_seconds[i] for i in group) for group in groups]
        assert measured.timeline_seconds((sizes, times), density) == pytest.approx(
            measured.rest_seconds + simulated, rel=1e-9
        )


def test_backward_ends_however_early_the_last_group_is_complete() -> None:
    measured = profile([10, 10], [1.0, 5.0], [cost(0.1, transfer=Line(2, 0))], rest=3.0)
    assert measured.timeline_seconds(([10], [1.0]), 0.1) == 3 + 6  # 1 + 2 is over before
    assert measured.timeline_seconds(([10], [6.0]), 0.1) == 3 + 8
    assert measured.timeline_seconds(([], []), 0.1) == 3 + 6


def test_layers_are_merged_by_the_costs_of_the_density() -> None:
    generator = random.Random(2)
    differ = 0
    for _ in range(40):
        measured = drawn(generator, 8, "comm")
        for density in (0.01, 0.04, 0.1):
            model = measured.cost(density)
            best = optimal_merge(numels_of(measured), measured.backward_seconds, model)
            assert merge(measured, density) == best
            published = greedy_merge(numels_of(measured), measured.backward_seconds, model)
            assert merge(measured, density, "published") == published
            differ += best != published
    assert differ > 0


def handed_over(numels: list[int], backward: list[float], buckets: tuple[float, float]) -> list[float]:
    """When DDP hands over each layer: with the last layer of its bucket."""
    bucket_of, filled, buckets_so_far = [], 0.0, 0
    for numel in numels:
        bucket_of.append(buckets_so_far)
        filled += numel
        if filled >= buckets[min(buckets_so_far, 1)]:
            buckets_so_far, filled = buckets_so_far + 1, 0.0
    ends = [sum(backward[: i + 1]) for i in range(len(numels))]
    return [max(end for end, other in zip(ends, bucket_of, strict=True) if other == bucket) for bucket in bucket_of]


@settings(deadline=None, max_examples=40)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 100), st.floats(0, 10)), min_size=1, max_size=12),
    buckets=st.tuples(st.floats(0, 150), st.floats(0, 300)),
)
def test_layers_are_handed_over_when_their_bucket_is_full(
    pairs: list[tuple[int, float]], buckets: tuple[float, float]
) -> None:
    numels, backward = [n for n, _ in pairs], [s for _, s in pairs]
    measured = profile(numels, backward, [cost(0.1)], buckets=buckets)
    delivered = measured.delivery_seconds
    moments = [sum(delivered[: i + 1]) for i in range(len(numels))]
    assert moments == pytest.approx(handed_over(numels, backward, buckets), abs=1e-9)
    assert min(delivered) >= 0


def test_buckets_by_hand() -> None:
    backward = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert profile([10] * 5, backward, [cost(0.1)]).delivery_seconds == backward
    # The first bucket is full with the first layer, the second with the third, the last never.
    assert profile([10] * 5, backward, [cost(0.1)], buckets=(5, 20)).delivery_seconds == [1, 6, 0, 24, 0]
    assert profile([10] * 5, backward, [cost(0.1)], buckets=(1e9, 1e9)).delivery_seconds == [31, 0, 0, 0, 0]


def test_a_message_for_each_layer_of_a_bucket_gains_nothing() -> None:
    # Transfers cost by the byte only: early messages gain time where layers are handed over one by one.
    prices = [cost(0.1, transfer=Line(1e-3, 1))]
    assert merge(profile([1, 1, 1], [1.0, 1.0, 1.0], prices), 0.1) == [[0], [1], [2]]
    assert merge(profile([1, 1, 1], [1.0, 1.0, 1.0], prices, buckets=(100, 100)), 0.1) == [[0, 1, 2]]
    assert merge(profile([1, 1, 1], [1.0, 1.0, 1.0], prices, buckets=(1, 100)), 0.1) == [[0], [1, 2]]


def test_bad_profiles_are_refused() -> None:
    good = profile([1], [1.0], [cost(0.1)])
    with pytest.raises(ValueError, match="Expected a profile of at least one layer"):
        replace(good, layers=[])
    with pytest.raises(ValueError, match="at one density at least, but got none"):
        replace(good, costs=[])
    with pytest.raises(ValueError, match="Expected overlap to be one of none, comm, full, but got 'some'"):
        replace(good, overlap="some")
    with pytest.raises(ValueError, match="Expected messages to be one of group, step, but got 'auto'"):
        replace(good, messages="auto")
    for rest in (-1e-9, math.nan):
        with pytest.raises(ValueError, match="Expected rest_seconds to be at least 0, but got"):
            replace(good, rest_seconds=rest)
        with pytest.raises(
            ValueError, match=r"Expected backward_seconds to be at least 0, but got LayerTime\(name='m'"
        ):
            replace(good, layers=[LayerTime("m", ("m.p",), 1, rest)])
