"""Sparse HSDP: replicas that FSDP2 shards exchange the parts of their gradients."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lightning_sparse as ls
from lightning_sparse.integrations.callback import LocalGradients, trained_parameters
from tests.covering import by_default
from tests.engine.drift.models import Lion
from tests.engines import Raises
from tests.hsdp.model import (
    SHAPES,
    SPARSE,
    Given,
    Net,
    backward,
    batches,
    engine_of,
    given,
    grid,
    made,
    part,
    sharded,
    summing,
    weights,
    whole,
)
from tests.ranks import Ranks, error_of
from tests.trainers import EVERYTHING_SPARSE

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def train(replicas: int, ranks: int, kind: str, each: int, limit: float, native: bool) -> list[Any]:
    """Weights after each of some steps at density 1, by this library or by FSDP itself."""
    mesh = grid(replicas, ranks)
    model = sharded(made(), mesh if native else mesh["shard"])
    engine = None if native else engine_of(model, mesh, density=1.0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    found: list[Any] = []
    clip = torch.nn.utils.clip_grad_norm_ if engine is None else engine.clip_grad_norm_
    for step in batches(3, each):
        backward(model, step)
        if limit:
            found.append({"norm": whole(clip(model.parameters(), limit))})
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(model))
    return found


SOME = [((2, 2), "momentum", 2, 0.05), ((2, 2), "adamw", 1, 0.0)]
CELLS = product([(2, 2), (1, 4)], OPTIMIZERS, [1, 2], [0.0, 0.05])


@pytest.mark.parametrize(
    ("shape", "kind", "each", "limit"), by_default([*SOME, *(cell for cell in CELLS if cell not in SOME)], 2)
)
def test_density_1_is_native_hsdp_bit_for_bit(
    four_ranks: Ranks, shape: tuple[int, int], kind: str, each: int, limit: float
) -> None:
    ours, native = (four_ranks(train, *shape, kind, each, limit, one) for one in (False, True))
    for mine, theirs in zip(ours, native, strict=True):
        for now, then in zip(mine, theirs, strict=True):
            assert all(torch.equal(now[name], then[name]) for name in then)


# ---- Sparse: the law, part by part


def law(replicas: int, ranks: int, steps: int, skipped: int) -> list[dict[str, Any]]:
    """What is missing of this rank's parts before and after each optimizer step; gradients are integers."""
    mesh = grid(replicas, ranks)
    me, (replica, _) = dist.get_rank(), mesh.get_coordinate()
    model = fully_shard(Given(SHAPES), mesh=mesh["shard"])
    engine = engine_of(model, mesh, sparsifier="top_k", rules=ls.Rules(dense_ndim=0, dense_numel=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    absorbed = {name: torch.zeros_like(part(p)) for name, p in model.named_parameters()}
    looks = []
    for step in range(steps):
        optimizer.zero_grad()
        gradients = given(step, me)
        if step == skipped and me == 1:
            gradients["first"][-1, -1] = torch.nan
        without = {"second"} if step == 5 else set()  # nobody uses it, and one replica leaves out another one
        left_out = without | {"third"} if step == 5 and replica == 1 else without
        model({name: x for name, x in gradients.items() if name not in left_out}).backward()
        lost = [_lost(engine, model, absorbed, mesh)]  # nothing is absorbed before the step
        mine = [given(step, one) for one in range(replica * ranks, (replica + 1) * ranks)]
        for name, p in model.named_parameters():
            short = name.partition(".")[0]
            assert (p.grad is None) == (short in left_out)
            if step != skipped and short not in left_out:
                mean = torch.stack([one[short] for one in mine]).mean(0)
                absorbed[name] += distribute_tensor(mean, p.device_mesh, p.placements).to_local()
        before = engine.step
        optimizer.step()
        for name, p in model.named_parameters():
            assert (p.grad is None) == (name.partition(".")[0] in without)
        lost.append(_lost(engine, model, absorbed, mesh))
        looks.append({"skipped": engine.step == before, "weights": weights(model), "lost": lost})
    return looks


def _lost(engine: ls.Engine, model: torch.nn.Module, absorbed: dict[str, Tensor], mesh: Any) -> float:
    """The largest part of what this column of ranks has absorbed that is neither kept nor applied."""
    state = engine.state_dict()
    assert not state["pending"]
    worst = 0.0
    for name, p in model.named_parameters():
        there = absorbed[name].flatten() - state["parameters"][name]["residual"]
        dist.all_reduce(there, group=mesh.get_group(0))
        worst = max([worst, *(there + mesh.size(0) * part(p).flatten()).abs().tolist()])
    return worst


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((4, 1), marks=pytest.mark.thorough)])
def test_no_part_loses_anything_and_a_nan_in_one_part_skips_all(four_ranks: Ranks, shape: tuple[int, int]) -> None:
    of_ranks = four_ranks(law, *shape, 7, 3)
    for step, looks in enumerate(zip(*of_ranks, strict=True)):
        assert [look["skipped"] for look in looks] == [step == 3] * 4
        assert all(look["lost"] == [0.0, 0.0] for look in looks)
        for look in looks[1:]:
            assert all(torch.equal(look["weights"][name], w) for name, w in looks[0]["weights"].items())
    moved = [sum(float(w.abs().sum()) for w in look["weights"].values()) for look in of_ranks[0]]
    assert moved[2] == moved[3] and moved[4] > moved[3] > 0


# ---- Sparse: many steps


def many(kind: str, density: float, steps: int) -> dict[str, Any]:
    mesh = grid(2, 2)
    model = sharded(made(), mesh["shard"])
    engine = engine_of(model, mesh, density=density)
    optimizer = OPTIMIZERS[kind](model.parameters())
    equal, losses = True, []
    for [(x, y)] in batches(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        if kind != "sgd":
            engine.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        for w in weights(model).values() if len(losses) % 4 == 0 else ():
            others = [torch.empty_like(w) for _ in range(4)]
            dist.all_gather(others, w)
            equal &= all(torch.equal(w, other) for other in others)
    found = {
        "equal": equal,
        "losses": losses,
        "states": {name: sorted(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state},
        "memory": engine.memory_bytes,
        "numel": sum(part(p).numel() for p in model.parameters() if p.numel() >= 256),
        "sent": engine.stepper.totals.state_dict()["sent_bytes"],
        "dense": engine.stepper.totals.state_dict()["dense_bytes"],
    }
    engine.close()
    optimizer.step()  # from now on by itself, with the gradients that are still there
    found["after"] = {name: sorted(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}
    return found


@pytest.mark.parametrize(
    ("kind", "density", "steps"), by_default([("sgd", 0.05, 20), *product(OPTIMIZERS, [0.05, 0.01], [32])])
)
def test_ranks_stay_equal_and_learn(four_ranks: Ranks, kind: str, density: float, steps: int) -> None:
    of_ranks = four_ranks(many, kind, density, steps)
    for found in of_ranks:
        assert found["equal"]
        if kind == "sgd":  # others are clipped: the sketch is larger than this model
            assert found["sent"] < 0.35 * found["dense"]
        vectors = 3 if kind == "adamw" else 1  # residual, second moment, and room for a score
        assert found["memory"] <= 4 * vectors * found["numel"] + 800
        assert found["states"].keys() == of_ranks[0]["states"].keys()
        if kind == "adamw":
            assert found["states"]["second.weight"] == ["step"]
            assert found["states"]["second.bias"] == ["exp_avg", "exp_avg_sq", "step"]
            assert len(found["states"]) == len(found["after"]) == 5
            assert found["after"]["second.weight"] == found["states"]["second.bias"]
        assert found["states"] == of_ranks[0]["states"]
    mean = [sum(of_rank["losses"][step] for of_rank in of_ranks) for step in range(steps)]
    fourth = steps // 4
    assert sum(mean[-fourth:]) < 0.95 * sum(mean[:fourth])


# ---- One step at a time


def exact(integers: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Averages of four replicas of one rank, their means, and the sums of magnitudes."""
    mesh = grid(4, 1)
    model = fully_shard(Given(SHAPES), mesh=mesh["shard"])
    engine_of(model, mesh, density=1.0)
    scale = 1.0 if integers else math.pi
    model({name: x * scale for name, x in given(0, dist.get_rank()).items()}).backward()
    of_ranks = [[x * scale for x in given(0, rank).values()] for rank in range(4)]
    found = [part(p.grad).clone() for p in model.parameters()]
    columns = [torch.stack(each).double() for each in zip(*of_ranks, strict=True)]
    return found, [each.mean(0) for each in columns], [each.abs().sum(0) for each in columns]


@pytest.mark.parametrize("integers", [True, False])
def test_four_replicas_of_one_rank_average_exactly_or_within_rounding(four_ranks: Ranks, integers: bool) -> None:
    for found, means, magnitudes in four_ranks(exact, integers):
        for average, mean, magnitude in zip(found, means, magnitudes, strict=True):
            bound = 0.0 if integers else 3 * torch.finfo(torch.float32).eps * magnitude
            assert ((average.double() - mean).abs() <= bound).all()


def clipped(density: float, limit: float) -> tuple[float, dict[str, Tensor]]:
    """The norm that clipping returns, and this replica's gradients behind it, before the step."""
    mesh = grid(2, 2)
    model = fully_shard(Given(SHAPES), mesh=mesh["shard"])
    engine = engine_of(model, mesh, density=density)
    model(given(0, dist.get_rank())).backward()
    norm = engine.clip_grad_norm_(model.parameters(), limit)
    return float(whole(norm)), {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("density", "off"), [(1.0, 1e-6), (0.05, 0.08)])
def test_the_norm_of_the_mean_over_replicas_is_clipped(four_ranks: Ranks, density: float, off: float) -> None:
    of_replicas = [{n: (given(0, i)[n] + given(0, i + 1)[n]) / 2 for n in SHAPES} for i in (0, 2)]
    mean = {name: (of_replicas[0][name] + of_replicas[1][name]) / 2 for name in SHAPES}
    expected = math.sqrt(sum(float(x.square().sum()) for x in mean.values()))
    of_ranks = four_ranks(clipped, density, expected / 4)
    for rank, (norm, grads) in enumerate(of_ranks):
        assert norm == of_ranks[0][0] == pytest.approx(expected, rel=off)
        for name in SHAPES:
            here = mean[name] if density == 1.0 else of_replicas[rank // 2][name]
            torch.testing.assert_close(grads[f"{name}.weight"], here * (expected / 4 / norm), rtol=1e-5, atol=1e-5)


def sync_and_flush() -> dict[str, Any]:
    """Averages after micro-batches of which FSDP reduces only the last, and weights after a flush."""
    mesh = grid(2, 2)
    model, engine, optimizer = summing(mesh)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        model(given(step, dist.get_rank())).backward()
    exchanges = [engine.step]
    optimizer.step()
    norm = ls.flush(engine, [optimizer])
    exchanges.append(engine.step)
    found = {"weights": weights(model), "norm": norm, "exchanges": exchanges}
    engine.close()
    found["closed"] = error_of(lambda: model(given(3, dist.get_rank())).backward())
    engine_of(model, mesh)
    return found


def test_accumulation_by_fsdp_a_flush_and_a_closed_engine(four_ranks: Ranks) -> None:
    expected = {name: -sum(given(step, rank)[name] for step in (0, 1) for rank in range(4)) / 4 for name in SHAPES}
    of_ranks = four_ranks(sync_and_flush)
    for found in of_ranks:
        assert found["exchanges"] == [0, 1]
        assert "closed" in found["closed"]
        assert found["norm"] == of_ranks[0]["norm"] > 0
        for name in SHAPES:
            assert torch.equal(found["weights"][f"{name}.weight"], expected[name])


def replicas_at_the_start() -> tuple[dict[str, Tensor], str]:
    """Weights of a model that replicas have made with other seeds; then the error where one changes its weights."""
    mesh = grid(2, 2)
    model = sharded(made(seed=mesh.get_coordinate()[0]), mesh["shard"])
    engine_of(model, mesh)
    found = weights(model)
    if mesh.get_coordinate()[0] == 1:
        part(model.first.weight).add_(1.0)
    model(torch.ones(1, 13)).sum().backward()
    return found, error_of(torch.optim.SGD(model.parameters(), lr=0.1).step)


def test_replicas_begin_as_the_first_one_and_have_to_stay_so(four_ranks: Ranks) -> None:
    expected = {name: p.detach() for name, p in made(seed=0).named_parameters()}
    for found, told in four_ranks(replicas_at_the_start):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert "first.weight" in told


# ---- Refusals


def ways_to_be_refused() -> Iterator[tuple[str, Callable[[], Any]]]:
    mesh = grid(2, 2)
    shard = mesh["shard"]

    def built(**keywords: Any) -> torch.nn.Module:
        return fully_shard(Net(), **{"mesh": shard, **keywords})

    def with_parts_of_tensors() -> torch.nn.Module:
        model = parallelize_module(Net(), shard, {"first": ColwiseParallel()})
        return fully_shard(model, mesh=mesh["replicate"])

    ignored = Net()
    yield "FSDP2", lambda: ls.attach_hsdp(Net(), mesh)
    yield "DeviceMesh", lambda: ls.attach_hsdp(built(), dist.group.WORLD)
    yield "mesh=mesh['shard']", lambda: ls.attach_hsdp(built(mesh=mesh), mesh)
    yield (
        "last.weight",
        lambda: ls.attach_hsdp(fully_shard(ignored, mesh=shard, ignored_params={ignored.last.weight}), mesh),
    )
    yield "tensor parallelism", lambda: ls.attach_hsdp(with_parts_of_tensors(), mesh)
    yield "CPUOffloadPolicy", lambda: ls.attach_hsdp(built(offload_policy=CPUOffloadPolicy(pin_memory=False)), mesh)
    yield "of this replica", lambda: ls.attach_hsdp(built(mesh=mesh["replicate"]), mesh)
    yield "fallback", lambda: ls.attach_hsdp(built(), mesh, fallback=True)
    yield "memory to be one of gradients", lambda: ls.attach_hsdp(built(), mesh, memory=ls.memories.Drift(gain=False))
    yield "density", lambda: ls.attach_hsdp(built(), mesh, densty=0.1)
    few = grid(1, 4)
    yield (
        "rank 3 has none of group 'last'",
        lambda: ls.attach_hsdp(
            fully_shard(Net(), mesh=few["shard"]),
            few,
            grouping="layer",
            rules=EVERYTHING_SPARSE,
            single_device="sparse",
        ),
    )
    yield "disagree", lambda: ls.attach_hsdp(built(), mesh, density=0.1 * (1 + dist.get_rank()))
    version = mock.patch("lightning_sparse.api.attach.__version__", "0.0.7" if dist.get_rank() == 1 else "0.0.6")
    yield "version of lightning-sparse ('0.0.6' on rank 0", lambda: version(ls.attach_hsdp)(built(), mesh)


def refuse() -> list[tuple[str, str]]:
    return [(words, error_of(attach)) for words, attach in ways_to_be_refused()]


def test_what_cannot_work_is_refused_on_all_ranks_by_name(four_ranks: Ranks) -> None:
    for told in four_ranks(refuse):
        assert len(told) == 13
        for words, sentence in told:
            assert words in sentence, (words, sentence)


# ---- Other ways to run a model


class Checkpointed(Net):
    """Computes a layer again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        middle = lambda z: torch.tanh(self.second(torch.tanh(z)))  # noqa: E731
        return self.last(checkpoint(middle, self.first(x), use_reentrant=self.reentrant))


def other_ways(kind: str) -> tuple[list[dict[str, Tensor]], int, str]:
    """Weights after two steps by FSDP itself and by this library at density 1, its exchanges, and an error."""
    mesh, found, told = grid(2, 2), [], ""
    for native in (True, False):
        model = made(lambda: Checkpointed(kind == "reentrant") if "reentrant" in kind else Net())
        over = mesh if native else mesh["shard"]
        if kind == "several roots":
            for layer in model.children():
                fully_shard(layer, mesh=over)
        else:
            sharded(model, over, reshard_after_forward=kind != "not resharded")
        engine = None if native else engine_of(model, mesh, density=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for [(x, y)] in batches(2):
                mse_loss(model(x.requires_grad_()), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            told = str(error)
        found.append(weights(model))
        steps = 0 if native else engine.step
    return found, steps, told


@pytest.mark.parametrize("kind", ["several roots", "not resharded", "not reentrant"])
def test_one_exchange_comes_at_the_end_of_a_backward(four_ranks: Ranks, kind: str) -> None:
    for (native, ours), steps, told in four_ranks(other_ways, kind):
        assert steps == 2 and not told
        assert all(torch.equal(native[name], ours[name]) for name in native)


def test_a_backward_within_a_backward_is_refused(four_ranks: Ranks) -> None:
    for _, steps, told in four_ranks(other_ways, "reentrant"):
        assert steps == 0
        assert "use_reentrant=False" in told


# ---- An error on one rank


def one_fails() -> tuple[str, float]:
    mesh = grid(2, 2)
    model = sharded(made(), mesh["shard"])
    engine_of(model, mesh, observers=[Raises(3, 1, ValueError("the last rank has had enough"))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for [(x, y)] in batches(3):
            mse_loss(model(x), y).backward()
            optimizer.step()

    begin = time.monotonic()
    return error_of(steps), time.monotonic() - begin


def test_an_error_on_one_rank_ends_the_step_on_all_parts_of_all_replicas(four_ranks: Ranks) -> None:
    *others, last = four_ranks(one_fails)
    assert last[0] == "ValueError: the last rank has had enough"
    assert all(told.startswith("LostRankError") for told, _ in others)
    assert max(seconds for _, seconds in (*others, last)) < 60  # far from the process group's half an hour


# ---- Memories and callbacks that look at parameters


def decayed(native: bool) -> dict[str, Tensor]:
    """Averages at density 1, with a decay that the memory or the optimizer's own formula adds."""
    mesh = grid(2, 2)
    model = sharded(made(), mesh["shard"])
    start = weights(model)
    engine = engine_of(
        model, mesh, density=1.0, **({} if native else {"memory": ls.memories.WeightDecay(0.5, min_ndim=2)})
    )
    gradients = LocalGradients(trained_parameters(model))
    gradients.start()
    backward(model, next(iter(batches(1))))
    assert engine.exchange(model.parameters())
    copied = gradients.take()
    assert {name: x.shape for name, x in copied.items()} == {
        n: part(p).flatten().shape for n, p in model.named_parameters()
    }
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    return {name: x + 0.5 * start[name] * (native and x.dim() > 1) for name, x in found.items()}


def test_memories_and_callbacks_see_this_ranks_part_of_parameters(four_ranks: Ranks) -> None:
    for ours, formula in zip(four_ranks(decayed, False), four_ranks(decayed, True), strict=True):
        assert all(torch.allclose(ours[name], formula[name], rtol=1e-5, atol=1e-7) for name in ours)


def copied_state() -> dict[str, Any]:
    """That of an engine of plain DDP whose weights drift."""
    ddp = DistributedDataParallel(made())
    engine = ls.attach(ddp, rules=EVERYTHING_SPARSE, **SPARSE)
    optimizer = Lion(ddp.parameters(), lr=0.01)
    mse_loss(ddp(torch.ones(4, 13)), torch.ones(4, 3)).backward()
    optimizer.step()
    return engine.state_dict()


def by_signs(ranks: int, resumes: bool) -> tuple[set[str], Tensor, list[str]]:
    """Memories of groups, the weights, and sentences of warnings, with optimizers whose copies would drift."""
    state = copied_state() if resumes else None
    mesh = grid(dist.get_world_size() // ranks, ranks)
    model = sharded(made(), mesh["shard"])
    with warnings.catch_warnings(record=True, action="always") as caught:
        engine = engine_of(model, mesh, rules=EVERYTHING_SPARSE, watch=ls.Watch())
        if state is not None:
            engine.load_state_dict(state)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
        for step in batches(4):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    memories = {type(group.memory).__name__ for group in engine.stepper.groups}
    found = torch.cat([w.flatten() for w in weights(model).values()])
    return memories, found, [str(one.message) for one in caught if "RMSprop" in str(one.message)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sharded_copies_of_weights_are_not_trained(two_ranks: Ranks, four_ranks: Ranks, ranks: int) -> None:
    found = (two_ranks if ranks == 1 else four_ranks)(by_signs, ranks, False)
    for number, (memories, every, told) in enumerate(found):
        assert memories == {"Residual"} and torch.equal(every, found[0][1]) and len(told) == (number == 0)


def test_a_state_of_copies_is_no_reason_to_train_copies(two_ranks: Ranks) -> None:
    for memories, _, _ in two_ranks(by_signs, 1, True):
        assert memories == {"Residual"}


def parked(folder: str) -> tuple[float, float]:
    """The norm of a residual before its layer is frozen, saved, thawed and loaded, and after that."""
    mesh = grid(2, 2)
    model, engine, optimizer = summing(mesh)
    for step in range(3):
        optimizer.zero_grad()
        model(given(step, dist.get_rank())).backward()
        optimizer.step()
    before, state = engine.residual("first.weight").clone(), engine.state_dict()
    engine.close()
    sparse = {"sparsifier": "top_k", "rules": ls.Rules(dense_ndim=0, dense_numel=0)}
    model.get_submodule("first").weight.requires_grad_(False)
    engine = engine_of(model, mesh, **sparse)
    engine.load_state_dict(state)
    ls.save_sharded(engine, folder)
    engine.close()
    model.get_submodule("first").weight.requires_grad_(True)
    engine = engine_of(model, mesh, **sparse)
    ls.load_sharded(engine, folder)
    after = engine.residual("first.weight").clone()
    return float(before.norm()), float((after - before).norm())


def test_residuals_of_frozen_layers_are_saved(four_ranks: Ranks, tmp_path: Path) -> None:
    for before, lost in four_ranks(parked, str(tmp_path / "sparse")):
        assert before > 0 and lost == 0
