"""Parameters become groups: by hand, and what holds for any model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.grouping import (
    GROUPINGS,
    Group,
    GroupCost,
    Grouping,
    LayerTime,
    Line,
    MergeBelow,
    Network,
    OptimalMerge,
    ParameterSize,
    Profile,
    ProfiledMerge,
    make_plan,
    timeline,
)
from lightning_sparse.grouping.plan import DDP_BUCKET_MB, LARGEST_GROUP
from tests.trainers import EVERYTHING_SPARSE

MIB = 2**20


def sizes(*named: tuple[str, int], kind: str = "float32", element_size: int = 4) -> list[ParameterSize]:
    return [ParameterSize(name, numel, element_size, kind) for name, numel in named]


def cut(
    parameters: list[ParameterSize],
    grouping: Grouping | str = "bucket",
    dense: Sequence[str] = (),
    bucket_cap_mb: float = DDP_BUCKET_MB,
) -> list[Group]:
    """A plan in which names alone decide what stays dense; sizes: tests/grouping/test_rules.py."""
    return make_plan(parameters, grouping, EVERYTHING_SPARSE.also_dense(dense), bucket_cap_mb)


def names(plan: list[Group]) -> list[tuple[str, list[str]]]:
    return [(group.name, [p.name for p in group.parameters]) for group in plan]


MODEL = sizes(
    ("embed", 1000), ("block.fc.weight", 400), ("block.fc.bias", 20), ("block.norm.weight", 20), ("head.weight", 100)
)


def test_layers_are_modules_in_reverse_order() -> None:
    assert names(cut(MODEL, "layer")) == [
        ("head", ["head.weight"]),
        ("block.norm", ["block.norm.weight"]),
        ("block.fc", ["block.fc.bias", "block.fc.weight"]),
        ("embed", ["embed"]),
    ]


def test_the_model_is_one_group_in_reverse_order() -> None:
    assert names(cut(MODEL, "model")) == [("model", [p.name for p in MODEL][::-1])]


def test_buckets_are_closed_when_they_are_full_and_the_first_is_small() -> None:
    # In reverse order, of 4 bytes: 1 MiB closes the first bucket; then 4 MiB each.
    quarter = MIB // 4
    model = sizes(("a", 9 * quarter), ("b", quarter), ("c", 2 * quarter), ("d", 2 * quarter), ("e", quarter))
    assert names(cut(model, "bucket", bucket_cap_mb=4)) == [
        ("bucket0", ["e"]),
        ("bucket1", ["d", "c"]),
        ("bucket2", ["b", "a"]),  # not yet full when the 9 MiB parameter comes
    ]


def test_a_small_cap_applies_to_the_first_bucket_too() -> None:
    model = sizes(("a", 100), ("b", 100), ("c", 100))
    assert names(cut(model, "bucket", bucket_cap_mb=300 / MIB)) == [
        ("bucket0", ["c"]),
        ("bucket1", ["b"]),
        ("bucket2", ["a"]),
    ]


def test_bytes_decide_about_buckets_not_elements() -> None:
    wide = sizes(("a", MIB // 8), ("b", MIB // 8), kind="float64", element_size=8)
    narrow = sizes(("a", MIB // 8), ("b", MIB // 8), kind="bfloat16", element_size=2)
    assert [len(group.parameters) for group in cut(wide)] == [1, 1]
    assert [len(group.parameters) for group in cut(narrow)] == [2]


def test_dense_parameters_get_buckets_of_their_own_at_the_end() -> None:
    plan = cut(MODEL, "layer", dense=["*.bias", "*norm*"])
    assert names(plan) == [
        ("head", ["head.weight"]),
        ("block.fc", ["block.fc.weight"]),
        ("embed", ["embed"]),
        ("dense.bucket0", ["block.norm.weight", "block.fc.bias"]),
    ]
    assert [group.dense for group in plan] == [False, False, False, True]
    assert all(group.dense for group in cut(MODEL, "model", dense=["*"]))


def test_kinds_are_never_mixed_and_named_where_there_are_several() -> None:
    model = [*sizes(("a.weight", 10)), *sizes(("a.scale", 4), kind="bfloat16", element_size=2), *sizes(("b", 5))]
    assert names(cut(model, "model")) == [
        ("float32.model", ["b", "a.weight"]),
        ("bfloat16.model", ["a.scale"]),
    ]
    assert names(cut(model, "model", dense=["b"])) == [
        ("float32.model", ["a.weight"]),
        ("bfloat16.model", ["a.scale"]),
        ("dense.float32.bucket0", ["b"]),
    ]


def test_a_model_without_parameters_has_no_groups() -> None:
    assert [cut([], grouping) for grouping, _ in GROUPINGS.items()] == [[]] * 5


def test_offsets_lay_the_parameters_end_to_end() -> None:
    (group,) = cut(MODEL, "model")
    assert group.numel == 1540
    assert group.offsets() == {
        "head.weight": slice(0, 100),
        "block.norm.weight": slice(100, 120),
        "block.fc.bias": slice(120, 140),
        "block.fc.weight": slice(140, 540),
        "embed": slice(540, 1540),
    }


def test_picks_are_a_share_of_sparse_groups_and_all_of_dense_ones() -> None:
    sparse, dense = cut(sizes(("weight", 250), ("bias", 7)), "model", dense=["bias"])
    assert (sparse.picks(0.01), dense.picks(0.01)) == (2, 7)
    assert sparse.picks(0.001) == 1


def test_an_unknown_grouping_is_answered_with_the_known_ones() -> None:
    known = r"Known names: bucket, layer, merge_below, model, optimal_merge\."
    with pytest.raises(ValueError, match=rf"Unknown grouping 'layers'\. Did you mean 'layer'\? {known}$"):
        cut(MODEL, "layers")
    with pytest.raises(ValueError, match=rf"Unknown grouping 'zzz'\. {known}$"):
        cut(MODEL, "zzz")


def test_small_layers_are_merged_and_large_ones_stay_alone() -> None:
    assert names(cut(MODEL, MergeBelow(120))) == [
        ("head..block.norm", ["head.weight", "block.norm.weight"]),
        ("block.fc", ["block.fc.bias", "block.fc.weight"]),
        ("embed", ["embed"]),
    ]
    assert names(cut(MODEL, "merge_below")) == [("head..embed", [p.name for p in MODEL][::-1])]
    assert names(cut(MODEL, MergeBelow(0))) == names(cut(MODEL, "layer"))
    assert len(cut(MODEL, MergeBelow(float("inf")))) == 1


@pytest.mark.parametrize("numel", [-1, float("nan"), "8192", True, None])
def test_a_threshold_that_is_no_number_of_coordinates_is_refused(numel: object) -> None:
    with pytest.raises(ValueError, match="Expected numel to be a number of coordinates of at least 0, but got"):
        MergeBelow(numel)  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing_is_answered_with_names_that_are_close() -> None:
    with pytest.raises(ValueError, match=r"'\*\.biases' in dense matches no parameter\. Names that are close: .*bias"):
        cut(MODEL, dense=["*.biases"])
    with pytest.raises(ValueError, match=r"'\*\.BIAS' in dense matches no parameter"):
        cut(MODEL, dense=["*.BIAS"])  # names are case-sensitive on every system


@settings(deadline=None, max_examples=80)
@given(
    numels=st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=20),
    kinds=st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=20, max_size=20),
    grouping=st.sampled_from([name for name, _ in GROUPINGS.items()]),
    dense=st.lists(st.sampled_from(["*3*", "m1.*", "*.p"]), max_size=2),
    cap=st.sampled_from([0.1, 1, 25]),
)
def test_every_parameter_is_in_one_group_of_its_kind(
    numels: list[int], kinds: list[str], grouping: str, dense: list[str], cap: float
) -> None:
    width = {"float32": 4, "bfloat16": 2}
    model = [
        ParameterSize(f"m{i % 5}.{i}.p", numel, width[kind], kind)
        for i, (numel, kind) in enumerate(zip(numels, kinds, strict=False))
    ]
    try:
        plan = cut(model, grouping, dense, cap)
    except ValueError as error:
        assert "matches no parameter" in str(error)  # the drawn pattern may miss a small model
        return
    assert sorted(p.name for group in plan for p in group.parameters) == sorted(p.name for p in model)
    assert len({group.name for group in plan}) == len(plan)
    assert all(len({p.kind for p in group.parameters}) == 1 for group in plan)
    for group in plan:
        assert sum(s.stop - s.start for s in group.offsets().values()) == group.numel
        if grouping == "bucket" or group.dense:
            # A bucket is closed once it is full: without its last parameter it is below the cap.
            size = sum(p.numel * p.element_size for p in group.parameters[:-1])
            assert size < cap * MIB


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
    return Profile("", layers, 0.0, Network.ring(2, 0, 1e9), costs, "transfer", buckets)


def test_before_there_is_a_profile_all_is_one_group() -> None:
    assert names(cut(MODEL, OptimalMerge())) == names(cut(MODEL, "model"))
    huge = sizes(("a", LARGEST_GROUP - 1), ("b", 1), element_size=1)
    assert names(cut(huge, OptimalMerge())) == [("model", ["b", "a"])]
    larger = sizes(("a", LARGEST_GROUP), ("b", 2 * MIB), element_size=1)
    assert names(cut(larger, OptimalMerge())) == names(cut(larger, "bucket"))
    assert len(cut(larger, OptimalMerge())) == 2


def test_layers_come_in_the_order_in_which_backward_was_seen() -> None:
    each = cut(MODEL, ProfiledMerge(profile_of(OBSERVED, APART), 0.1))
    assert names(each) == [
        ("block.norm", ["block.norm.weight"]),
        ("head", ["head.weight"]),
        ("block.fc", ["block.fc.weight", "block.fc.bias"]),  # as seen, not in reverse order of registration
        ("embed", ["embed"]),
    ]
    whole = cut(MODEL, ProfiledMerge(profile_of(OBSERVED, TOGETHER), 0.1))
    assert names(whole) == [("block.norm..embed", [name for layer in OBSERVED for name in layer.parameters])]
    # The density decides at which prices.
    both = profile_of(OBSERVED, APART, TOGETHER)
    assert names(cut(MODEL, ProfiledMerge(both, 0.1))) == names(each)
    assert names(cut(MODEL, ProfiledMerge(both, 0.2))) == names(whole)


def test_the_published_rule_merges_otherwise() -> None:
    # The example of tests/grouping/test_merge.py.
    model = sizes(("c.p", 1), ("b.p", 1), ("a.p", 2))
    layers = [LayerTime(p.name[0], (p.name,), p.numel, time) for p, time in zip(model[::-1], (1, 2, 3), strict=True)]
    profile = profile_of(layers, Line(3, 1))
    assert [name for name, _ in names(cut(model, ProfiledMerge(profile, 0.1)))] == ["a", "b..c"]
    assert [name for name, _ in names(cut(model, ProfiledMerge(profile, 0.1, "published")))] == ["a..b", "c"]


def test_parameters_that_stay_dense_leave_their_time_to_the_layers_that_follow() -> None:
    model = sizes(("a.p", 1), ("b.p", 1), ("c.p", 1))
    layers = [LayerTime(p.name[0], (p.name,), 1, time) for p, time in zip(model[::-1], (5.0, 1.0, 1.0), strict=True)]
    profile = profile_of(layers, Line(1, 1))
    # c from 5 to 7, then both from 7 to 10; three messages would wait for each other until 11.
    assert names(cut(model, ProfiledMerge(profile, 0.1))) == [("c", ["c.p"]), ("b..a", ["b.p", "a.p"])]
    # c from 5 to 7, a from 7 to 9. Were a complete at 6, it could as well travel with c, from 6 to 9.
    assert names(cut(model, ProfiledMerge(profile, 0.1), dense=["b.p"])) == [
        ("c", ["c.p"]),
        ("a", ["a.p"]),
        ("dense.bucket0", ["b.p"]),
    ]
    # Part of a layer, and all of the model.
    halves = [LayerTime("m", ("m.weight", "m.bias"), 110, 1.0)]
    split = cut(
        sizes(("m.weight", 100), ("m.bias", 10)), ProfiledMerge(profile_of(halves, APART), 0.1), dense=["*.bias"]
    )
    assert names(split) == [("m", ["m.weight"]), ("dense.bucket0", ["m.bias"])]
    assert names(cut(model, ProfiledMerge(profile, 0.1), dense=["*"])) == [("dense.bucket0", ["c.p", "b.p", "a.p"])]


def test_what_the_profile_does_not_know_is_refused() -> None:
    merge = ProfiledMerge(profile_of(OBSERVED, APART), 0.1)
    model = [*MODEL, *sizes(("tail.weight", 3), ("tail.bias", 3))]
    with pytest.raises(ValueError, match=r"does not know the parameters tail\.bias, tail\.weight\.$"):
        cut(model, merge)
    assert len(cut(model, merge, dense=["tail.*"])) == 5  # nobody asks
    assert names(cut(MODEL[:1], merge)) == [("embed", ["embed"])]
    assert cut([], merge) == []


def test_groups_are_never_too_large_for_32_bit_indices() -> None:
    third = LARGEST_GROUP // 3
    model = sizes(*((f"m{i}.p", third) for i in range(7)))
    layers = [LayerTime(p.name[:2], (p.name,), p.numel, 1.0) for p in model[::-1]]
    plan = cut(model, ProfiledMerge(profile_of(layers, TOGETHER), 0.1))
    assert [name for name, _ in names(plan)] == ["m6..m4", "m3..m1", "m0"]
    assert all(group.numel <= LARGEST_GROUP for group in plan)
    exact = sizes(("a.p", 1), ("b.p", LARGEST_GROUP - 1), ("c.p", 1))
    layers = [LayerTime(p.name[0], (p.name,), p.numel, 1.0) for p in exact[::-1]]
    assert [group.name for group in cut(exact, ProfiledMerge(profile_of(layers, TOGETHER), 0.1))] == ["c..b", "a"]


def test_layers_of_one_bucket_are_merged_where_messages_have_a_price() -> None:
    model = sizes(("a.p", 10), ("b.p", 10), ("c.p", 10))
    layers = [LayerTime(p.name[0], (p.name,), 10, time) for p, time in zip(model[::-1], (10, 10, 20), strict=True)]
    for buckets, expected in (((0.0, 0.0), ["c", "b", "a"]), ((20.0, 20.0), ["c..b", "a"]), ((1e9, 1e9), ["c..a"])):
        profile = profile_of(layers, Line(1e-3, 1.0), buckets=buckets)
        assert [group.name for group in cut(model, ProfiledMerge(profile, 0.1))] == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rule": "best"}, "Expected rule to be one of 'optimal', 'published', but got 'best'"),
        ({"warmup": 0}, "Expected warmup to be an integer of at least 1, but got 0"),
        ({"warmup": True}, "Expected warmup to be an integer of at least 1, but got True"),
        ({"steps": 1}, "Expected steps to be an integer of at least 2, but got 1"),
        ({"steps": 2.0}, r"Expected steps to be an integer of at least 2, but got 2\.0"),
    ],
)
def test_other_ways_to_profile_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OptimalMerge(**options)  # type: ignore[arg-type]


def test_groups_are_complete_with_their_last_layer() -> None:
    profile = profile_of(OBSERVED, APART)
    groups, times = timeline(cut(MODEL, "layer", dense=["embed"]), profile)
    assert [group.name for group in groups] == ["block.norm", "head", "block.fc"]  # registration says head first
    assert times == ([20, 100, 420], [1.0, 20.0, 100.0])
    # A group waits for the last of its layers, and the embedding has seen all of backward.
    pair = [group for group in cut(MODEL, MergeBelow(120)) if group.name != "block.fc"]
    assert timeline(pair, profile)[1] == ([120, 1000], [21.0, 520.0])
    assert timeline(cut(MODEL, "model"), profile)[1] == ([1540], [541.0])
    assert timeline(cut(MODEL, "model", dense=["*"]), profile) == ([], ([], []))
    assert timeline(cut(sizes(("other", 5))), profile)[1] == ([5], [0.0])
    # Handed over in two buckets.
    buckets = profile_of(OBSERVED, APART, buckets=(50.0, 1e9))
    assert timeline(cut(MODEL, "layer"), buckets)[1] == ([100, 20, 420, 1000], [21.0, 0.0, 520.0, 0.0])
    first = profile_of(OBSERVED, APART, buckets=(20.0, 1e9))
    assert timeline(cut(MODEL, "layer"), first)[1] == ([20, 100, 420, 1000], [1.0, 540.0, 0.0, 0.0])


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
    plan = cut(model, ProfiledMerge(profile, 0.1, rule), ["m0*"] if dense else [])  # type: ignore[arg-type]
    assert sorted(p.name for group in plan for p in group.parameters) == sorted(p.name for p in model)
    assert len({group.name for group in plan}) == len(plan)
    sparse = [p.name for group in plan if not group.dense for p in group.parameters]
    assert sparse == [name for layer in layers for name in layer.parameters if name in set(sparse)]
    groups, (_, backward) = timeline(plan, profile)
    assert [g.name for g in groups] == [group.name for group in plan if not group.dense]
    assert all(seconds >= 0 for seconds in backward)
    assert sum(backward) <= sum(profile.backward_seconds) * (1 + 1e-9)
