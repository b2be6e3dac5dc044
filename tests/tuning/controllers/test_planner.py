"""Engines that follow a profile, on real gloo processes."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.api.attach import sizes_of
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.methods.grouping import Cut, Group, ParameterSize, make_plan
from lightning_sparse.tuning.controllers import Planner
from lightning_sparse.tuning.performance.cost import Line
from lightning_sparse.tuning.performance.densities import hidden_densities
from lightning_sparse.tuning.performance.profile import Profile
from lightning_sparse.tuning.performance.profiler import overlap_of
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE
from tests.tuning.controllers.models import Balance, Net, batches, fix_costs, fix_network, flat, residuals, wrapped

pytestmark = pytest.mark.thorough
APART = Line(1e-9, 1.0)
"""A price for each coordinate that dwarfs backward: the first layer to be ready starts alone, at once."""
SOON = {"warmup": 1, "steps": 2}
"""The groups change in the fourth step."""
OPTIONS = {"density": 0.05, "grouping": ls.tuning.OptimalMerge(**SOON), "executor": "thread"}


def planner_of(engine: Any) -> Planner:
    [planner] = [observer for observer in engine.observers if isinstance(observer, Planner)]
    return planner


def names(plan: list[Group]) -> list[tuple[str, list[str]]]:
    return [(group.name, [p.name for p in group.parameters]) for group in plan]


def train(
    options: dict[str, Any] | None, ddp: dict[str, Any] | None = None, fixed: Line | None = APART, accumulate: int = 1
) -> dict[str, Any]:
    """Six steps of SGD with momentum, groups before each of them, and what was printed."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        if fixed is not None:
            fix_costs(patch, fixed)
        model, engine = wrapped(options, ddp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plans = []
        for index, batch in enumerate(batches(6 * accumulate)):
            model.require_backward_grad_sync = (index + 1) % accumulate == 0
            (model(batch).square().mean() / accumulate).backward()
            if model.require_backward_grad_sync:
                optimizer.step()
                optimizer.zero_grad()
                plans.append([] if engine is None else engine.plan)
        seen = {"parameters": flat(model), "plans": plans, "told": out.getvalue()}
        if engine is not None:
            planners = [observer for observer in engine.observers if isinstance(observer, Planner)]
            seen |= {"sizes": sizes_of(engine.parameters), "saved": planners[0].saved if planners else None}
            engine.close()
        hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
        assert not any(hooks)
        assert not model._forward_hooks
    return seen


@pytest.mark.parametrize("rule", ["optimal", "published"])
@pytest.mark.parametrize("executor", ["thread", "inline"])
def test_groups_follow_the_profile(two_ranks: Ranks, rule: Any, executor: str) -> None:
    options = {
        "density": 0.05,
        "grouping": ls.tuning.OptimalMerge(rule, **SOON),
        "executor": executor,
        "dense": ["left.bias"],
    }
    first, second = two_ranks(train, options)
    for key in ("plans", "saved"):
        assert first[key] == second[key]
    assert torch.equal(first["parameters"], second["parameters"])
    plans, sizes = first["plans"], first["sizes"]
    assert plans[:3] == [make_plan(sizes, "model", EVERYTHING_SPARSE.also_dense(["left.bias"]))] * 3
    profile = Profile.from_dict(first["saved"])
    rules = EVERYTHING_SPARSE.also_dense(["left.bias"])
    assert plans[3:] == [make_plan(sizes, ls.tuning.OptimalMerge(rule), rules, 0.001, profile, 0.05)] * 3
    # In the order of backward, which is not that of registration.
    layers = [layer.name for layer in profile.layers]
    assert (layers[0], layers[-1]) == ("head", "trunk")
    assert sorted(name for layer in profile.layers for name in layer.parameters) == sorted(p.name for p in sizes)
    assert all(seconds > 0 for seconds in profile.backward_seconds)
    assert profile.overlap == ("none" if executor == "inline" else profile.overlap)
    # With backward in the way of everything, one group is best; beside it, the first layers start at once.
    groups = [group.name for group in plans[-1] if not group.dense]
    if executor == "inline":
        assert groups == ["head..trunk"] if rule == "optimal" else groups
    else:
        assert len(groups) > 1
    assert "profiling 2 steps after 1 of warm-up" in first["told"]
    assert "groups by this profile" in first["told"]
    assert second["told"] == ""


CALLS = Line(1e3, 0.0)
"""A price for each message that dwarfs everything."""


def collectives_of(options: dict[str, Any], fixed: Line) -> tuple[str, int, Counter[str]]:
    """What travels together after the profile, the number of groups, and what the last step asks of the network."""
    seen: Counter[str] = Counter()

    def counting(name: str, call: Any) -> Any:
        def counted(self: TorchCollective, *args: Any) -> Any:
            seen[name] += 1
            return call(self, *args)

        return counted

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        fix_costs(patch, fixed)
        model, engine = wrapped(options)
        for index, batch in enumerate(batches(6)):
            if index == 5:
                for name in ("all_gather", "all_to_all"):
                    patch.setattr(TorchCollective, name, counting(name, getattr(TorchCollective, name)))
            model(batch).square().mean().backward()
        assert planner_of(engine).saved["messages"] == engine.messages
        found = engine.messages, len(engine.plan)
        engine.close()
    told = {"step": "of all groups travel together", "group": "of each group travel by themselves"}
    assert dist.get_rank() or f"messages {told[found[0]]}; predicted is a step of" in out.getvalue()
    return *found, seen


class Profiled(ls.density.Constant):
    needs_profile = True


@pytest.mark.parametrize("grouping", ["layer", ls.tuning.OptimalMerge(**SOON)], ids=repr)
def test_what_travels_together_follows_the_profile(two_ranks: Ranks, grouping: Any) -> None:
    schedule = Profiled(0.05) if grouping == "layer" else 0.05
    options = {"density": schedule, "grouping": grouping, "executor": "thread"}
    run = shortened_collectives if grouping == "layer" else collectives_of
    # Layers are left open, and what is merged is told, too.
    told = ((APART, "step", "step"), (CALLS, "group", "group")) if grouping != "layer" else ()
    for fixed, given, expected in ((APART, "auto", "group"), (CALLS, "auto", "step"), *told):
        for messages, groups, seen in two_ranks(run, {**options, "messages": given}, fixed):
            assert messages == expected
            assert groups == 4 if grouping == "layer" else groups >= 1
            each = groups if messages == "group" else 1
            assert seen == {"all_gather": 2 * each, "all_to_all": each}


def shortened_collectives(options: dict[str, Any], fixed: Line) -> tuple[str, int, Counter[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ls.grouping.Grouping, "profiled_steps", (1, 2))
        return collectives_of(options, fixed)


def test_what_is_measured_without_help_is_a_profile(two_ranks: Ranks) -> None:
    first, second = two_ranks(train, OPTIONS | {"sparsifier": "exdyna"}, None, None)
    assert first["saved"] == second["saved"]
    profile = Profile.from_dict(first["saved"])
    assert [cost.density for cost in profile.costs] == [0.05]
    assert profile.costs[0].compute(8880) > 0
    assert profile.costs[0].transfer(8880) > 0
    assert profile.network.ranks == 2
    assert profile.rest_seconds > 0
    merged = make_plan(first["sizes"], "optimal_merge", EVERYTHING_SPARSE, 0.001, profile, 0.05)
    assert first["plans"][-1] == merged


LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({}, 3),
    ({"find_unused_parameters": True}, 1),
    ({"gradient_as_bucket_view": True}, 1),
    ({}, 1),
]
"""Of DDP, and by how many backwards a step accumulates."""


@pytest.mark.parametrize(
    ("rule", "executor", "sparsifiers"),
    [
        # Each sparsifier meets two layouts.
        ("optimal", "inline", ["union_top_k", "top_k"]),
        *((rule, executor, None) for rule in ("optimal", "published") for executor in ("inline", "thread")),
    ],
)
def test_density_1_trains_like_plain_ddp(
    two_ranks: Ranks, executor: str, rule: Any, sparsifiers: list[str] | None
) -> None:
    # Bit for bit: with two ranks a sum has one order, and halving is exact.
    for number, (ddp, accumulate) in enumerate(LAYOUTS):
        plain = two_ranks(train, None, ddp, None, accumulate)
        for sparsifier in ("union_top_k", "top_k") if sparsifiers is None else [sparsifiers[number % 2]]:
            options = {"sparsifier": sparsifier, "density": 1.0, "executor": executor}
            options["grouping"] = ls.tuning.OptimalMerge(rule, **SOON)
            for found, expected in zip(two_ranks(train, options, ddp, APART, accumulate), plain, strict=True):
                assert torch.equal(found["parameters"], expected["parameters"]), (ddp, sparsifier)
                assert found["plans"][2] != found["plans"][3]
                assert len(found["plans"]) == 6


def test_a_schedule_of_density_1_trains_like_plain_ddp(two_ranks: Ranks) -> None:
    plain = two_ranks(train, None)[0]["parameters"]
    with_default_steps = {"density": ls.tuning.HiddenDensity(1.0, 1.0), "grouping": ls.tuning.OptimalMerge(**SOON)}
    for found in two_ranks(train, with_default_steps, None, Line(1e-6, 1e-12)):
        assert torch.equal(found["parameters"], plain)
        assert {group.density for group in found["plans"][-1]} == {1.0}


def balance(options: dict[str, Any]) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """After each step: all residuals, and what was given so far without being applied; and the number of groups."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        fix_costs(patch, APART)
        model, engine = wrapped(options, dtype=torch.float64)
        books, seen = Balance(model), []
        for batch in batches(7, torch.float64):
            books.step(batch)
            seen.append((residuals(model, engine), books.missing.clone()))
        groups = len(engine.plan)
        engine.close()
    return groups, seen


@pytest.mark.parametrize(
    ("executor", "sparsifier"),
    list(product(["thread", "inline"], ["union_top_k", "exdyna", "top_k", "sidco_e"])),
)
def test_no_residual_is_lost_when_the_plan_comes(two_ranks: Ranks, executor: str, sparsifier: str) -> None:
    for groups, seen in two_ranks(balance, OPTIONS | {"sparsifier": sparsifier, "executor": executor}):
        assert groups > 1 or executor == "inline"
        for held, missing in seen:
            assert held.count_nonzero() > 0
            torch.testing.assert_close(held, missing, rtol=0, atol=1e-13)


def attached(options: dict[str, Any], profile: Any, extra: bool, cap: float, said_by: tuple[int, ...]) -> Any:
    """The groups right after attaching, whether backward is timed, and the profile."""
    with contextlib.redirect_stdout(io.StringIO()):
        module = Net()
        if extra:
            module.add_module("extra", nn.Linear(2, 2))
        model = DistributedDataParallel(module, bucket_cap_mb=cap)
        engine = ls.attach(
            model, **options, rules=EVERYTHING_SPARSE, profile=profile if dist.get_rank() in said_by else None
        )
        timed = bool(model._forward_hooks)
        seen = engine.plan, timed, planner_of(engine).saved
        engine.close()
    return seen


def test_a_saved_profile_is_used_at_once(two_ranks: Ranks) -> None:
    trained = two_ranks(train, OPTIONS)[0]
    saved, plan = trained["saved"], trained["plans"][-1]
    for ranks in ((0, 1), (0,)):  # what rank 0 knows is enough
        for found, timed, profile in two_ranks(attached, OPTIONS, saved, False, 0.001, ranks):
            assert found == plan
            assert not timed
            assert profile == saved
    # Other buckets of DDP hand over layers otherwise; the measurements hold.
    for found, timed, profile in two_ranks(attached, OPTIONS, saved, False, 25, (0, 1)):
        assert not timed
        assert {**profile, "bucket_numels": saved["bucket_numels"], "messages": saved["messages"]} == saved
        assert (saved["messages"], profile["messages"]) == ("group", "step")  # nothing is left to begin early
        assert Profile.from_dict(profile).delivery_seconds[1:] == [0, 0, 0]
        assert [group.name for group in found] == ["head..trunk"]
    # Another grouping and another density in time need nothing else than the same profile.
    for found, timed, _ in two_ranks(
        attached, OPTIONS | {"grouping": ls.tuning.OptimalMerge("published")}, saved, False, 25, (0,)
    ):
        assert not timed
        assert [p.name for group in found for p in group.parameters] == [p.name for g in plan for p in g.parameters]


@pytest.mark.parametrize(
    ("change", "extra", "said_by"),
    [
        ({}, True, (0, 1)),
        ({"density": 0.06}, False, (0, 1)),
        ({"executor": "inline"}, False, (0, 1)),
        ({"sparsifier": "top_k"}, False, (0, 1)),
        ({"memory": ls.memories.NoMemory()}, False, (0, 1)),
        ({}, False, (1,)),
        ({}, False, ()),
    ],
)
def test_another_profile_is_not_used(
    two_ranks: Ranks, change: dict[str, Any], extra: bool, said_by: tuple[int, ...]
) -> None:
    saved = known_profile(two_ranks)
    for found, timed, profile in two_ranks(attached, OPTIONS | change, saved, extra, 0.001, said_by):
        assert [group.name for group in found] == ["model"]
        assert timed
        assert profile is None


KNOWN: list[dict[str, Any]] = []


def known_profile(two_ranks: Ranks) -> dict[str, Any]:
    if not KNOWN:
        KNOWN.append(two_ranks(train, OPTIONS)[0]["saved"])
    return KNOWN[0]


def test_a_profile_of_more_ranks_is_not_used(three_ranks: Ranks, two_ranks: Ranks) -> None:
    for found, timed, _ in three_ranks(attached, OPTIONS, known_profile(two_ranks), False, 0.001, (0, 1, 2)):
        assert [group.name for group in found] == ["model"]
        assert timed


def refused(options: dict[str, Any], profile: Any = None, renamed: bool = False) -> str:
    module = Net()
    if renamed and dist.get_rank() == 1:
        module.__dict__["_modules"] = {name.replace("trunk", "stem"): child for name, child in module._modules.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            ls.attach(DistributedDataParallel(module, bucket_cap_mb=0.001), **options, profile=profile)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_profiles_and_models_that_do_not_fit_are_refused_on_all_ranks(two_ranks: Ranks) -> None:
    saved = known_profile(two_ranks)
    layers = [
        [name, [p.replace("trunk", "stem") for p in parameters], *rest] for name, parameters, *rest in saved["layers"]
    ]
    for told in two_ranks(refused, OPTIONS, saved | {"layers": layers}):
        assert told.startswith("ValueError: The profile does not know the parameters trunk.")
    for told in two_ranks(refused, OPTIONS, {key: saved[key] for key in saved if key != "costs"}):
        assert told.startswith("ValueError: Expected a profile as Profile.as_dict() gives it, but: KeyError('costs')")
    for told in two_ranks(refused, OPTIONS, None, True):
        assert told.startswith("RuntimeError: The ranks disagree: rank(s) [1] have other settings or other parameters")


def densities(options: dict[str, Any], low: Line, high: Line | None) -> tuple[list[Group], dict[str, Any], float]:
    """Groups, profile and summary after the profile of the default schedule of steps, shortened."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        fix_costs(patch, low, high)
        model, engine = wrapped(options)
        for batch in batches(6):
            model.zero_grad()
            model(batch).square().mean().backward()
        seen = engine.plan, planner_of(engine).saved, engine.summary()
        engine.close()
    return seen


@pytest.mark.parametrize("grouping", ["layer", ls.tuning.OptimalMerge(**SOON)], ids=repr)
def test_groups_send_what_hides(two_ranks: Ranks, grouping: Any) -> None:
    schedule = ls.tuning.HiddenDensity(0.05, 0.5)
    options = {"sparsifier": "striped_top_k", "density": schedule, "grouping": grouping, "dense": ["left.bias"]}
    with_short_warmup = two_ranks(shortened, options | {"executor": "thread"}, Line(0.0, 0.0), Line(1e-12, 0.0))
    for plan, saved, summary in with_short_warmup:
        profile = Profile.from_dict(saved)
        assert [cost.density for cost in profile.costs] == pytest.approx([0.05, math.sqrt(0.025), 0.5])
        groups, times = profile.timeline(plan)
        # What is free hides wherever any backward is left; the last group takes the floor.
        assert [group.density for group in groups] == hidden_densities(times, profile, 0.05, 0.5)
        assert [group.density for group in groups][-1] == 0.05
        assert [group.density for group in plan if group.dense] == [None]
        if grouping == "layer":
            assert [group.density for group in groups] == [0.5, 0.5, 0.5, 0.05]
        numel = sum(group.numel for group in groups)
        expected = sum(group.numel * group.density for group in groups) / numel
        assert summary["target_density"] == pytest.approx(expected)
        assert summary["density"] == pytest.approx(expected, rel=0.05)
    if grouping != "layer":
        return
    # Nothing hides inside backward, and nothing that takes a second.
    for executor, high in (("inline", Line(0.0, 0.0)), ("thread", Line(1e3, 0.0))):
        low = Line(0.0, 0.0) if executor == "inline" else Line(1e3, 0.0)
        for plan, _, _ in two_ranks(shortened, options | {"executor": executor}, low, high):
            assert {group.density for group in plan if not group.dense} == {0.05}


@pytest.mark.parametrize(
    ("grouping", "schedule"),
    [
        ("layer", ls.tuning.HiddenDensity(0.05, 0.5)),
        pytest.param(ls.tuning.OptimalMerge(**SOON), ls.tuning.HiddenDensity(0.05, 0.5), marks=pytest.mark.thorough),
        (ls.tuning.OptimalMerge(**SOON), 0.1),
    ],
    ids=repr,
)
def test_densities_of_their_own_are_kept(two_ranks: Ranks, grouping: Any, schedule: Any) -> None:
    own = {"trunk.*": 0.9, "head.weight": 0.001}
    options = {"sparsifier": "striped_top_k", "density": schedule, "grouping": grouping, "executor": "thread"}
    options["rules"] = ls.Rules(["left.bias"], densities=own)
    for plan, saved, _ in two_ranks(shortened, options, Line(0.0, 0.0), None):
        tried = [0.1] if schedule == 0.1 else [0.05, math.sqrt(0.025), 0.5]
        measured = [cost["density"] for cost in saved["costs"]]
        assert measured == pytest.approx(sorted([*tried, 0.001, 0.9]))
        found = {p.name: (group.name, group.density) for group in plan for p in group.parameters}
        assert found["trunk.weight"] == found["trunk.bias"] == ("density0.9.trunk", 0.9)
        assert found["head.weight"] == ("density0.001.head", 0.001)
        assert {found[name][1] for name in ("left.bias", "right.bias")} == {None}
        # What is free takes the cap; the last group, behind which nothing is computed, is the trunk.
        others = {found[name][1] for name in ("left.weight", "right.weight")}
        assert others == {None if schedule == 0.1 else 0.5}


@dataclass(frozen=True)
class InHalves(ls.grouping.Grouping):
    """The layers of the first half of backward, and the others."""

    needs_profile = True
    profiled_steps = (1, 2)

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        return [("whole", list(parameters))]

    def cut_by(
        self, profile: Profile, density: float, parameters: Sequence[ParameterSize], bucket_cap_mb: float
    ) -> Cut:
        total, elapsed = sum(profile.backward_seconds), 0.0
        early = set()
        for layer in profile.layers:
            elapsed += layer.backward_seconds
            early |= set(layer.parameters) if elapsed <= total / 2 or not early else set()
        halves = [[p for p in parameters if (p.name in early) == first] for first in (True, False)]
        return [("early", halves[0]), (f"late at {density}", halves[1])]


@dataclass(frozen=True)
class ByBackward(ls.density.DensitySchedule):
    """0.5 for the group that is complete last, 0.05 for the others."""

    needs_profile = True
    tried = (0.05, 0.5)

    def __call__(self, step: int) -> float:
        return 0.05

    def assign(self, plan: list[Group], profile: Profile) -> list[Group]:
        last = profile.timeline(plan)[0][-1].name
        return [group._replace(density=0.5 if group.name == last else 0.05) for group in plan]


def test_groupings_and_densities_of_ones_own_can_follow_from_a_profile(two_ranks: Ranks) -> None:
    options = {"sparsifier": "striped_top_k", "grouping": InHalves(), "executor": "thread"}
    for plan, saved, _ in two_ranks(densities, {**options, "density": 0.05}, Line(0.0, 0.0), None):
        assert [group.name for group in plan] == ["early", "late at 0.05"]
        assert sum(len(group.parameters) for group in plan) == sum(len(layer[1]) for layer in saved["layers"])
    for plan, saved, _ in two_ranks(densities, {**options, "density": ByBackward()}, Line(0.0, 0.0), None):
        assert [(group.name, group.density) for group in plan] == [("early", 0.05), ("late at 0.05", 0.5)]
        assert [cost["density"] for cost in saved["costs"]] == [0.05, 0.5]


def shortened(options: dict[str, Any], low: Line, high: Line | None) -> Any:
    """With a profile after three steps, whatever the grouping says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ls.grouping.Grouping, "profiled_steps", (1, 2))
        return densities(options, low, high)


def test_before_the_profile_a_schedule_stays_at_its_floor(two_ranks: Ranks) -> None:
    options = {"sparsifier": "striped_top_k", "density": ls.tuning.HiddenDensity(0.02, 0.5)}
    for density, plan in two_ranks(first_step, options):
        assert density == pytest.approx(0.02, rel=0.02)
        assert {group.density for group in plan} == {None}


def first_step(options: dict[str, Any]) -> tuple[float, list[Group]]:
    with contextlib.redirect_stdout(io.StringIO()):
        model, engine = wrapped(options)
        model(batches(1)[0]).square().mean().backward()
        seen = engine.summary()["density"], engine.plan
        engine.close()
    return seen


def closed_early() -> list[bool]:
    with contextlib.redirect_stdout(io.StringIO()):
        model, engine = wrapped({"grouping": ls.tuning.OptimalMerge(**SOON)})
        model(batches(1)[0]).square().mean().backward()
        before = bool(model._forward_hooks)
        engine.close()
        return [before, bool(model._forward_hooks), any(p._post_accumulate_grad_hooks for p in model.parameters())]


def test_a_closed_engine_watches_nothing(two_ranks: Ranks) -> None:
    assert two_ranks(closed_early) == [[True, False, False]] * 2


def unused() -> tuple[list[Group], dict[str, Any], bool]:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        fix_costs(patch, APART)
        options = {"sparsifier": "top_k", "density": 0.05, "grouping": ls.tuning.OptimalMerge(**SOON)}
        model, engine = wrapped(options, {"find_unused_parameters": True})
        for batch in batches(5):
            model.zero_grad()
            model(batch, "right").square().mean().backward()
        seen = engine.plan, planner_of(engine).saved, model.module.left.weight.grad is None
        engine.close()
    return seen


def test_parameters_that_nobody_used_are_in_the_plan_at_last(two_ranks: Ranks) -> None:
    for plan, saved, untouched in two_ranks(unused):
        layers = Profile.from_dict(saved).layers
        assert [layer.name for layer in layers] == ["head", "right", "trunk", "left"]
        assert layers[-1].backward_seconds == 0
        assert [p.name.partition(".")[0] for group in plan for p in group.parameters][-1] == "left"
        assert untouched


def delivered(cap: float | None) -> tuple[list[float], list[int]]:
    """Coordinates of DDP's buckets as the planner takes them, and as DDP hands them over."""
    with contextlib.redirect_stdout(io.StringIO()):
        module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(14)))
        model = DistributedDataParallel(module, **({} if cap is None else {"bucket_cap_mb": cap}))
        engine = ls.attach(model, sparsifier="top_k", grouping=ls.tuning.OptimalMerge(**SOON), executor="inline")
        seen: list[int] = []
        receive = engine._receive

        def note(bucket: Any) -> Any:
            seen.append(bucket.buffer().numel())
            return receive(bucket)

        engine._receive = note
        for _ in range(5):
            seen.clear()
            model(torch.ones(2, 256)).sum().backward()
        saved = planner_of(engine).saved
        engine.close()
    return saved["bucket_numels"], seen


@pytest.mark.parametrize("cap", [None, 0.5, 1.5])
def test_layers_are_expected_as_ddp_hands_them_over(two_ranks: Ranks, cap: float | None) -> None:
    for (first, others), seen in two_ranks(delivered, cap):
        assert seen[0] == first
        assert sum(seen) == 14 * 65536
        assert all(numel == others for numel in seen[1:-1])
        assert seen[-1] <= others


def everything_dense() -> list[str]:
    told = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        fix_network(patch)
        for density in (0.01, ls.tuning.HiddenDensity()):
            options = {"density": density, "grouping": ls.tuning.OptimalMerge(**SOON), "dense": ["*"]}
            model, engine = wrapped(options)
            for batch in batches(5):
                model(batch).square().mean().backward()
            told += [group.name for group in engine.plan]
            engine.close()
    return told


def test_a_model_that_stays_dense_has_nothing_to_plan(two_ranks: Ranks) -> None:
    first, second = two_ranks(everything_dense)
    assert first == second
    assert all(name.startswith("dense.") for name in first)


def beside(executor: str, processors: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(os, "sched_getaffinity"):
            patch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
        patch.setattr(os, "cpu_count", lambda: processors)
        _, engine = wrapped({"executor": executor})
        found = overlap_of(engine)
        engine.close()
    return found


@pytest.mark.parametrize(
    ("executor", "processors", "expected"),
    [("inline", 64, "none"), ("thread", 4, "full"), ("thread", 3, "comm"), ("auto", 4, "full")],
)
def test_a_thread_needs_a_processor(two_ranks: Ranks, executor: str, processors: int, expected: str) -> None:
    # Two ranks of one thread each, and one more for each.
    assert two_ranks(beside, executor, processors) == [expected] * 2


def test_one_rank_plans_for_itself(one_rank: None) -> None:
    settings = {"density": 0.05, "grouping": ls.tuning.OptimalMerge(**SOON), "single_device": "sparse"}
    seen = train(settings, None, None)
    profile = Profile.from_dict(seen["saved"])
    assert profile.network.ranks == 1
    # Nothing is sent, so that one group is best; beside other work, times that were measured may say two.
    names = [group.name for group in seen["plans"][-1]]
    assert len(names) <= 2
    assert names[0].startswith("head..")
    assert names[-1].endswith("..trunk")


@pytest.mark.parametrize(
    ("grouping", "density", "expected"),
    [
        ("layer", 0.1, False),
        (ls.tuning.OptimalMerge(), 0.1, True),
        ("optimal_merge", 0.1, True),
        ("layer", ls.tuning.HiddenDensity(), True),
        ("layer", ls.Warmup(0.1, 0.01, 5), False),
    ],
)
def test_only_those_who_need_a_profile_make_one(grouping: Any, density: Any, expected: bool) -> None:
    settings = ls.engine.config.SparsificationConfig(sparsifier="top_k", density=density, grouping=grouping)
    assert Planner.wanted(settings) == expected


def test_a_schedule_that_needs_a_profile_refuses_bad_settings() -> None:
    for name in ("floor", "cap"):
        for value in (0, 1.1, -0.1, math.nan, True, "much"):
            with pytest.raises(ValueError, match=rf"Expected {name} to be a number in \(0, 1\]"):
                ls.tuning.HiddenDensity(**{name: value})
    with pytest.raises(ValueError, match=r"Expected floor to be at most cap, but got floor=0\.2 and cap=0\.1"):
        ls.tuning.HiddenDensity(0.2, 0.1)
    for floor, cap in ((0.001, 0.1), (0.3, 0.3), (1.0, 1.0)):
        tried = ls.tuning.HiddenDensity(floor, cap).tried
        assert (tried[0], tried[-1]) == (floor, cap)
        assert tried == sorted(set(tried))
        assert len(tried) == (1 if floor == cap else 3)
        assert ls.tuning.HiddenDensity(floor, cap)(1000) == floor
