"""`node_size=`: dense within a node, sparse between nodes, on four real processes."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import diversity
from tests.covering import by_default
from tests.nodes.model import (
    SHAPES,
    Averages,
    Given,
    Linear,
    here,
    integers,
    node_mean,
    normal,
    part,
    put_together,
    stream,
    weights,
    wrapped,
)
from tests.ranks import Ranks, error_of
from tests.static_path import static_path

NAMES = list(SHAPES)
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.125),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


# ---- Density 1


def dense(size: int | None, kind: str, each: int, given: Given) -> list[dict[str, Tensor]]:
    """Weights after each step at density 1; None: plain DDP."""
    if size is None:
        ddp = DistributedDataParallel(Linear(), bucket_cap_mb=0.001)
    else:
        ddp, _ = wrapped(size, density=1.0)
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    found = []
    for step in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            for number in range(each - 1):
                ddp(here(10 * step + number, given)).backward()
        ddp(here(10 * step + 9, given)).backward()
        optimizer.step()
        found.append(weights(ddp))
    return found


@pytest.mark.parametrize(
    ("kind", "each"),
    by_default([("momentum", 3), ("adamw", 1), ("sgd", 1), ("sgd", 3), ("momentum", 1), ("adamw", 3)], 2),
)
def test_density_1_is_ddp_bit_for_bit_where_sums_are_exact(four_ranks: Ranks, kind: str, each: int) -> None:
    ours, plain = (four_ranks(dense, size, kind, each, integers) for size in (2, None))
    for mine, theirs in zip(ours, plain, strict=True):
        for now, then in zip(mine, theirs, strict=True):
            assert all(torch.equal(now[name], then[name]) for name in NAMES)


def averages(size: int, step: int) -> dict[str, Tensor]:
    ddp, _ = wrapped(size, density=1.0)
    ddp(here(step)).backward()
    return Averages(ddp)()


def test_density_1_differs_from_a_sum_by_the_rounding_of_three_additions(four_ranks: Ranks) -> None:
    found = four_ranks(averages, 2, 0)
    for name in NAMES:
        every = torch.stack([normal(0, rank, name).double() for rank in range(4)])
        bound = 3 * torch.finfo(torch.float32).eps * every.abs().sum(0) / 4
        assert ((found[0][name].double() - every.mean(0)).abs() <= bound).all()
        assert all(torch.equal(found[0][name], other[name]) for other in found)


# ---- Sparse: the law, and step rules


def summed(options: dict[str, Any], steps: int) -> dict[str, Any]:
    """SGD at rate 1 of integers: what has become of all gradients but those of a step that is left out."""
    ddp, engine = wrapped(2, sparsifier="top_k", **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    start = weights(ddp)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(here(step, integers)).backward()
        if step != 1:
            optimizer.step()
    residuals = {name: engine.residual(name).clone() for name in NAMES}
    moved = {name: (start[name] - now).flatten() for name, now in weights(ddp).items()}
    return {"residuals": residuals, "moved": moved}


def test_nothing_of_a_part_is_lost_and_what_is_thrown_away_is_gone(four_ranks: Ranks) -> None:
    steps = 5
    found = four_ranks(summed, {}, steps)
    for rank, one in enumerate(found):
        place = rank % 2
        nodes = [other for number, other in enumerate(found) if number % 2 == place]
        for name in NAMES:
            waiting = torch.stack([other["residuals"][name] for other in nodes]).sum(0)
            applied = part(one["moved"][name], place, 2)
            absorbed = sum(
                part(node_mean(step, node, 2, name, integers), place, 2)
                for step in range(steps)
                for node in range(2)
                if step != 1
            )
            assert torch.equal(waiting + 2 * applied, absorbed)
            assert all(torch.equal(one["moved"][name], other["moved"][name]) for other in found)


def before_the_step() -> bool:
    """Whether ``.grad`` is the mean of the node between backward and step."""
    ddp, _ = wrapped(2)
    ddp(here(0, integers)).backward()
    node = dist.get_rank() // 2
    return all(
        torch.equal(ddp.module.get_parameter(name).grad.flatten(), node_mean(0, node, 2, name, integers))
        for name in NAMES
    )


def test_gradients_are_the_means_of_nodes_until_the_step(four_ranks: Ranks) -> None:
    assert four_ranks(before_the_step) == [True] * 4


def with_adamw(steps: int) -> list[dict[str, Tensor]]:
    ddp, _ = wrapped(2)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(here(step)).backward()
        optimizer.step()
        found.append(weights(ddp))
    return found


def test_adamw_divides_by_what_the_parts_were_exchanged_with(four_ranks: Ranks) -> None:
    steps, names = 4, NAMES[::-1]
    parts = [
        ls.simulate(
            stream(steps, 2, 2, place, names), sparsifier="union_top_k", density=0.05, memory=ls.memories.SecondMoment()
        )
        for place in range(2)
    ]
    expected = weights(Linear())
    found = four_ranks(with_adamw, steps)
    for step, traces in enumerate(zip(*parts, strict=True)):
        steps_of = put_together([trace.update / trace.divisor for trace in traces], names)
        for name in NAMES:
            expected[name] = expected[name] * (1 - 0.01 * 0.1) - 0.01 * math.sqrt(2) * steps_of[name]
            torch.testing.assert_close(found[0][step][name], expected[name], rtol=1e-5, atol=1e-6)
            assert all(torch.equal(found[0][step][name], other[step][name]) for other in found)


def from_dense_states_of_one_rank() -> list[bool]:
    """Whether weights are equal, with a comparison of gradients that two nodes do not need."""
    model = Linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ddp = DistributedDataParallel(model)
    ddp(here(0)).backward()
    optimizer.step()
    found = []
    with patch.object(diversity, "FEW", 1):
        sparse = DistributedDataParallel(model)
        engine = ls.attach(sparse, density=0.05, node_size=2, watch=None)
        if dist.get_rank():
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(1, 4):
            optimizer.zero_grad()
            sparse(here(number)).backward()
            optimizer.step()
            own = [p for name, p in model.named_parameters() if engine.residual(name) is not None]
            found.append(all_equal(own))  # others are stepped by torch's AdamW, whose states differ
    return found


def all_equal(parameters: list[torch.nn.Parameter]) -> bool:
    own = torch.cat([p.detach().flatten() for p in parameters])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return all(torch.equal(every[0], other) for other in every)


def test_nodes_go_on_from_dense_states_that_one_rank_has(four_ranks: Ranks) -> None:
    """The ranks of a node meet in a comparison, whoever of them has states."""
    assert four_ranks(from_dense_states_of_one_rank) == [[True] * 3] * 4


def clipped(limit: float) -> tuple[dict[str, Tensor], Tensor]:
    ddp, engine = wrapped(2, density=1.0)
    ddp(here(0)).backward()
    norm = engine.clip_grad_norm_(ddp.parameters(), limit)
    return Averages(ddp)(), norm


@pytest.mark.parametrize("limit", [0.25, 1e9])
def test_clipping_is_by_the_norm_of_the_mean_over_all_ranks(four_ranks: Ranks, limit: float) -> None:
    mean = {name: sum(normal(0, rank, name) for rank in range(4)) / 4 for name in NAMES}
    whole = math.sqrt(sum(float(x.double().square().sum()) for x in mean.values()))
    found = four_ranks(clipped, limit)
    for grads, norm in found:
        assert float(norm) == pytest.approx(whole, rel=0.08)
        assert torch.equal(norm, found[0][1])
        for name in NAMES:
            shrunk = mean[name] * min(1.0, limit / float(norm))
            torch.testing.assert_close(grads[name], shrunk, rtol=1e-5, atol=1e-6)
            assert torch.equal(grads[name], found[0][0][name])


# ---- Steps that do not count, and parameters that are not used


def skipping(bad: int) -> list[Any]:
    ddp, engine = wrapped(2)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        gradients = here(step)
        if step == 1 and dist.get_rank() == bad:
            gradients["few"][-1] = float("inf")
        before = weights(ddp)
        ddp(gradients).backward()
        if step == 1:
            bad_here = not all(bool(p.grad.isfinite().all()) for p in ddp.parameters())
        optimizer.step()
        if step == 1:
            unchanged = all(torch.equal(before[name], now) for name, now in weights(ddp).items())
    counts = engine.step, engine.skipped_steps
    return [bad_here, unchanged, counts, weights(ddp)]


def test_a_gradient_that_is_not_finite_in_one_part_skips_the_step_on_all_ranks(four_ranks: Ranks) -> None:
    found = four_ranks(skipping, 3)
    for bad_here, unchanged, counts, now in found:
        assert bad_here
        assert unchanged
        assert counts == (2, 1)
        assert all(torch.equal(now[name], found[0][-1][name]) for name in NAMES)


USED: dict[str, dict[str, Any]] = {
    "unused": {"find_unused_parameters": True},
    "one group each": {"find_unused_parameters": True, "grouping": "layer"},
    "views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


def unused(which: str) -> list[dict[str, Tensor]]:
    """Of "wide" in step 0 nobody has a gradient, in step 1 one rank alone."""
    rules = ls.Rules(dense=["few"] if which == "one group each" else [], dense_ndim=0, dense_numel=0)
    ddp, _ = wrapped(2, density=1.0, rules=rules, **USED[which])
    averages, found = Averages(ddp), []
    for step in range(3):
        wide = step == 2 or (step == 1 and dist.get_rank() == 3)
        ddp(here(step, integers, [name for name in NAMES if name != "wide" or wide])).backward()
        found.append(averages())
    return found


@pytest.mark.parametrize("which", by_default(list(USED), 2))
def test_parameters_that_some_ranks_or_none_use(four_ranks: Ranks, which: str) -> None:
    for first, second, third in four_ranks(unused, which):
        assert "wide" not in first
        assert torch.equal(second["wide"], integers(1, 3, "wide") / 4)
        assert torch.equal(third["wide"], sum(integers(2, rank, "wide") for rank in range(4)) / 4)
        assert torch.equal(first["long"], sum(integers(0, rank, "long") for rank in range(4)) / 4)


def with_a_static_graph(view: bool) -> list[dict[str, Tensor]]:
    """The same parameters are used in all steps, and one of them never."""
    ddp, _ = wrapped(2, density=1.0, static_graph=True, gradient_as_bucket_view=view)
    averages, found = Averages(ddp), []
    for step in range(3):
        ddp(here(step, integers, NAMES[:3])).backward()
        found.append(averages())
    return found


@pytest.mark.parametrize("view", [False, True])
def test_a_static_graph(four_ranks: Ranks, view: bool) -> None:
    for ours in four_ranks(with_a_static_graph, view):
        for step, found in enumerate(ours):
            for name in NAMES[:3]:
                assert torch.equal(found[name], sum(integers(step, rank, name) for rank in range(4)) / 4)
            assert not found.get(NAMES[3], torch.zeros(())).any()


def of_two_optimizers() -> list[Any]:
    ddp, engine = wrapped(2, sparsifier="top_k")
    named = dict(ddp.module.named_parameters())
    optimizers = [
        torch.optim.SGD([named.pop("few")], lr=0.125, momentum=0.5),
        torch.optim.AdamW(named.values(), lr=0.01),
    ]
    for step in range(4):
        ddp(here(step)).backward()
        for optimizer in optimizers if step % 2 else optimizers[::-1]:
            optimizer.step()
            optimizer.zero_grad()
    return [weights(ddp), ls.flush(engine, optimizers), weights(ddp)]


def test_two_optimizers_of_one_backward(four_ranks: Ranks) -> None:
    start, found = weights(Linear()), four_ranks(of_two_optimizers)
    for before, norm, after in found:
        assert norm == found[0][1] > 0
        for name in NAMES:
            assert torch.equal(before[name], found[0][0][name])
            assert torch.equal(after[name], found[0][2][name])
            assert not torch.equal(before[name], start[name])


def overflowing(device: bool, sparsifier: str) -> tuple[list[int], dict[str, Tensor]]:
    """Means of nodes are finite, and in one part their sum is not."""
    with static_path() if device else nullcontext():
        ddp, engine = wrapped(2, sparsifier=sparsifier)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
        for step in range(3):
            ddp(here(step)).backward()
            if step == 1:
                ddp.module.get_parameter("long").grad.view(-1)[:9] = 3e38
            before = weights(ddp)
            optimizer.step()
            stood = all(torch.equal(x, before[name]) for name, x in weights(ddp).items())
            assert stood == (step == 1)
            optimizer.zero_grad()
        return [engine.step, engine.skipped_steps], weights(ddp)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize(("device", "sparsifier"), [(False, "top_k"), (True, "union_top_k")])
def test_a_sum_that_overflows_in_one_part_skips_the_step_on_all_ranks(
    four_ranks: Ranks, device: bool, sparsifier: str
) -> None:
    found = four_ranks(overflowing, device, sparsifier)
    for counts, now in found:
        assert counts == [2, 1]
        assert all(bool(x.isfinite().all()) and torch.equal(x, found[0][1][name]) for name, x in now.items())


def densely_now_and_then(kind: str) -> list[dict[str, Tensor]]:
    ddp, _ = wrapped(2, density=ls.Warmup(1.0, 0.05, 2))
    optimizer, found = OPTIMIZERS[kind](ddp.parameters()), []
    for step in range(6):
        ddp(here(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(ddp))
    return found


def used_here_and_there(kind: str, view: bool) -> list[dict[str, Tensor]]:
    """In each step a rank uses parameters of its own choice."""
    ddp, _ = wrapped(2, find_unused_parameters=True, gradient_as_bucket_view=view)
    optimizer, found = OPTIMIZERS[kind](ddp.parameters()), []
    for step in range(8):
        names = [name for number, name in enumerate(NAMES) if (step + dist.get_rank()) >> number & 1]
        ddp(here(step, normal, names or NAMES[:1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(ddp))
    return found


@pytest.mark.parametrize(("kind", "view"), [("momentum", True), ("adamw", False)])
def test_ranks_stay_equal_where_each_uses_others(four_ranks: Ranks, kind: str, view: bool) -> None:
    first, *others = four_ranks(used_here_and_there, kind, view)
    for other in others:
        assert all(torch.equal(now[name], first[step][name]) for step, now in enumerate(other) for name in NAMES)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_ranks_stay_equal_where_the_density_comes_from_1(four_ranks: Ranks, kind: str) -> None:
    found = four_ranks(densely_now_and_then, kind)
    for name in NAMES:
        for one in found:
            assert all(torch.equal(one[step][name], found[0][step][name]) for step in range(6))


# ---- Flush, numbers, precision


def flushed(kind: str) -> dict[str, Any]:
    ddp, engine = wrapped(2, sparsifier="top_k")
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    for step in range(3):
        optimizer.zero_grad()
        ddp(here(step, integers)).backward()
        optimizer.step()
    norm = ls.flush(engine, [optimizer])
    left = [float(engine.residual(name).abs().sum()) for name in NAMES]
    summary = engine.summary()
    moved = {name: weights(Linear())[name] - now for name, now in weights(ddp).items()}
    return {"norm": norm, "left": left, "moved": moved, "summary": summary}


def test_a_flush_applies_all_that_waits_in_any_part(four_ranks: Ranks) -> None:
    found = four_ranks(flushed, "sgd")
    for one in found:
        assert one["norm"] == found[0]["norm"] > 0
        assert not any(one["left"])
        for name in NAMES:
            everything = sum(integers(step, rank, name) for step in range(3) for rank in range(4)) / 4
            assert torch.equal(one["moved"][name], 0.125 * everything)
        assert one["summary"].keys() == found[0]["summary"].keys()  # of the rank's own part, as of its own shard


def test_with_adamw_all_ranks_stay_equal_through_a_flush(four_ranks: Ranks) -> None:
    found = four_ranks(flushed, "adamw")
    assert found[0]["norm"] > 0
    assert all(torch.equal(found[0]["moved"][name], other["moved"][name]) for other in found for name in NAMES)


def memory(size: int) -> tuple[int, float, int]:
    ddp, engine = wrapped(size)
    ddp(here(0)).backward()
    Averages(ddp)()
    return engine.memory_bytes, engine.stepper.totals.state_dict()["dense_bytes"], engine.stepper.groups[0].plan.numel


def test_a_rank_of_a_node_keeps_and_sends_its_part(four_ranks: Ranks) -> None:
    every = sum(math.prod(shape) for shape in SHAPES.values())
    parts = four_ranks(memory, 2)
    assert sum(numel for *_, numel in parts) == 2 * every
    for kept, sent, numel in parts:
        assert abs(numel - every / 2) <= len(SHAPES)
        assert kept <= 4 * (numel + 1)
        assert sent == numel * 4  # a ring of two ranks


def narrow(dtype: torch.dtype, scaled: bool) -> list[Any]:
    """Averages and weights; with a scaler, one overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000) if scaled else None
    ddp, engine = wrapped(2, Linear(dtype))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    for step in range(4 if scaled else 3):
        optimizer.zero_grad()
        loss = ddp({name: x.to(dtype) for name, x in here(step, integers).items()})
        if scaled and step == 1 and dist.get_rank() == 3:
            loss = loss * float("inf")
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    residuals = [float(engine.residual(name).abs().max()) for name in NAMES]
    return [weights(ddp), residuals, engine.skipped_steps, 1.0 if scaler is None else scaler.get_scale()]


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.float64, False), (torch.float32, True)])
def test_other_precisions(four_ranks: Ranks, dtype: torch.dtype, scaled: bool) -> None:
    found = four_ranks(narrow, dtype, scaled)
    start = weights(Linear(dtype))
    for now, residuals, skipped, scale in found:
        assert (skipped, scale) == ((1, 512.0) if scaled else (0, 1.0))
        assert all(torch.equal(now[name], found[0][0][name]) for name in NAMES)
        assert any(not torch.equal(now[name], start[name]) for name in NAMES)
        assert 0 < max(residuals) <= 3 * 8 * 9  # free of the scale


# ---- The watchdog


def diverged(rank: int) -> list[str]:
    ddp, engine = wrapped(2, watch=ls.Watch(every=1))
    with torch.no_grad():
        ddp.module.get_parameter("wide")[0, 0] += 2.0 * (dist.get_rank() == rank)
    with warnings.catch_warnings(action="ignore"):
        averages = Averages(ddp)
        for step in range(3):
            ddp(here(step)).backward()
            averages()
    return engine.warnings


@pytest.mark.parametrize("rank", [1, 2])
def test_the_watchdog_sees_weights_that_differ_within_a_node_and_between_nodes(four_ranks: Ranks, rank: int) -> None:
    for [told] in four_ranks(diverged, rank):
        assert "1 of 4 parameters are no longer equal on all ranks. The first is 'wide', by up to 2" in told
        assert f"rank(s) [{rank}] differ" in told


# ---- What belongs to whole parameters


def decayed(size: int | None) -> dict[str, Tensor]:
    """Averages at density 1 of gradients with a decay of matrices alone."""
    ddp, _ = wrapped(size, density=1.0, memory=ls.memories.WeightDecay(0.5, min_ndim=2))
    ddp(here(0, integers)).backward()
    return Averages(ddp)()


def test_parts_have_as_many_dimensions_as_their_parameters(four_ranks: Ranks) -> None:
    for nodes, flat in zip(four_ranks(decayed, 2), four_ranks(decayed, None), strict=True):
        assert all(torch.equal(nodes[name], flat[name]) for name in NAMES)


# ---- Beside an engine


def exchanged(bad: int | None) -> tuple[bool, bool, dict[str, Tensor]]:
    """What ``engine.exchange`` says and leaves, for an optimizer that torch does not have."""
    ddp, engine = wrapped(2, sparsifier="top_k", memory="residual")
    gradients = here(0, integers)
    if dist.get_rank() == bad:
        gradients["few"][-1] = float("nan")
    ddp(gradients).backward()
    went = engine.exchange(ddp.parameters())
    found = {name: ddp.module.get_parameter(name).grad.clone() for name in NAMES}
    again, _ = wrapped(2, sparsifier="top_k")
    again(here(0, integers)).backward()
    expected = Averages(again)()
    return went, all(torch.equal(found[name], expected[name]) for name in NAMES), found


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("bad", [None, 2])
def test_an_exchange_by_hand(four_ranks: Ranks, bad: int | None) -> None:
    for went, as_in_a_step, found in four_ranks(exchanged, bad):
        assert went == as_in_a_step == (bad is None)
        assert bad is None or not any(bool(x.any()) for x in found.values())


def left_alone() -> tuple[bool, int]:
    """Whether gradients of a backward that somebody else averages are this rank's own."""
    ddp, engine = wrapped(2)
    with engine.paused():
        ddp(here(0)).backward()
    own = all(torch.equal(ddp.module.get_parameter(name).grad, here(0)[name]) for name in NAMES)
    return own, engine.step


def test_paused_engines_average_nothing_within_a_node(four_ranks: Ranks) -> None:
    assert four_ranks(left_alone) == [(True, 0)] * 4


def copied() -> tuple[bool, str]:
    """Whether an average of weights follows them; and what a copy of an engine says."""
    ddp, engine = wrapped(2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    average = torch.optim.swa_utils.AveragedModel(ddp, multi_avg_fn=lambda old, new, _: torch._foreach_copy_(old, new))
    for step in range(2):
        ddp(here(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(ddp)
    copies = dict(average.module.module.named_parameters())
    equal = all(torch.equal(copies[name], now) for name, now in weights(ddp).items())
    return equal, error_of(lambda: copy.deepcopy(engine).step)


def test_averages_of_weights_and_copies(four_ranks: Ranks) -> None:
    for equal, said in four_ranks(copied):
        assert equal
        assert "This is a copy of an engine" in said
