"""Predicted step times: against simulations, and how methods change with ranks and networks."""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.api import simulation
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Context
from lightning_sparse.engine.pipeline import exchange_group
from lightning_sparse.methods.grouping import OVERLAPPED_MB, ParameterSize, bucket_numels
from lightning_sparse.methods.sparsifiers import SPARSIFIERS
from lightning_sparse.tools.advisor import Measured, Method, Prediction, Scenario
from lightning_sparse.tools.advisor.networks import farther, ring
from lightning_sparse.tools.advisor.prediction import (
    BEST_TRAINED,
    LATENCY,
    TRIED,
    best_groupings,
    overlapped,
    predict,
    scenarios,
    winner,
)
from lightning_sparse.tools.advisor.run import rules_of
from lightning_sparse.tuning.performance.cost import Curve, Line
from lightning_sparse.tuning.performance.network import Network
from lightning_sparse.tuning.performance.profile import GroupCost, LayerTime, Profile, Traffic
from tests.covering import by_default, in_one_test
from tests.reference.merging import groupings
from tests.reference.steps import simulated_step
from tests.tools.advisor.made_up import HERE, NOTHING, measured, method, predicted

OVERLAPS = ["none", "comm", "full"]
BOTH = ["step", "group"]
ALONE = Network(NOTHING, NOTHING, 1)
MIB = 2**20
Groups = list[tuple[list[str], int]]


# Step times


def by_parameters(seen: Measured, groups: list[list[str]]) -> Groups:
    numels = {size.name: size.numel for size in seen.sizes}
    return [(names, sum(numels[name] for name in names)) for names in groups]


def cut(seen: Measured, grouping: str) -> Iterator[Groups]:
    """The groups of a grouping; of "optimal_merge" all that it could choose."""
    names = [size.name for size in reversed(seen.sizes)]
    modules = [[name for name in names if name.startswith(f"m{i}.")] for i in reversed(range(len(seen.profile.layers)))]
    numels = {size.name: size.numel for size in seen.sizes}
    if grouping == "model":
        yield by_parameters(seen, [names])
    elif grouping == "layer":
        yield by_parameters(seen, modules)
    elif grouping == "optimal_merge":
        for parts in groupings(len(modules)):
            yield by_parameters(seen, [[name for i in part for name in modules[i]] for part in parts])
    else:
        elements, size = (names, 4) if grouping == "bucket" else (modules, 1)
        full = [MIB, 25 * MIB] if grouping == "bucket" else [8192, 8192]
        groups: list[list[str]] = [[]]
        for element in elements:
            if sum(numels[name] for name in groups[-1]) * size >= full[min(1, len(groups) - 1)]:
                groups.append([])
            groups[-1] += [element] if isinstance(element, str) else element
        yield by_parameters(seen, groups)


def simulated(seen: Measured, one: Method, groups: Groups) -> float:
    parts: dict[str, tuple[list[Line], list[Line]]] = {
        "none": ([one.cost.select, one.cost.process, one.cost.transfer], []),
        "comm": ([one.cost.select, one.cost.process], [one.cost.transfer]),
        "full": ([], [one.cost.select, one.cost.process, one.cost.transfer]),
    }
    overlap, messages, buckets = str(seen.profile.overlap), seen.profile.messages, seen.profile.bucket_numels
    if one.builtin:  # its all-reduces go on beside backward, whatever others do
        overlap, messages, buckets = "comm" if seen.on_cpu else "full", "group", (MIB / 4, 25 * MIB / 4)
    select, send = parts[overlap]
    joined = 0.0
    if messages == "step":
        select, send = ([line for line in part if line is not one.cost.transfer] for part in (select, send))
        tree = any(part.operation == "send_recv" for part in one.cost.traffic)
        joined = one.cost.transfer.alpha * (len(groups) if tree else 1)
        joined += one.cost.transfer.beta * sum(numel for _, numel in groups)
    return seen.profile.rest_seconds + simulated_step(
        [(layer.parameters, layer.numel, layer.backward_seconds) for layer in seen.profile.layers],
        groups,
        buckets,
        lambda numel: sum(line.alpha + line.beta * numel for line in select),
        lambda numel: sum(line.alpha + line.beta * numel for line in send),
        joined,
    )


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("grouping", [*TRIED, "optimal_merge"])
@pytest.mark.parametrize("messages", BOTH)
def test_steps_take_as_long_as_in_a_simulation(messages: Any, grouping: str, overlap: str) -> None:
    generator = random.Random(1)
    cuts = Counter[int]()
    for seed in range(12):
        kind = generator.choice(["float32.cpu", "float32.cuda"])
        seen = measured(generator.randint(1, 7), overlap, seed, kind=kind, messages=messages)
        for one in [one for one in seen.methods if grouping == "bucket" or not one.builtin]:
            found, groups = seen.step_seconds(one, grouping)
            possible = list(cut(seen, grouping))
            times = [simulated(seen, one, chosen) for chosen in possible]
            assert found == pytest.approx(min(times), rel=1e-9)
            assert groups in [len(chosen) for chosen, time in zip(possible, times, strict=True) if time <= found + 1e-9]
            cuts[groups] += 1
    alone = messages == "step" or overlap == "none"  # where nothing but the number of groups matters
    one_is_best = grouping == "model" or (grouping == "optimal_merge" and alone and overlap != "full")
    assert len(cuts) == 1 if one_is_best else len(cuts) > 1


def test_where_messages_travel_together_groups_are_merged_by_what_they_do_themselves() -> None:
    # Selections from 100 coordinates each take less than one from 200, as where 100 of them fit into a cache.
    curve = Curve((1.0, 100.0, 200.0), (0.01, 1.0, 4.0))
    layers = [LayerTime(name, (f"{name}.p",), 100, 10.0) for name in ("b", "a")]
    sizes = [ParameterSize(f"{name}.p", 100, 4, "float32.cpu") for name in ("a", "b")]
    one = method("top_k", 0.1, GroupCost(0.1, curve, NOTHING, Line(7, 0.001)))
    for overlap in ("none", "comm"):
        seen = Measured(sizes, Profile(layers, 0.0, ALONE, [one.cost], overlap, (0, 0), "step"), [])
        assert seen.step_seconds(one, "optimal_merge") == (pytest.approx(20 + 2 * 1 + 7.2), 2)
        assert seen.step_seconds(one, "model") == (pytest.approx(20 + 4 + 7.2), 1)
        assert seen.step_seconds(one, "layer")[0] == seen.step_seconds(one, "optimal_merge")[0]


def test_messages_from_rank_to_rank_are_not_joined() -> None:
    for seed, overlap in enumerate(OVERLAPS):
        seen = measured(5, overlap, seed, messages="step")
        one = seen.methods[-1]
        tree = replace(one, cost=replace(one.cost, traffic=(Traffic("send_recv", 2.0, Line(8.0, 0.4)),)))
        [groups] = cut(seen, "layer")
        found = seen.step_seconds(tree, "layer")[0]
        assert found == pytest.approx(simulated(seen, tree, groups), rel=1e-9)
        dearer = 4 * tree.cost.transfer.alpha
        assert found - seen.step_seconds(one, "layer")[0] == pytest.approx(dearer)


def test_groups_that_follow_another_order_than_backward() -> None:
    for seed, overlap in enumerate(OVERLAPS):
        seen = measured(6, overlap, seed)
        layers = list(seen.profile.layers)
        random.Random(seed).shuffle(layers)
        seen = replace(seen, profile=replace(seen.profile, layers=layers))
        for one in seen.methods[4:]:
            for grouping in ("layer", "bucket", "merge_below", "model"):
                [groups] = cut(seen, grouping)
                assert seen.step_seconds(one, grouping)[0] == pytest.approx(simulated(seen, one, groups), rel=1e-9)


def test_a_step_without_exchange() -> None:
    seen = measured()
    assert seen.profile.compute_seconds == pytest.approx(4e-3 + sum(seen.profile.backward_seconds))
    free = method("top_k", 0.01, GroupCost(0.01, NOTHING, NOTHING, NOTHING))
    for grouping in TRIED:
        assert seen.step_seconds(free, grouping)[0] == pytest.approx(seen.profile.compute_seconds)


def test_measurements_survive_a_file() -> None:
    for seed, overlap in enumerate(OVERLAPS):
        seen = measured(4, overlap, seed, ranks=3)
        again = Measured.from_dict(json.loads(json.dumps(seen.as_dict())))
        assert again.as_dict() == seen.as_dict()
        assert list(again.methods) == list(seen.methods)
        assert list(again.sizes) == list(seen.sizes)
        assert again.profile == seen.profile
        assert again.profile.overlap == overlap
        for one in again.methods:
            assert again.step_seconds(one, "bucket") == seen.step_seconds(one, "bucket")


# Other numbers of ranks


@functools.cache
def recorded(name: str, ranks: int, numel: int, density: float) -> dict[str, tuple[float, float]]:
    """Calls, and bytes of the rank that gives most, by operation and step, as in a microbenchmark."""
    calls: list[Counter[str]] = [Counter() for _ in range(ranks)]
    nbytes: list[Counter[str]] = [Counter() for _ in range(ranks)]
    steps, warmup = 6, 3
    counting = False

    def recording(grad: Tensor, state: Any, ctx: Context, **parts: Any) -> Steps[Any]:
        """The group's step, with its messages counted."""
        steps, answer = exchange_group(grad, state, ctx, **parts), None
        while True:
            try:
                message = steps.send(answer)
            except StopIteration as end:
                return end.value
            if counting:
                calls[ctx.rank][message.kind] += 1
                nbytes[ctx.rank][message.kind] += message.x.nbytes
            answer = yield message

    generator = torch.Generator().manual_seed(0)
    common, own = torch.randn(1, numel, generator=generator), torch.randn(ranks, numel, generator=generator)

    def stream() -> Iterator[Tensor]:
        nonlocal counting
        for step in range(steps):
            counting = step >= warmup
            yield (common + own).pow(3).roll(step * (numel // 7 + 1), 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "exchange_group", recording)
        list(ls.simulate(stream(), sparsifier=name, density=density))
    counted_steps = steps - warmup
    return {
        operation: (calls[0][operation] / counted_steps, max(rank[operation] for rank in nbytes) / counted_steps)
        for operation in calls[0]
    }


SMALL, LARGE = 4_000, 60_000
EXACT = ("top_k", "shared_top_k", "striped_top_k", "clt_k", "gtop_k", "random_k", "everything", "ok_top_k")


def known_between(name: str, ranks: int, density: float) -> Method:
    """A method as a microbenchmark between so many ranks would know it."""
    points = {numel: recorded(name, ranks, numel, density) for numel in (SMALL, LARGE)}
    parts = [
        Traffic(operation, calls, Line.fit([SMALL, LARGE], [points[numel][operation][1] for numel in points]))
        for operation, (calls, _) in points[LARGE].items()
    ]
    return Method(name, density, GroupCost(density, NOTHING, NOTHING, NOTHING, tuple(parts)))


@pytest.mark.thorough
@in_one_test("name, known", [(name, 2) for name, _ in SPARSIFIERS.items()] + [(name, 1) for name in EXACT])
def test_messages_grow_with_ranks_as_they_do_in_simulations(name: str, known: int) -> None:
    density = 0.02
    moved = known_between(name, known, density).between(known, 8, ring(8, 1e-5, 1e9))
    real = recorded(name, 8, LARGE, density)
    assert {part.operation for part in moved.cost.traffic} == set(real)
    tolerance = {"rel": 0.002, "abs": 8} if name in EXACT else {"rel": 0.25}
    for part in moved.cost.traffic:
        calls, nbytes = real[part.operation]
        if name == "ok_top_k" and part.operation == "all_reduce":
            assert nbytes < 200  # boundaries and counts, which are left out of account
            continue
        assert part.nbytes(LARGE) == pytest.approx(nbytes, **tolerance), part
        assert part.calls == calls


@pytest.mark.parametrize(
    ("name", "operation", "factor"),
    [
        ("top_k", "all_gather", 1),
        ("hard_threshold", "all_reduce", 4),
        ("shared_top_k", "all_gather", 1 / 4),
        ("shared_top_k", "all_reduce", 1),
        ("micro", "all_gather", 1 / 4),
        ("micro", "all_reduce", 1),
        ("ok_top_k", "all_gather", 1 / 4),
        ("ok_top_k", "all_to_all", 1),
        ("clt_k", "broadcast", 1),
        ("clt_k", "all_reduce", 1),
        ("random_k", "all_reduce", 1),
        ("everything", "all_reduce", 1),
    ],
)
def test_bytes_of_a_coordinate_by_hand(name: str, operation: str, factor: float) -> None:
    cost = GroupCost(0.1, Line(1, 1), Line(2, 2), Line(3, 3), (Traffic(operation, 3.0, Line(8, 0.4)),))
    moved = method(name, 0.01, cost).between(2, 8, ring(8, 1e-5, 1e9))
    [part] = moved.cost.traffic
    assert (part.operation, part.calls) == (operation, 3.0)
    # Messages of counted groups hold some words besides.
    assert (part.nbytes.alpha, part.nbytes.beta) == pytest.approx((8 * factor, 0.4 * factor), rel=0.02)
    assert (moved.cost.select, moved.cost.process) == (cost.select, cost.process)


@pytest.mark.parametrize(("each", "expected"), [(0.4, 1.6), (1.5, 4.0), (4.0, 4.0), (5.0, 5.0)])
def test_a_union_grows_up_to_everything(each: float, expected: float) -> None:
    cost = GroupCost(0.1, NOTHING, NOTHING, NOTHING, (Traffic("all_reduce", 1.0, Line(0, each)),))
    network = ring(8, 0, 1e9)
    assert method("hard_threshold", 0.01, cost).between(2, 8, network).cost.traffic[0].nbytes.beta == pytest.approx(
        expected
    )
    in_halves = method("hard_threshold", 0.01, cost).between(2, 8, network, value_bytes=2).cost.traffic[0].nbytes.beta
    assert in_halves == pytest.approx(max(each, min(expected, 2.0)))


@pytest.mark.parametrize("known", by_default([2, 3, 4, 8], 2))
def test_a_tree_has_a_round_more_with_each_doubling(known: int) -> None:
    cost = GroupCost(0.1, NOTHING, NOTHING, NOTHING, (Traffic("send_recv", 1.0, Line(8, 0.5)),))
    for ranks in (2, 5, 8, 33):
        rounds = math.ceil(math.log2(ranks)) / math.ceil(math.log2(known))
        [part] = method("gtop_k", 0.1, cost).between(known, ranks, ring(ranks, 0, 1e9)).cost.traffic
        assert (part.calls, part.nbytes.alpha, part.nbytes.beta) == pytest.approx((rounds, 8 * rounds, 0.5 * rounds))


@pytest.mark.parametrize("name", ["top_k", "shared_top_k", "gtop_k", "ok_top_k", "hard_threshold"])
def test_the_same_ranks_and_network_change_prices_only(name: str) -> None:
    network = Network(Line(1e-4, 1e-9), Line(2e-4, 2e-9), ranks=4)
    operations = ("all_gather", "all_reduce", "broadcast", "all_to_all", "send_recv")
    traffic = tuple(Traffic(operation, 2.0, Line(8.0, 0.3)) for operation in operations)
    one = method(name, 0.1, GroupCost(0.1, Line(1, 1), Line(2, 2), Line(3, 3), traffic))
    same = one.between(4, 4, network)
    assert replace(same, cost=replace(same.cost, transfer=one.cost.transfer)) == one
    # A broadcast gives each byte to one hop at a time, an all-to-all three quarters of them.
    hop = Line(2e-4 / 3, 2e-9 / 3)
    prices = [network.all_gather, network.all_reduce, Line(2e-4, hop.beta), Line(2e-4, 0.75 * hop.beta), hop]
    by_hand = sum(2 * line.alpha + line.beta * (8 + 0.3 * 1e6) for line in prices)
    assert same.cost.transfer(1e6) == pytest.approx(by_hand)


# Scenarios and predictions


@pytest.mark.parametrize(
    ("known", "ranks", "gbit", "expected"),
    [
        (2, [], [], [(2, None)]),
        (2, [8, 64], [], [(2, None), (8, None), (64, None)]),
        (2, [], [1, 10], [(2, None), (2, 1), (2, 10)]),
        (2, [8, 64], [1, 10.5], [(2, None), (8, 1), (8, 10.5), (64, 1), (64, 10.5)]),
        (2, [1], [10], [(2, None)]),
        (4, [8, 8, 4], [], [(4, None), (8, None)]),
        (1, [8], [10], [(8, 10)]),
        (1, [1, 8], [10], [(8, 10)]),
    ],
)
def test_what_is_predicted_for(known: int, ranks: list[int], gbit: list[float], expected: list[Any]) -> None:
    assert scenarios(known, ranks, gbit) == [Scenario(*one) for one in expected]
    far = [Scenario(*one, rtt_ms) for one in expected for rtt_ms in (0.0, 20.0)]
    assert scenarios(known, ranks, gbit, [20, 0, 20]) == far


@pytest.mark.parametrize(
    ("known", "ranks", "gbit", "message"),
    [
        (1, [], [], "there is one rank only: give ranks and gbit"),
        (1, [], [10], "there is one rank only: give ranks and gbit"),
        (2, [0], [], "Expected ranks to be a positive integer, but got 0"),
        (2, [2.5], [], "Expected ranks to be a positive integer, but got 2.5"),
        (2, ["8"], [], "Expected ranks to be a positive integer, but got '8'"),
        (2, [True], [], "Expected ranks to be a positive integer, but got True"),
        (2, [], [0], "Expected gbit to be a positive number, but got 0"),
        (2, [], [-1.5], "Expected gbit to be a positive number, but got -1.5"),
        (2, [], [math.nan], "Expected gbit to be a positive number, but got nan"),
        (2, [], ["fast"], "Expected gbit to be a positive number, but got 'fast'"),
    ],
)
def test_numbers_that_make_no_scenario(known: int, ranks: Any, gbit: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scenarios(known, ranks, gbit)


@pytest.mark.parametrize("rtt", [-1.0, math.inf, math.nan, "far"])
def test_round_trips_that_cannot_be_are_refused(rtt: Any) -> None:
    with pytest.raises(ValueError, match="Expected rtt to be a finite number of milliseconds of at least 0, but got"):
        scenarios(2, [], [], [rtt])


def test_every_method_is_predicted_in_every_scenario() -> None:
    seen = measured()
    wanted = scenarios(2, [8, 64], [1, 10])
    rows = list(predict(seen, wanted))
    assert len(rows) == len(wanted) * (4 + 4 * len(TRIED))
    for scenario in wanted:
        here = [row for row in rows if row.scenario == scenario]
        assert {(row.method, row.grouping) for row in here if row.builtin} == {
            (name, "bucket") for name in ("dense", "fp16", "bf16", "powersgd")
        }
        [dense] = [row for row in here if row.method == "dense"]
        assert dense.over_dense == 1
        for row in here:
            assert row.over_dense == pytest.approx(row.step_seconds / dense.step_seconds)
            assert row.exposed_seconds == pytest.approx(row.step_seconds - seen.profile.compute_seconds)
            assert row.exposed_seconds >= 0


def test_overlap_sends_each_group_when_ddp_has_delivered_it() -> None:
    seen = measured(1, "none")
    gathered = GroupCost(0.01, Line(1e-5, 1e-9), NOTHING, Line(2e-4, 5e-9), ())
    seen = replace(seen, methods=[*seen.methods[:4], method("top_k", 0.01, gathered)])
    wanted = [Scenario(seen.profile.network.ranks, None)]
    rows = {(row.method, row.grouping): row for row in predict(seen, wanted)}
    assert all(row.overlapped_seconds == row.step_seconds for row in rows.values() if row.builtin)
    first, others = bucket_numels(seen.sizes, OVERLAPPED_MB)
    now = ready = done = 0.0
    full, cap = 0, first
    held: list[int] = []
    for number, layer in enumerate(seen.profile.layers):
        now, full = now + layer.backward_seconds, full + layer.numel
        held.append(layer.numel)
        if full >= cap or number == len(seen.profile.layers) - 1:
            for numel in held:
                ready = max(ready, now) + 1e-5 + 1e-9 * numel
                now = max(now, ready)  # the thread that computes backward selects, too
                done = max(done, ready) + 2e-4 + 5e-9 * numel
            held, full, cap = [], 0, others
    expected = seen.profile.rest_seconds + max(done, sum(seen.profile.backward_seconds))
    assert rows["top_k", "layer"].overlapped_seconds == pytest.approx(expected)
    assert overlapped(list(rows.values()), rows["top_k", "model"]).overlapped_seconds == min(
        row.overlapped_seconds for row in rows.values() if row.method == "top_k"
    )


def test_the_network_here_is_priced_as_it_was_measured() -> None:
    # Costs that no traffic explains: they count here, and nowhere else.
    network = Network(Line(1e-4, 1e-9), Line(1e-4, 1e-9), ranks=2)
    odd = GroupCost(0.01, NOTHING, NOTHING, Line(1.0, 0.0), (Traffic("all_gather", 1.0, Line(0, 0.08)),))
    seen = measured(1)
    profile = replace(seen.profile, network=network, overlap="none")
    seen = replace(seen, profile=profile, methods=[*seen.methods[:4], method("top_k", 0.01, odd)])

    def times(*wanted: Scenario) -> list[float]:
        rows = predict(seen, wanted)
        return [row.exposed_seconds for row in rows if (row.method, row.grouping) == ("top_k", "model")]

    numel = sum(size.numel for size in seen.sizes)
    assert times(Scenario(2, None)) == pytest.approx([1.0])
    expected = [7e-4 + 7e-9 * 0.08 * numel, 7e-4 + 7 * 8e-9 * 0.08 * numel, 1e-4 + 8e-10 * 0.08 * numel]
    assert times(Scenario(8, None), Scenario(8, 1), Scenario(2, 10)) == pytest.approx(expected)


def test_values_of_two_bytes() -> None:
    # All of them are sent between 8 ranks: half of them are, between 2.
    half = GroupCost(0.5, NOTHING, NOTHING, NOTHING, (Traffic("all_reduce", 1.0, Line(0, 1.0)),))
    seen = measured(1, "none")
    sizes = [size._replace(element_size=2) for size in seen.sizes]
    seen = replace(seen, sizes=sizes, methods=[*seen.methods[:1], method("hard_threshold", 0.5, half)])
    rows = {(row.method, row.grouping): row for row in predict(seen, [Scenario(8, 1)])}
    sent = 2 * sum(size.numel for size in sizes)
    fixed = 3 * seen.profile.network.all_reduce.alpha
    assert rows["hard_threshold", "model"].exposed_seconds == pytest.approx(fixed + 2 * 7 / 8 * sent * 8e-9)


def test_without_a_network_fixed_prices_are_assumed() -> None:
    seen = measured(1, "none")
    gathered = GroupCost(0.01, NOTHING, NOTHING, NOTHING, (Traffic("all_gather", 2.0, Line(0, 0.08)),))
    reduced = GroupCost(1.0, NOTHING, NOTHING, NOTHING, (Traffic("all_reduce", 1.0, Line(0, 4.0)),))
    methods = [method("dense", 1.0, reduced, builtin=True), method("top_k", 0.01, gathered)]
    seen = replace(seen, profile=replace(seen.profile, network=ALONE), methods=methods)
    numel = sum(size.numel for size in seen.sizes)
    for ranks, tree in ((2, 1), (8, 3), (64, 6)):
        rows = {(row.method, row.grouping): row for row in predict(seen, [Scenario(ranks, 10)])}
        # 2 (n - 1) / n 4 bytes a coordinate; 2 hops for each doubling.
        dense = 2 * LATENCY * tree + 2 * (ranks - 1) / ranks * 4 * numel * 8e-10
        sparse = 2 * LATENCY * (ranks - 1) + (ranks - 1) * 0.08 * numel * 8e-10
        assert rows["top_k", "model"].exposed_seconds == pytest.approx(sparse)
        transfer = rows["dense", "bucket"]
        assert transfer.groups > 1 or transfer.exposed_seconds == pytest.approx(dense)


def test_small_messages_do_not_gain_from_more_ranks() -> None:
    # One message each: an all-gather of a few bytes passes more hops than an all-reduce of a few bytes.
    few = Traffic("all_gather", 1.0, Line(8, 0)), Traffic("all_reduce", 1.0, Line(8, 0))
    sparse, dense = (GroupCost(1.0, NOTHING, NOTHING, NOTHING, (one,)) for one in few)
    methods = [method("dense", 1.0, dense, builtin=True), method("top_k", 0.01, sparse)]
    seen = measured(1, "none")
    seen = replace(seen, profile=replace(seen.profile, network=ALONE), methods=methods)
    for ranks in (8, 64, 512):
        assert winner(list(predict(seen, [Scenario(ranks, 100)])), Scenario(ranks, 100)).method == "dense"


# What to use


def chosen(*rows: Prediction) -> tuple[str, float]:
    best = winner([predicted("dense", 1.0), *rows], HERE)
    return best.method, best.density


def test_what_the_optimizer_needs_goes_before_what_is_faster() -> None:
    rows = [predicted("dense", 1.0), predicted("top_k", 0.5), predicted("union_top_k", 0.9)]
    assert winner(rows, HERE, suited=["union_top_k"]).method == "union_top_k"
    assert winner([*rows[:2], predicted("union_top_k", 0.96)], HERE, suited=["union_top_k"]).method == "top_k"
    assert winner(rows, HERE).method == "top_k"


def test_what_stays_dense_by_name_is_one_message_more() -> None:
    seen = measured(3, "none", messages="step")
    method, network, numels = seen.methods[-1], ring(4, 1e-3, 1e6), {one.name: one.numel for one in seen.sizes}
    rules = rules_of({"init_args": {"dense": ["m0.weight"], "rules": {"densities": {"m1.weight": 1.0}}}})
    assert (rules.dense, rules.dense_ndim, rules.dense_numel) == (("m0.weight", "m1.weight"), 0, 0)
    some, _ = seen.step_seconds(method, "layer", rules, network)
    assert some > network.all_reduce(4 * (numels["m0.weight"] + numels["m1.weight"]))
    alone, _ = seen.step_seconds(method, "layer", rules_of({"init_args": {"dense": ["*"]}}), network)
    assert alone == pytest.approx(seen.profile.compute_seconds + network.all_reduce(4 * sum(numels.values())))


def test_dense_stays_unless_a_step_is_5_percent_shorter() -> None:
    assert chosen() == ("dense", 1.0)
    assert chosen(predicted("top_k", 0.951)) == ("dense", 1.0)
    assert chosen(predicted("top_k", 0.949)) == ("top_k", 0.01)
    assert chosen(predicted("top_k", 1.2), predicted("union_top_k", 3.0)) == ("dense", 1.0)


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_a_16_bit_hook_is_preferred_where_no_sparsifier_is_5_percent_faster(hook: str) -> None:
    assert chosen(predicted(hook, 0.9)) == (hook, 1.0)
    assert chosen(predicted(hook, 0.9), predicted("top_k", 0.86)) == (hook, 1.0)
    assert chosen(predicted(hook, 0.9), predicted("top_k", 0.85)) == ("top_k", 0.01)
    assert chosen(predicted(hook, 0.96)) == ("dense", 1.0)
    assert chosen(predicted(hook, 0.96), predicted("top_k", 0.94)) == ("top_k", 0.01)
    assert chosen(predicted("fp16", 0.9), predicted("bf16", 0.8)) == ("bf16", 1.0)
    assert chosen(predicted("fp16", 0.7), predicted("bf16", 0.8)) == ("fp16", 1.0)


def test_where_hooks_are_ignored_they_do_not_stand_in_the_way() -> None:
    rows = [predicted("dense", 1.0), predicted("bf16", 0.5), predicted("top_k", 0.9)]
    assert winner(rows, HERE, hooks=False).method == "top_k"
    assert winner(rows[:2], HERE, hooks=False).method == "dense"


def test_other_groups_can_be_the_better_dense_way() -> None:
    assert chosen(predicted("everything", 0.9, 1.0)) == ("everything", 1.0)
    assert chosen(predicted("everything", 0.96, 1.0)) == ("dense", 1.0)
    assert chosen(predicted("everything", 0.8, 1.0), predicted("top_k", 0.77)) == ("everything", 1.0)
    assert chosen(predicted("everything", 0.8, 1.0), predicted("top_k", 0.75)) == ("top_k", 0.01)
    assert chosen(predicted("everything", 0.99, 1.0), predicted("top_k", 0.94)) == ("top_k", 0.01)


def test_powersgd_is_never_chosen() -> None:
    assert chosen(predicted("powersgd", 0.1)) == ("dense", 1.0)
    assert chosen(predicted("powersgd", 0.1), predicted("top_k", 0.9)) == ("top_k", 0.01)


def test_of_the_close_ones_the_mildest_density_wins() -> None:
    densities = (0.1, 0.01, 0.001)

    def rows(*over_dense: float) -> list[Prediction]:
        return [predicted("top_k", one, density) for one, density in zip(over_dense, densities, strict=True)]

    assert chosen(*rows(0.521, 0.51, 0.5)) == ("top_k", 0.1)
    assert chosen(*rows(0.526, 0.51, 0.5)) == ("top_k", 0.01)
    assert chosen(*rows(0.526, 0.526, 0.5)) == ("top_k", 0.001)
    # Close to the fastest, but not 5 % faster than dense.
    assert chosen(*rows(0.96, 0.94, 0.93)) == ("top_k", 0.01)
    # A mild density of a method that trains worse goes before the low density of a better one.
    assert chosen(predicted("sidco_gp", 0.52, 0.1), predicted("union_top_k", 0.5, 0.001)) == ("sidco_gp", 0.1)


def test_then_the_one_that_trains_best_wins() -> None:
    assert len(set(BEST_TRAINED)) == len(BEST_TRAINED)
    for better, worse in pairwise(BEST_TRAINED):
        assert chosen(predicted(worse, 0.5), predicted(better, 0.52)) == (better, 0.01)
        assert chosen(predicted(better, 0.52), predicted(worse, 0.5)) == (better, 0.01)
        assert chosen(predicted(worse, 0.5), predicted(better, 0.53)) == (worse, 0.01)
    assert chosen(predicted("of_my_own", 0.5), predicted(BEST_TRAINED[-1], 0.52)) == (BEST_TRAINED[-1], 0.01)
    assert chosen(predicted("of_my_own", 0.5), predicted("another", 0.49)) == ("another", 0.01)


def test_all_that_are_ranked_are_sparsifiers() -> None:
    assert set(BEST_TRAINED) <= {name for name, _ in SPARSIFIERS.items()}


def test_a_method_is_as_fast_as_with_its_fastest_grouping() -> None:
    rows = [
        predicted("top_k", 0.8, grouping="layer", groups=9),
        predicted("top_k", 0.6, grouping="merge_below", groups=3),
        predicted("top_k", 0.6, grouping="model", groups=1),
        predicted("top_k", 0.7, 0.1, grouping="bucket", groups=2),
    ]
    best = {(row.method, row.density): row.grouping for row in best_groupings(rows)}
    assert best == {("top_k", 0.01): "model", ("top_k", 0.1): "bucket"}
    assert winner([predicted("dense", 1.0), *rows], HERE).grouping == "model"


def test_scenarios_do_not_mix() -> None:
    there = Scenario(8, 1)
    rows = defaultdict(list)
    for scenario, speed in ((HERE, 1.2), (there, 0.3)):
        rows[scenario] = [predicted("dense", 1.0, scenario=scenario), predicted("top_k", speed, scenario=scenario)]
    every = rows[HERE] + rows[there]
    assert winner(every, HERE).method == "dense"
    assert winner(every, there) == rows[there][1]
    assert len(best_groupings(every)) == 4


def test_a_round_trip_is_added_to_fixed_prices_only() -> None:
    seen = measured(ranks=4)
    near, far = (next(p for p in predict(seen, [Scenario(4, None, rtt)]) if p.sparse) for rtt in (0.0, 100.0))
    assert far.step_seconds > near.step_seconds + 0.1
    network = farther(Network(Line(1.0, 2.0), Line(3.0, 4.0), 4), 0.1)
    assert (network.all_reduce.alpha, network.all_reduce.beta) == (pytest.approx(1.0 + 4 * 0.05), 2.0)
    assert (network.all_gather.alpha, network.all_gather.beta) == (pytest.approx(3.0 + 3 * 0.05), 4.0)
