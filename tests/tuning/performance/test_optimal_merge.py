"""Groups by a profile: by hand, and what holds for any model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.methods.grouping import Group, MergeBelow, ParameterSize, make_plan
from lightning_sparse.methods.grouping.groupings import DDP_BUCKET_MB
from lightning_sparse.tools.advisor.networks import ring
from lightning_sparse.tuning.performance.cost import Line
from lightning_sparse.tuning.performance.merge import OptimalMerge
from lightning_sparse.tuning.performance.profile import GroupCost, LayerTime, Profile
from tests.methods.grouping.test_plan import MODEL, cut, names, sizes
from tests.trainers import EVERYTHING_SPARSE


def merged(
    parameters: list[ParameterSize], profile: Profile, density: float, rule: Any = "optimal", dense: Sequence[str] = ()
) -> list[Group]:
    rules = EVERYTHING_SPARSE.also_dense(dense)
    return make_plan(parameters, OptimalMerge(rule), rules, DDP_BUCKET_MB, profile, density)


# As backward was observed: the norm before the head, although it was registered before. Each layer is computed for as
# long as the exchange of the layer before takes at 1 s a coordinate, so that every merge would make a step longer.
OBSERVED = [
    LayerTime("block.norm", ("block.norm.weight",), 20, 1.0),
    LayerTime("head", ("head.weight",), 100, 20.0),
    LayerTime("block.fc", ("block.fc.weight", "block.fc.bias"), 420, 100.0),
    LayerTime("embed", ("embed",), 1000, 420.0),
]
APART, TOGETHER = Line(1e-9, 1.0), Line(1e9, 1e-9)
"""Of exchanges: coordinates cost everything, or messages do."""


def profile_of(layers: list[LayerTime], *exchanges: Line, buckets: tuple[float, float] = (0.0, 0.0)) -> Profile:
    costs = [GroupCost((1 + i) / 10, Line(0, 0), Line(0, 0), exchange) for i, exchange in enumerate(exchanges)]
    return Profile(layers, 0.0, ring(2, 0, 1e9), costs, "comm", buckets)


def test_before_there_is_a_profile_all_is_one_group() -> None:
    assert names(cut(MODEL, OptimalMerge())) == names(cut(MODEL, "model"))


def test_layers_come_in_the_order_in_which_backward_was_seen() -> None:
    each = merged(MODEL, profile_of(OBSERVED, APART), 0.1)
    assert names(each) == [
        ("block.norm", ["block.norm.weight"]),
        ("head", ["head.weight"]),
        ("block.fc", ["block.fc.weight", "block.fc.bias"]),  # as seen, not in reverse order of registration
        ("embed", ["embed"]),
    ]
    whole = merged(MODEL, profile_of(OBSERVED, TOGETHER), 0.1)
    assert names(whole) == [("block.norm..embed", [name for layer in OBSERVED for name in layer.parameters])]
    # The density decides at which prices.
    both = profile_of(OBSERVED, APART, TOGETHER)
    assert names(merged(MODEL, both, 0.1)) == names(each)
    assert names(merged(MODEL, both, 0.2)) == names(whole)


def test_the_published_rule_merges_otherwise() -> None:
    # The example of tests/tuning/performance/test_merge.py.
    model = sizes(("c.p", 1), ("b.p", 1), ("a.p", 2))
    layers = [LayerTime(p.name[0], (p.name,), p.numel, time) for p, time in zip(model[::-1], (1, 2, 3), strict=True)]
    profile = profile_of(layers, Line(3, 1))
    assert [name for name, _ in names(merged(model, profile, 0.1))] == ["a", "b..c"]
    assert [name for name, _ in names(merged(model, profile, 0.1, "published"))] == ["a..b", "c"]


def test_parameters_that_stay_dense_leave_their_time_to_the_layers_that_follow() -> None:
    model = sizes(("a.p", 1), ("b.p", 1), ("c.p", 1))
    layers = [LayerTime(p.name[0], (p.name,), 1, time) for p, time in zip(model[::-1], (5.0, 1.0, 1.0), strict=True)]
    profile = profile_of(layers, Line(1, 1))
    # c from 5 to 7, then both from 7 to 10; three messages would wait for each other until 11.
    assert names(merged(model, profile, 0.1)) == [("c", ["c.p"]), ("b..a", ["b.p", "a.p"])]
    # c from 5 to 7, a from 7 to 9. Were a complete at 6, it could as well travel with c, from 6 to 9.
    assert names(merged(model, profile, 0.1, dense=["b.p"])) == [
        ("c", ["c.p"]),
        ("a", ["a.p"]),
        ("dense.bucket0", ["b.p"]),
    ]
    # Part of a layer, and all of the model.
    halves = [LayerTime("m", ("m.weight", "m.bias"), 110, 1.0)]
    split = merged(sizes(("m.weight", 100), ("m.bias", 10)), profile_of(halves, APART), 0.1, dense=["*.bias"])
    assert names(split) == [("m", ["m.weight"]), ("dense.bucket0", ["m.bias"])]
    assert names(merged(model, profile, 0.1, dense=["*"])) == [("dense.bucket0", ["c.p", "b.p", "a.p"])]


def test_what_the_profile_does_not_know_is_refused() -> None:
    known = profile_of(OBSERVED, APART), 0.1
    model = [*MODEL, *sizes(("tail.weight", 3), ("tail.bias", 3))]
    with pytest.raises(ValueError, match=r"does not know the parameters tail\.bias, tail\.weight\.$"):
        merged(model, *known)
    assert len(merged(model, *known, dense=["tail.*"])) == 5  # nobody asks
    assert names(merged(MODEL[:1], *known)) == [("embed", ["embed"])]
    assert merged([], *known) == []


def test_layers_of_one_bucket_are_merged_where_messages_have_a_price() -> None:
    model = sizes(("a.p", 10), ("b.p", 10), ("c.p", 10))
    layers = [LayerTime(p.name[0], (p.name,), 10, time) for p, time in zip(model[::-1], (10, 10, 20), strict=True)]
    for buckets, expected in (((0.0, 0.0), ["c", "b", "a"]), ((20.0, 20.0), ["c..b", "a"]), ((1e9, 1e9), ["c..a"])):
        profile = profile_of(layers, Line(1e-3, 1.0), buckets=buckets)
        assert [group.name for group in merged(model, profile, 0.1)] == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rule": "best"}, "Expected rule to be one of 'optimal', 'published', but got 'best'"),
    ],
)
def test_other_ways_to_profile_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OptimalMerge(**options)  # type: ignore[arg-type]


def test_groups_are_complete_with_their_last_layer() -> None:
    profile = profile_of(OBSERVED, APART)
    groups, times = profile.timeline(cut(MODEL, "layer", dense=["embed"]))
    assert [group.name for group in groups] == ["block.norm", "head", "block.fc"]  # registration says head first
    assert times == ([20, 100, 420], [1.0, 20.0, 100.0])
    # A group waits for the last of its layers, and the embedding has seen all of backward.
    pair = [group for group in cut(MODEL, MergeBelow(120)) if group.name != "block.fc"]
    assert profile.timeline(pair)[1] == ([120, 1000], [21.0, 520.0])
    assert profile.timeline(cut(MODEL, "model"))[1] == ([1540], [541.0])
    assert profile.timeline(cut(MODEL, "model", dense=["*"])) == ([], ([], []))
    assert profile.timeline(cut(sizes(("other", 5))))[1] == ([5], [0.0])
    # Handed over in two buckets.
    buckets = profile_of(OBSERVED, APART, buckets=(50.0, 1e9))
    assert buckets.timeline(cut(MODEL, "layer"))[1] == ([100, 20, 420, 1000], [21.0, 0.0, 520.0, 0.0])
    first = profile_of(OBSERVED, APART, buckets=(20.0, 1e9))
    assert first.timeline(cut(MODEL, "layer"))[1] == ([20, 100, 420, 1000], [1.0, 540.0, 0.0, 0.0])


@settings(deadline=None, max_examples=60)
@given(
    numels=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    dense=st.booleans(),
    prices=st.tuples(st.floats(0, 3), st.floats(0, 1e-2)),
    buckets=st.tuples(st.floats(0, 2000), st.floats(0, 2000)),
    rule=st.sampled_from(["optimal", "published"]),
)
def test_profiled_groups_hold_every_parameter_once(
    numels: list[int],
    order: random.Random,
    dense: bool,
    prices: tuple[float, float],
    buckets: tuple[float, float],
    rule: str,
) -> None:
    model = sizes(*((f"m{i % 5}.{i}.p", numel) for i, numel in enumerate(numels)))
    layers = [LayerTime(p.name[:-2], (p.name,), p.numel, order.random()) for p in model]
    order.shuffle(layers)
    profile = profile_of(layers, Line(*prices), buckets=buckets)
    plan = merged(model, profile, 0.1, rule, ["m0*"] if dense else [])  # type: ignore[arg-type]
    assert sorted(p.name for group in plan for p in group.parameters) == sorted(p.name for p in model)
    assert len({group.name for group in plan}) == len(plan)
    sparse = [p.name for group in plan if not group.dense for p in group.parameters]
    assert sparse == [name for layer in layers for name in layer.parameters if name in set(sparse)]
    groups, (_, backward) = profile.timeline(plan)
    assert [g.name for g in groups] == [group.name for group in plan if not group.dense]
    assert all(seconds >= 0 for seconds in backward)
    assert sum(backward) <= sum(profile.backward_seconds) * (1 + 1e-9)
