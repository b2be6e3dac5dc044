"""`node_size=`: dense within a node, sparse between nodes, on four real processes."""

from __future__ import annotations

import functools
import math
import platform
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.api.attach import sizes_of
from lightning_sparse.api.checkpoint import SideFiles, restore
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.methods.grouping import Group, ParameterSize, make_plan
from tests.covering import by_default
from tests.engines import Raises
from tests.nodes import (
    SHAPES,
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
        ddp, engine = wrapped(size, density=1.0)
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    if size is not None:
        engine._show([optimizer])
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
    by_default([("sgd", 1), ("momentum", 3), ("adamw", 1), ("sgd", 3), ("momentum", 1), ("adamw", 3)], 3),
)
def test_density_1_is_ddp_bit_for_bit_where_sums_are_exact(four_ranks: Ranks, kind: str, each: int) -> None:
    ours, plain = (four_ranks(dense, size, kind, each, integers) for size in (2, None))
    for mine, theirs in zip(ours, plain, strict=True):
        for now, then in zip(mine, theirs, strict=True):
            assert all(torch.equal(now[name], then[name]) for name in NAMES)


def averages(size: int, step: int) -> dict[str, Tensor]:
    ddp, _ = wrapped(size, density=1.0)
    ddp(here(step)).backward()
    return {name: ddp.module.get_parameter(name).grad.clone() for name in NAMES}


def test_density_1_differs_from_a_sum_by_the_rounding_of_three_additions(four_ranks: Ranks) -> None:
    found = four_ranks(averages, 2, 0)
    for name in NAMES:
        every = torch.stack([normal(0, rank, name).double() for rank in range(4)])
        bound = 3 * torch.finfo(torch.float32).eps * every.abs().sum(0) / 4
        assert ((found[0][name].double() - every.mean(0)).abs() <= bound).all()
        assert all(torch.equal(found[0][name], other[name]) for other in found)


# ---- Sparse: the law, and step rules


def summed(options: dict[str, Any], steps: int) -> dict[str, Any]:
    """SGD at rate 1 of integers: what has become of all gradients."""
    ddp, engine = wrapped(2, sparsifier="top_k", **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    engine._show([optimizer])
    start = weights(ddp)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(here(step, integers)).backward()
        if step != 1:  # one step is left out: its averages stay in .grad, and are set to zero
            optimizer.step()
    state = engine.state_dict()
    residuals = {name: engine.residual(name).clone() for name in NAMES}
    moved = {name: (start[name] - now).flatten() for name, now in weights(ddp).items()}
    return {"residuals": residuals, "moved": moved, "state": state}


def test_nothing_of_a_part_is_lost(four_ranks: Ranks) -> None:
    steps = 5
    found = four_ranks(summed, {}, steps)
    dropped = four_ranks(averages_of_a_step, 1)
    for rank, one in enumerate(found):
        place = rank % 2
        nodes = [other for number, other in enumerate(found) if number % 2 == place]
        for name in NAMES:
            waiting = torch.stack([other["residuals"][name] for other in nodes]).sum(0)
            applied = part(one["moved"][name] + dropped[rank][name].flatten(), place, 2)
            absorbed = sum(
                part(node_mean(step, node, 2, name, integers), place, 2) for step in range(steps) for node in range(2)
            )
            assert torch.equal(waiting + 2 * applied, absorbed)
            assert all(torch.equal(one["moved"][name], other["moved"][name]) for other in found)


def averages_of_a_step(step: int) -> dict[str, Tensor]:
    """Those of a step, given that all before it were exchanged in the same way."""
    ddp, engine = wrapped(2, sparsifier="top_k")
    for now in range(step + 1):
        ddp.zero_grad()
        ddp(here(now, integers)).backward()
        engine.count_as_applied()
    return {name: ddp.module.get_parameter(name).grad.clone() for name in NAMES}


def with_adamw(steps: int) -> list[dict[str, Tensor]]:
    ddp, engine = wrapped(2)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1)
    engine._show([optimizer])
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


def clipped(limit: float, algorithm: str) -> tuple[dict[str, Tensor], float]:
    ddp, engine = wrapped(2, density=1.0, memory="residual")
    engine.clip_gradients(limit, algorithm)
    ddp(here(0)).backward()
    return {name: ddp.module.get_parameter(name).grad.clone() for name in NAMES}, engine.skipped


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_mean_of_a_node_is_clipped_to_the_root_of_the_number_of_nodes(four_ranks: Ranks, algorithm: str) -> None:
    limit = 0.25
    means = [{name: node_mean(0, node, 2, name) for name in NAMES} for node in range(2)]
    for mean in means:
        if algorithm == "norm":
            whole = math.sqrt(sum(float(x.double().square().sum()) for x in mean.values()))
            shrink = min(1.0, limit * math.sqrt(2) / whole)
            mean |= {name: x * shrink for name, x in mean.items()}
        else:
            mean |= {name: x.clamp(-limit * math.sqrt(2), limit * math.sqrt(2)) for name, x in mean.items()}
    found = four_ranks(clipped, limit, algorithm)
    for grads, _ in found:
        for name in NAMES:
            expected = (means[0][name] + means[1][name]).view(SHAPES[name]) / 2
            torch.testing.assert_close(grads[name], expected, rtol=1e-6, atol=1e-7)
            assert torch.equal(grads[name], found[0][0][name])


# ---- Steps that do not count, and parameters that are not used


def skipping(bad: int) -> list[Any]:
    ddp, engine = wrapped(2)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    engine._show([optimizer])
    for step in range(3):
        optimizer.zero_grad()
        gradients = here(step)
        if step == 1 and dist.get_rank() == bad:
            gradients["few"][-1] = float("inf")
        before = weights(ddp)
        ddp(gradients).backward()
        if step == 1:
            nowhere_finite = all(bool(p.grad.isnan().all()) for p in ddp.parameters())
            skipped = engine.skipped
        optimizer.step()
        if step == 1:
            unchanged = all(torch.equal(before[name], now) for name, now in weights(ddp).items())
    counts = engine.step, engine.skipped_steps
    return [skipped, nowhere_finite, unchanged, counts, weights(ddp)]


def test_a_gradient_that_is_not_finite_in_one_part_skips_the_step_on_all_ranks(four_ranks: Ranks) -> None:
    found = four_ranks(skipping, 3)
    for skipped, nowhere_finite, unchanged, counts, now in found:
        assert skipped
        assert nowhere_finite
        assert unchanged
        assert counts == (2, 1)
        assert all(torch.equal(now[name], found[0][-1][name]) for name in NAMES)


def unused(options: dict[str, Any]) -> list[dict[str, Tensor | None]]:
    """Of "wide" in step 0 nobody has a gradient, in step 1 one rank alone."""
    ddp, engine = wrapped(2, find_unused_parameters=True, density=1.0, **options)
    found = []
    for step in range(3):
        ddp.zero_grad()
        wide = step == 2 or (step == 1 and dist.get_rank() == 3)
        ddp(here(step, integers, [name for name in NAMES if name != "wide" or wide])).backward()
        engine.count_as_applied()
        grads = [(name, ddp.module.get_parameter(name).grad) for name in NAMES]
        found.append({name: None if grad is None else grad.clone() for name, grad in grads})
    return found


@pytest.mark.parametrize("options", [{}, {"grouping": "layer"}])
def test_parameters_that_some_ranks_or_none_use(four_ranks: Ranks, options: dict[str, Any]) -> None:
    if "grouping" in options:
        options = {**options, "rules": ls.Rules(dense=["few"], dense_ndim=0, dense_numel=0)}
    for first, second, third in four_ranks(unused, options):
        assert first["wide"] is None
        assert torch.equal(second["wide"], integers(1, 3, "wide") / 4)
        assert torch.equal(third["wide"], sum(integers(2, rank, "wide") for rank in range(4)) / 4)
        assert torch.equal(first["long"], sum(integers(0, rank, "long") for rank in range(4)) / 4)


# ---- Flush, numbers, precision


def flushed(kind: str) -> dict[str, Any]:
    ddp, engine = wrapped(2, sparsifier="top_k")
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    engine._show([optimizer])
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
    return engine.memory_bytes, engine.totals.state_dict()["dense_bytes"], engine.groups[0].plan.numel


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
    ddp, engine = wrapped(2, Linear(dtype), **({"scaler": scaler} if scaled else {}))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    engine._show([optimizer])
    for step in range(3):
        optimizer.zero_grad()
        loss = ddp({name: x.to(dtype) for name, x in here(step, integers).items()})
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    residuals = [float(engine.residual(name).abs().max()) for name in NAMES]
    return [weights(ddp), residuals]


@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.float64, False), (torch.float32, True)])
def test_other_precisions(four_ranks: Ranks, dtype: torch.dtype, scaled: bool) -> None:
    found = four_ranks(narrow, dtype, scaled)
    start = weights(Linear(dtype))
    for now, residuals in found:
        assert all(torch.equal(now[name], found[0][0][name]) for name in NAMES)
        assert any(not torch.equal(now[name], start[name]) for name in NAMES)
        assert 0 < max(residuals) <= 3 * 8 * 9  # free of the scale


# ---- Which ranks are a node


def refused(size: Any, hosts: list[str] | None, options: dict[str, Any]) -> str:
    name = platform.node
    if hosts is not None:
        platform.node = lambda: hosts[dist.get_rank()]
    try:
        return error_of(functools.partial(wrapped, size, **options))
    finally:
        platform.node = name


@pytest.mark.parametrize(
    ("size", "hosts", "options", "told"),
    [
        (3, None, {}, "divide the number of ranks, 4, but got 3"),
        ("auto", ["a", "a", "a", "b"], {}, "3 on 'a', 1 on 'b'"),
        ("auto", ["a", "b", "a", "b"], {}, "one after another"),
        (2, None, {"grouping": "layer", "sparsifier": "top_k"}, "nothing"),
        (4, None, {"grouping": "layer"}, "has none of group 'few'. Choose a coarser grouping"),
        ("nodes", None, {}, "but got 'nodes'"),
        (2, None, {"fallback": True}, "Expected fallback to be False with node_size"),
    ],
)
def test_what_cannot_be_nodes_is_refused_on_all_ranks(
    four_ranks: Ranks, size: Any, hosts: list[str] | None, options: dict[str, Any], told: str
) -> None:
    for found in four_ranks(refused, size, hosts, options):
        assert told in found
        assert (told == "nothing") == (found == "nothing")


def on_one_node(size: Any, single: str) -> tuple[list[dict[str, Tensor]], bool, int]:
    ddp, engine = wrapped(size, single_device=single)
    found = []
    for step in range(3):
        ddp.zero_grad()
        ddp(here(step, integers)).backward()
        engine.count_as_applied()
        found.append({name: ddp.module.get_parameter(name).grad.clone() for name in NAMES})
    kept = engine.memory_bytes
    direct = engine._direct
    return found, direct, kept


@pytest.mark.parametrize("size", by_default(["auto", 8, 4], 2))
def test_one_node_trains_as_ddp(four_ranks: Ranks, size: Any) -> None:
    for found, direct, kept in four_ranks(on_one_node, size, "dense"):
        assert direct
        assert not kept
        for step, grads in enumerate(found):
            for name in NAMES:
                assert torch.equal(grads[name], sum(integers(step, rank, name) for rank in range(4)) / 4)


def test_one_node_rehearses_where_that_is_asked_for(four_ranks: Ranks) -> None:
    for found, direct, kept in four_ranks(on_one_node, 4, "sparse"):
        assert not direct
        assert kept
        assert 0 < sum(int(x.count_nonzero()) for x in found[0].values()) < 200


def flat(size: Any) -> list[dict[str, Tensor]]:
    hosts = [f"host{rank}" for rank in range(4)]
    name, platform.node = platform.node, lambda: hosts[dist.get_rank()]
    try:
        return on_one_node(size, "sparse")[0]
    finally:
        platform.node = name


@pytest.mark.in_backward
def test_nodes_of_one_rank_are_no_nodes(four_ranks: Ranks) -> None:
    plain, one, found = (four_ranks(flat, size)[0] for size in (None, 1, "auto"))
    for first, second, third in zip(plain, one, found, strict=True):
        assert all(torch.equal(first[n], second[n]) and torch.equal(first[n], third[n]) for n in NAMES)


# ---- Errors


def drifted() -> str:
    """Ranks with one part flush, and agree with each other."""
    ddp, engine = wrapped(2, sparsifier="top_k")
    ddp(here(0)).backward()
    engine.count_as_applied()
    if dist.get_rank() in (1, 3):
        engine._flush_next_step()
    ddp.zero_grad()
    return error_of(lambda: ddp(here(1)).backward())


def test_ranks_of_a_node_that_have_drifted_apart_all_raise(four_ranks: Ranks) -> None:
    for found in four_ranks(drifted):
        assert "drifted apart" in found
        assert "flush (no on rank 0, yes on rank 1)" in found


def one_fails() -> tuple[str, float, str]:
    ddp, engine = wrapped(2, observers=[Raises(1, 1, OSError("as asked for"))], timeout=timedelta(seconds=60))
    ddp(here(0)).backward()
    engine.count_as_applied()
    begin = time.monotonic()
    try:
        ddp(here(1)).backward()
    except Exception as error:
        engine.close()
        return f"{type(error).__name__}: {error}", time.monotonic() - begin, " ".join(error.__notes__)
    return "", 0.0, ""


def test_an_error_on_one_rank_ends_the_step_on_all_of_all_nodes() -> None:
    with Ranks(4) as ranks:
        found = ranks(one_fails)
    assert found[1][0] == "OSError: as asked for"
    for rank, (told, seconds, note) in enumerate(found):
        assert told.startswith(f"LostRankError: Rank {rank} lost another rank" if rank != 1 else "OSError")
        assert note.endswith(f"rank {rank}")
        assert seconds < 20


# ---- States


def saved(folder: Path, size: int, steps: int) -> list[dict[str, Tensor]]:
    """Train, save all residuals, and train on."""
    ddp, engine = wrapped(size)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    engine._show([optimizer])
    take(ddp, optimizer, range(steps))
    files = SideFiles()
    with files.beside(folder / "last.ckpt", engine, save, TorchCollective()) as marker:
        if dist.get_rank() == 0:
            torch.save({"marker": marker, "weights": weights(ddp)}, folder / "last.ckpt")
    dist.barrier()
    kept = {name: engine.residual(name).clone() for name in NAMES}
    take(ddp, optimizer, range(steps, 2 * steps))
    return [kept, weights(ddp)]


def save(state: Any, path: str) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    torch.save(state, path)


def take(ddp: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(here(step)).backward()
        optimizer.step()


def loaded(folder: Path, size: int | None, steps: int) -> list[dict[str, Tensor]]:
    content = torch.load(folder / "last.ckpt", weights_only=False)
    module = Linear()
    module.load_state_dict(content["weights"])
    ddp, engine = wrapped(size, module)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    engine._show([optimizer])
    restore(engine, folder / "last.ckpt", content["marker"], load, strict=True)
    kept = {name: engine.residual(name).clone() for name in NAMES}
    take(ddp, optimizer, range(steps, 2 * steps))
    return [kept, weights(ddp)]


def load(path: str) -> Any:
    return torch.load(path, weights_only=True)


def whole(parts: list[Any], size: int) -> list[dict[str, Tensor]]:
    """Residuals of each node."""
    return [
        {name: torch.cat([rank[0][name] for rank in parts[first : first + size]]) for name in NAMES}
        for first in range(0, len(parts), size)
    ]


def test_as_many_nodes_of_the_same_size_go_on_bit_for_bit(four_ranks: Ranks, tmp_path: Path) -> None:
    before = four_ranks(saved, tmp_path, 2, 3)
    after = four_ranks(loaded, tmp_path, 2, 3)
    for (kept, end), (found, then) in zip(before, after, strict=True):
        assert all(torch.equal(kept[name], found[name]) for name in NAMES)
        assert all(torch.equal(end[name], then[name]) for name in NAMES)


@pytest.mark.parametrize(("old", "new"), by_default([(2, 4), (4, 2), (2, None), (1, 2)], 2))
def test_another_number_of_nodes_gets_the_mean_of_what_all_remembered(
    four_ranks: Ranks, tmp_path: Path, old: int, new: int | None
) -> None:
    before = whole(four_ranks(saved, tmp_path, old, 3), old)
    after = whole(four_ranks(loaded, tmp_path, new, 3), new or 1)
    for name in NAMES:
        mean = torch.stack([one[name] for one in before]).double().mean(0).float()
        assert mean.any()
        assert all(torch.equal(node[name], mean) for node in after)


def test_as_many_nodes_of_another_size_keep_what_each_remembered(tmp_path: Path, four_ranks: Ranks) -> None:
    with Ranks(2) as two:
        before = whole(two(saved, tmp_path, 1, 3), 1)
        after = whole(four_ranks(loaded, tmp_path, 2, 3), 2)
        back = tmp_path / "back"
        back.mkdir()
        again = whole(four_ranks(saved, back, 2, 3), 2)
        flat = whole(two(loaded, back, None, 3), 1)
    for old, new in ((before, after), (again, flat)):
        for one, other in zip(old, new, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in NAMES)
            assert any(x.any() for x in one.values())


def merged(steps: int) -> list[Any]:
    """The state of all ranks, in plain PyTorch, taken before an optimizer's step."""
    ddp, engine = wrapped(2, sparsifier="top_k")
    for step in range(steps):
        ddp.zero_grad()
        ddp(here(step, integers)).backward()
        if step < steps - 1:
            engine.count_as_applied()
    state = engine.state_dict()
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, state)
    residuals = {name: engine.residual(name).clone() for name in NAMES}
    grads = {name: ddp.module.get_parameter(name).grad.clone() for name in NAMES}
    return [residuals, states, grads]


def test_states_of_parts_are_merged_with_averages_that_nobody_has_applied(four_ranks: Ranks) -> None:
    found = four_ranks(merged, 3)
    state = ls.merge_states(reversed(found[0][1]))
    nodes = whole(found, 2)
    for name in NAMES:
        mean = torch.stack([node[name] for node in nodes]).mean(0)
        assert torch.equal(state["parameters"][name]["residual"], mean)
        waiting = state["pending"][name]
        dense = torch.zeros(len(mean)).index_add_(0, waiting["indices"].long(), waiting["values"])
        assert torch.equal(dense, found[0][2][name].flatten())
    with pytest.raises(ValueError, match="some parts of rank 1 are missing"):
        ls.merge_states(found[0][1][:3])


# ---- Other groups


def regrouped() -> list[Any]:
    """The law with other groups after a step: what is remembered belongs to parameters."""
    ddp, engine = wrapped(2, sparsifier="top_k")
    sizes = sizes_of(engine.parameters)
    sent: dict[str, Tensor] = {name: torch.zeros(SHAPES[name]) for name in NAMES}
    for step in range(3):
        ddp.zero_grad()
        ddp(here(step, integers)).backward()
        engine.count_as_applied()
        sent = {name: sent[name] + ddp.module.get_parameter(name).grad for name in NAMES}
        if step == 0:
            rules = ls.Rules(dense=["few"], dense_ndim=0, dense_numel=0)
            engine.regroup(make_plan(sizes, "layer", rules)[::-1])
    residuals = {name: engine.residual(name).clone() for name in NAMES}
    return [residuals, sent]


def test_groups_change_and_nothing_is_lost(four_ranks: Ranks) -> None:
    found = four_ranks(regrouped)
    nodes = whole(found, 2)
    for name in NAMES:
        absorbed = sum(node_mean(step, node, 2, name, integers) for step in range(3) for node in range(2))
        assert torch.equal(nodes[0][name] + nodes[1][name] + 2 * found[0][1][name].flatten(), absorbed)


# ---- The watchdog


def diverged(rank: int) -> list[str]:
    ddp, engine = wrapped(2, watch=ls.Watch(every=1))
    with torch.no_grad():
        ddp.module.get_parameter("wide")[0, 0] += 2.0 * (dist.get_rank() == rank)
    with warnings.catch_warnings(action="ignore"):
        for step in range(3):
            ddp.zero_grad()
            ddp(here(step)).backward()
            engine.count_as_applied()
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
    torch.optim.SGD(ddp.parameters(), lr=0.0).step()
    return {name: ddp.module.get_parameter(name).grad.clone() for name in NAMES}


@pytest.mark.in_backward
def test_parts_have_as_many_dimensions_as_their_parameters(four_ranks: Ranks) -> None:
    for nodes, flat in zip(four_ranks(decayed, 2), four_ranks(decayed, None), strict=True):
        assert all(torch.equal(nodes[name], flat[name]) for name in NAMES)


def parked(whole: bool) -> bool:
    """Whether the residual of a parameter is there again when it thaws; maybe from a state of whole parameters."""
    ddp, engine = wrapped(2, sparsifier="top_k")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    for step in range(3):
        optimizer.zero_grad()
        ddp(here(step)).backward()
        optimizer.step()
    before, state, parameters = engine.residual("long").clone(), engine.state_dict(), dict(engine.parameters)
    engine.close()
    if whole:
        states: list[Any] = [None] * 4
        dist.all_gather_object(states, state)
        state = ls.merge_states(states)
        node = dist.get_rank() % 2
        first, length, _ = states[node]["spans"]["long"]
        before = state["parameters"]["long"]["residual"][first : first + length].clone()
    for trains in (False, True):
        ddp.module.long.requires_grad_(trains)
        ddp, engine = wrapped(2, ddp.module, sparsifier="top_k")
        assert engine._take_over(state, parameters) == []
        state, parameters = engine.state_dict(), {**engine.parameters, **engine.frozen}
        after = engine.residual("long").clone() if trains else None
        engine.close()
    return torch.equal(before, after)


def test_residuals_of_parts_wait_for_frozen_parameters(four_ranks: Ranks) -> None:
    assert four_ranks(parked, False) == four_ranks(parked, True) == [True] * 4


def regrouped_by(size: int, alike: bool) -> str:
    """The error of groups of single parameters, on all ranks or on every other one."""
    ddp, engine = wrapped(size)
    sizes = [ParameterSize.of(name, p) for name, p in engine.parameters.items()]
    single = alike or dist.get_rank() % 2
    groups = [Group(p.name, (p,), dense=False) for p in sizes] if single else [Group("all", tuple(sizes), dense=False)]

    def follow() -> None:
        engine.regroup(groups)
        ddp(here(0)).backward()

    return error_of(follow)


def test_plans_that_nodes_cannot_follow_are_refused_on_all_ranks(four_ranks: Ranks) -> None:
    assert four_ranks(regrouped_by, 2, True) == ["nothing"] * 4
    assert all("The ranks disagree" in told for told in four_ranks(regrouped_by, 2, False))
    assert all("none of group 'few'" in told for told in four_ranks(regrouped_by, 4, True))
