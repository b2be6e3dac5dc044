"""Sparse HSDP: replicas that FSDP2 shards exchange the parts of their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import mse_loss

import lightning_sparse as ls
from tests.hsdp import SHAPES, Given, batches, engine_of, given, grid, made, part, sharded, weights
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def train(replicas: int, ranks: int, kind: str, each: int, native: bool, integers: bool = False) -> list[Any]:
    """Weights after each of some steps at density 1, by this library or by FSDP itself."""
    mesh = grid(replicas, ranks)
    model = sharded(made(), mesh if native else mesh["shard"])
    engine = None if native else engine_of(model, mesh, density=1.0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if engine is not None:
        engine.bind([optimizer])
    found = []
    for step in batches(5, each):
        for number, (x, y) in enumerate(step):
            last = number == len(step) - 1
            if native:
                model.set_requires_all_reduce(last)
                mse_loss(model(x), y).backward()
            elif last:
                mse_loss(model(x), y).backward()
            else:
                with engine.no_sync():
                    mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(model))
    if engine is not None:
        engine.close()
    return found


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_density_1_is_native_hsdp_bit_for_bit(four_ranks: Ranks, shape: tuple[int, int], kind: str, each: int) -> None:
    ours, native = (four_ranks(train, *shape, kind, each, one) for one in (False, True))
    for mine, theirs in zip(ours, native, strict=True):
        for now, then in zip(mine, theirs, strict=True):
            assert all(torch.equal(now[name], then[name]) for name in then)


# ---- Sparse: the law, part by part


def law(replicas: int, ranks: int, steps: int, skipped: int) -> list[dict[str, Any]]:
    """What is missing of this rank's parts before and after each optimizer step; gradients are integers."""
    mesh = grid(replicas, ranks)
    me, (replica, _) = dist.get_rank(), mesh.get_coordinate()
    model = fully_shard(Given(SHAPES), mesh=mesh["shard"])
    engine = engine_of(model, mesh, sparsifier="topk", rules=ls.Rules(dense_ndim=0, dense_numel=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine.bind([optimizer])
    absorbed = {name: torch.zeros_like(part(p)) for name, p in model.named_parameters()}
    looks = []
    for step in range(steps):
        optimizer.zero_grad()
        gradients = given(step, me)
        if step == skipped and me == 1:
            gradients["first"][-1, -1] = torch.nan
        model(gradients).backward()
        mine = [given(step, one) for one in range(replica * ranks, (replica + 1) * ranks)]
        if step == skipped and replica == 0:
            for one in mine:
                one["first"][-1, -1] = 0.0
        for name, p in model.named_parameters():
            mean = torch.stack([one[name.partition(".")[0]] for one in mine]).mean(0)
            absorbed[name] += distribute_tensor(mean, p.device_mesh, p.placements).to_local()
        lost = [_lost(engine, model, absorbed, mesh)]
        void = engine.void
        engine.skip_void(optimizer)
        optimizer.step()
        lost.append(_lost(engine, model, absorbed, mesh))
        looks.append({"void": void, "weights": weights(model), "lost": lost})
    engine.close()
    return looks


def _lost(engine: ls.Engine, model: torch.nn.Module, absorbed: dict[str, Tensor], mesh: Any) -> float:
    """The largest part of what this column of ranks has absorbed that is neither kept, nor waits, nor is applied."""
    state = engine.state_dict()
    worst = 0.0
    for name, p in model.named_parameters():
        there = absorbed[name].flatten() - state["parameters"][name]["residual"]
        waiting = torch.zeros_like(there)
        if name in state["pending"]:
            found = state["pending"][name]
            waiting[found["indices"].long()] = found["values"]
        there -= mesh.size(0) * waiting
        dist.all_reduce(there, group=mesh.get_group(0))
        worst = max([worst, *(there + mesh.size(0) * part(p).flatten()).abs().tolist()])
    return worst


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((4, 1), marks=pytest.mark.thorough)])
def test_no_part_loses_anything_and_a_nan_in_one_part_skips_all(four_ranks: Ranks, shape: tuple[int, int]) -> None:
    of_ranks = four_ranks(law, *shape, 8, 3)
    for step, looks in enumerate(zip(*of_ranks, strict=True)):
        assert [look["void"] for look in looks] == [step == 3] * 4
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
    engine.bind([optimizer])
    if kind != "sgd":
        engine.clip_gradients(1.0)
    equal, losses = True, []
    for [(x, y)] in batches(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        engine.skip_void(optimizer)
        optimizer.step()
        losses.append(float(loss.detach()))
        for w in weights(model).values():
            others = [torch.empty_like(w) for _ in range(4)]
            dist.all_gather(others, w)
            equal &= all(torch.equal(w, other) for other in others)
    found = {
        "equal": equal,
        "losses": losses,
        "states": {name: sorted(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state},
        "memory": engine.memory_bytes,
        "numel": sum(part(p).numel() for p in model.parameters() if p.numel() >= 256),
        "sent": engine.totals.state_dict()["sent_bytes"],
        "dense": engine.totals.state_dict()["dense_bytes"],
    }
    engine.close()
    return found


@pytest.mark.parametrize(
    ("kind", "density"),
    [
        ("sgd", 0.05),
        ("momentum", 0.01),
        ("adamw", 0.05),
        *(
            pytest.param(k, d, marks=pytest.mark.thorough)
            for k, d in [("sgd", 0.01), ("momentum", 0.05), ("adamw", 0.01)]
        ),
    ],
)
def test_ranks_stay_equal_and_learn(four_ranks: Ranks, kind: str, density: float) -> None:
    of_ranks = four_ranks(many, kind, density, 50)
    for found in of_ranks:
        assert found["equal"]
        assert found["sent"] < 0.35 * found["dense"]
        vectors = 3 if kind == "adamw" else 1  # residual, second moment, and room for a score
        assert found["memory"] <= 4 * vectors * found["numel"] + 400
        assert found["states"].keys() == of_ranks[0]["states"].keys()
        if kind == "adamw":
            assert found["states"]["second.weight"] == ["step"]
            assert found["states"]["second.bias"] == ["exp_avg", "exp_avg_sq", "step"]
            assert len(found["states"]) == 5
        assert found["states"] == of_ranks[0]["states"]
    mean = [sum(of_rank["losses"][step] for of_rank in of_ranks) for step in range(50)]
    assert sum(mean[-10:]) < 0.95 * sum(mean[:10])
