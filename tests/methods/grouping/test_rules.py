"""Which parameters are sparsified: by hand, and against the rules said plainly."""

from __future__ import annotations

import pickle
import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_sparse as ls
from lightning_sparse.methods.grouping import GROUPINGS, ParameterSize, Rules, as_rules, make_plan
from lightning_sparse.tools.advisor.networks import ring
from lightning_sparse.tuning.performance.cost import Line
from lightning_sparse.tuning.performance.profile import GroupCost, LayerTime, Profile
from tests.trainers import EVERYTHING_SPARSE

MODEL = {
    "embed.weight": (5000, 2),
    "block.fc.weight": (400, 2),
    "block.fc.bias": (20, 1),
    "block.norm.weight": (300, 1),
    "block.gate.weight": (255, 2),
    "block.conv.weight": (256, 4),
    "scale": (1, 0),
}
SIZES = [ParameterSize(name, numel, 4, "float32", ndim) for name, (numel, ndim) in MODEL.items()]

CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "block.fc.bias block.norm.weight block.gate.weight scale"),
    ({"dense_ndim": 0}, "block.fc.bias block.gate.weight scale"),
    ({"dense_ndim": 1}, "block.fc.bias block.gate.weight scale"),
    ({"dense_ndim": 1, "dense_numel": 0}, "scale"),
    ({"dense_ndim": 3}, " ".join(name for name in MODEL if name != "block.conv.weight")),
    ({"dense_numel": 0}, "block.fc.bias block.norm.weight scale"),
    ({"dense_numel": 257}, "block.fc.bias block.norm.weight block.gate.weight block.conv.weight scale"),
    ({"dense_ndim": 0, "dense_numel": 0}, ""),
    ({"dense_ndim": 0, "dense_numel": 0, "dense": ["*.fc.*"]}, "block.fc.weight block.fc.bias"),
    ({"sparse": ["*norm*", "scale"]}, "block.fc.bias block.gate.weight"),
    ({"sparse": "block.*", "dense": "embed*"}, "embed.weight scale"),
    ({"densities": {"block.*.weight": 1.0}}, "block.fc.bias scale"),
    ({"densities": {"scale": 1}, "sparse": ["scale"]}, "block.fc.bias block.norm.weight block.gate.weight"),
    ({"dense": ["*"]}, " ".join(MODEL)),
]


@pytest.mark.parametrize(("rules", "dense"), CASES, ids=[str(case[0]) for case in CASES])
def test_names_decide_before_sizes(rules: dict[str, Any], dense: str) -> None:
    plan = make_plan(SIZES, "layer", Rules(**rules))
    assert {p.name for group in plan if group.dense for p in group.parameters} == set(dense.split())
    assert sorted(p.name for group in plan for p in group.parameters) == sorted(MODEL)


def test_small_parameters_stay_dense_unless_told_otherwise() -> None:
    assert make_plan(SIZES) == make_plan(SIZES, rules=None) == make_plan(SIZES, rules=Rules())
    assert make_plan(SIZES) != make_plan(SIZES, rules=EVERYTHING_SPARSE)


def test_own_densities_make_groups_of_their_own() -> None:
    densities = {"embed*": 0.001, "block.fc.*": 0.5, "block.*.bias": 0.1, "scale": 1.0, "block.conv*": 0.001}
    plan = make_plan(SIZES, "layer", Rules(["*.gate.*"], ["*norm*"], densities))
    assert [(group.name, [p.name for p in group.parameters], group.density, group.dense) for group in plan] == [
        ("block.norm", ["block.norm.weight"], None, False),
        ("density1.0.scale", ["scale"], 1.0, False),
        ("density0.001.block.conv", ["block.conv.weight"], 0.001, False),
        ("density0.001.embed", ["embed.weight"], 0.001, False),
        ("density0.5.block.fc", ["block.fc.bias", "block.fc.weight"], 0.5, False),  # the first pattern counts
        ("dense.bucket0", ["block.gate.weight"], None, True),
    ]
    assert [group.picks(0.25) for group in plan] == [75, 1, 1, 5, 210, 255]
    # One density is one group where the grouping says so, whatever the pattern.
    together = make_plan(SIZES, "model", Rules(["*.gate.*"], ["*norm*"], densities))
    assert [group.name for group in together] == [
        "model",
        "density1.0.model",
        "density0.001.model",
        "density0.5.model",
        "dense.bucket0",
    ]


def test_kinds_and_densities_are_both_kept_apart() -> None:
    half = [p._replace(name=f"half.{p.name}", element_size=2, kind="bfloat16") for p in SIZES]
    plan = make_plan([*SIZES, *half], "model", Rules(densities={"*embed*": 0.001}))
    assert [(group.name, group.density, group.dense) for group in plan] == [
        ("bfloat16.model", None, False),
        ("float32.model", None, False),
        ("density0.001.bfloat16.model", 0.001, False),
        ("density0.001.float32.model", 0.001, False),
        ("dense.bfloat16.bucket0", None, True),
        ("dense.float32.bucket0", None, True),
    ]


def test_layers_are_merged_at_the_prices_of_their_own_density() -> None:
    # Up to a density of 0.1, coordinates cost everything; at 1, messages do.
    prices = [(0.1, Line(1e-9, 1.0)), (1.0, Line(1e9, 1e-9))]
    costs = [GroupCost(density, Line(0, 0), Line(0, 0), price) for density, price in prices]
    names = ["a.p", "b.p", "c.p", "d.p"]
    layers = [LayerTime(name[0], (name,), 1000, 1e3) for name in reversed(names)]
    profile = Profile(layers, 0.0, ring(2, 0, 1e9), costs, "comm", (0, 0))
    sizes = [ParameterSize(name, 1000, 4, "float32") for name in names]
    rules = Rules(densities={"[ab].p": 1.0})
    groups = [group.name for group in make_plan(sizes, "optimal_merge", rules, profile=profile, density=0.1)]
    assert groups == ["d", "c", "density1.0.b..a"]


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        (
            {"dense": ["*.bias"], "sparse": ["scale", "block.fc.*"]},
            "but 'block.fc.bias' is matched by '*.bias' in dense and by 'block.fc.*' in sparse.",
        ),
        (
            {"dense": ["scale", "embed*"], "densities": {"*.weight": 0.1}},
            "but 'embed.weight' is matched by 'embed*' in dense and by '*.weight' in densities.",
        ),
        ({"dense": ["*.bais"]}, "The pattern '*.bais' in dense matches no parameter. Names that are close: "),
        ({"sparse": ["scal"]}, "The pattern 'scal' in sparse matches no parameter. Names that are close: scale"),
        ({"densities": {"embed": 0.1}}, "The pattern 'embed' in densities matches no parameter. Names that are "),
        ({"densities": {"EMBED*": 0.1}}, "The pattern 'EMBED*' in densities matches no parameter."),
    ],
)
def test_patterns_that_cannot_work_fail_when_the_plan_is_made(rules: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make_plan(SIZES, "layer", Rules(**rules))


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"dense": 3}, "Expected dense to be patterns of parameter names, such as ['*.bias'], but got 3."),
        ({"dense": ["*.bias", None]}, "Expected dense to be patterns of parameter names"),
        ({"sparse": {"a": 1}}, "Expected sparse to be patterns of parameter names"),
        ({"densities": ["a"]}, "Expected densities to be a mapping from patterns of parameter names to densities"),
        ({"densities": {1: 0.1}}, "Expected densities to be a mapping from patterns of parameter names to densities"),
        ({"densities": {"a": 0}}, "Expected densities['a'] to be a number in (0, 1], the share of coordinates"),
        ({"densities": {"a": 1.1}}, "Expected densities['a'] to be a number in (0, 1]"),
        ({"densities": {"a": "0.1"}}, "Expected densities['a'] to be a number in (0, 1]"),
        ({"densities": {"a": True}}, "Expected densities['a'] to be a number in (0, 1]"),
        ({"dense_ndim": -1}, "Expected dense_ndim to be an integer of at least 0, but got -1."),
        ({"dense_ndim": True}, "Expected dense_ndim to be an integer of at least 0, but got True."),
        ({"dense_numel": 2.0}, "Expected dense_numel to be an integer of at least 0, but got 2.0."),
        ({"dense_numel": None}, "Expected dense_numel to be an integer of at least 0, but got None."),
    ],
)
def test_bad_settings_fail_at_construction(rules: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Rules(**rules)


def test_rules_are_values() -> None:
    given: dict[str, Any] = {"dense": ["b"], "sparse": ["s"], "densities": {"d*": 1, "e*": 0.5}, "dense_numel": 7}
    rules, other = Rules(**given), Rules(**given)
    given["dense"].append("c")
    given["densities"]["f"] = 0.1
    expected = "Rules(dense=('b',), sparse=('s',), densities={'d*': 1.0, 'e*': 0.5}, dense_ndim=2, dense_numel=7)"
    assert repr(rules) == repr(other) == expected
    assert rules == other
    assert hash(rules) == hash(other)
    assert len({rules, other, Rules(), ls.Rules()}) == 2
    assert pickle.loads(pickle.dumps(rules)) == rules


def test_short_forms_are_added_to_the_rules() -> None:
    rules = Rules(dense=["a"], densities={"d": 0.1}, dense_numel=3)
    assert as_rules(rules, "b*") == Rules(dense=["a", "b*"], densities={"d": 0.1}, dense_numel=3)
    assert as_rules(rules, ["b", "c"]).dense == ("a", "b", "c")
    assert as_rules(None) == Rules()
    assert rules.dense == ("a",)
    with pytest.raises(ValueError, match=r"Expected rules to be Rules, such as Rules\(dense=\['\*\.bias'\]\), but got"):
        as_rules(["*.bias"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected dense to be patterns of parameter names"):
        as_rules(None, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "reasons"),
    [
        (EVERYTHING_SPARSE, ""),
        (EVERYTHING_SPARSE.also_dense("a"), "named"),
        (Rules(), "fewer than 2 dimensions or fewer than 256 coordinates"),
        (Rules(["a"], dense_ndim=0), "fewer than 256 coordinates or named"),
        (Rules(["a"], dense_ndim=1), "fewer than 1 dimensions, fewer than 256 coordinates or named"),
    ],
)
def test_rules_say_what_they_keep_dense(rules: Rules, reasons: str) -> None:
    assert rules.reasons() == reasons


PATTERNS = ["m0.*", "m1.*", "*.1.p", "*.2.p", "*3*", "*.p"]


@settings(deadline=None, max_examples=150)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 600), st.integers(0, 4)), min_size=1, max_size=15),
    kinds=st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=15, max_size=15),
    dense=st.lists(st.sampled_from(PATTERNS[:5]), max_size=2),
    sparse=st.lists(st.sampled_from(PATTERNS[:5]), max_size=2),
    densities=st.dictionaries(st.sampled_from(PATTERNS), st.sampled_from([0.001, 0.1, 1.0]), max_size=3),
    limits=st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 256, 600])),
    grouping=st.sampled_from([name for name, _ in GROUPINGS.items()]),
)
def test_each_parameter_is_in_one_group_and_dense_iff_the_rules_say_so(
    shapes: list[tuple[int, int]],
    kinds: list[str],
    dense: list[str],
    sparse: list[str],
    densities: dict[str, float],
    limits: tuple[int, int],
    grouping: str,
) -> None:
    model = [
        ParameterSize(f"m{i % 4}.{i}.p", numel, 4 if kind == "float32" else 2, kind, ndim)
        for i, ((numel, ndim), kind) in enumerate(zip(shapes, kinds, strict=False))
    ]
    expected: dict[str, tuple[bool, float | None]] = {}
    contradiction = False
    for p in model:
        named = any(fnmatchcase(p.name, pattern) for pattern in dense)
        own = [density for pattern, density in densities.items() if fnmatchcase(p.name, pattern)]
        wanted = bool(own) or any(fnmatchcase(p.name, pattern) for pattern in sparse)
        contradiction |= named and wanted
        small = p.ndim < limits[0] or p.numel < limits[1]
        expected[p.name] = (named or (small and not wanted), own[0] if own else None)
    idle = [q for q in [*dense, *sparse, *densities] if not any(fnmatchcase(p.name, q) for p in model)]
    rules = Rules(dense, sparse, densities, *limits)
    if idle or contradiction:
        with pytest.raises(ValueError, match="matches no parameter" if idle else "Expected every parameter to stay"):
            make_plan(model, grouping, rules)
        return
    plan = make_plan(model, grouping, rules)
    assert sorted(p.name for group in plan for p in group.parameters) == sorted(expected)
    assert len({group.name for group in plan}) == len(plan)
    for group in plan:
        assert len({p.kind for p in group.parameters}) == 1
        for p in group.parameters:
            assert (group.dense, group.density) == expected[p.name]
    assert [group.dense for group in plan] == sorted(group.dense for group in plan)
    assert make_plan(model, grouping, rules) == plan
