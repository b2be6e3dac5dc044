"""Residuals of gradients times learning rates, as in the papers, against a slow loop over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.ranks import Ranks, error_of
from tests.static_path import static_path

SPARSE: dict[str, Any] = {
    "sparsifier": "top_k",
    "density": 0.05,
    "grouping": "model",
    "rules": ls.Rules(dense_ndim=0, dense_numel=0),
    "memory": ls.memories.Residual(rates=True),
    "watch": None,
}
NAMES = ["0.weight", "1.weight"]
SCHEDULE = [
    (0.01, 0.002),
    (0.02, 0.002),
    (0.005, 0.0),
    (0.0, 0.01),
    (0.03, 0.02),
    (0.03, 0.03),
    (0.0, 0.0),
    (0.03, 0.001),
]
"""Rates of the two weights, in each step."""


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 10, bias=False)).to(dtype)


def sgd(model: nn.Sequential, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": part.parameters()} for part in model], 0.01, **settings)


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float], of_tensors: bool = False) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.tensor(rate, dtype=torch.float64) if of_tensors else rate


def loss_of(model: nn.Module, step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(8, 20, dtype=torch.float64, generator=generator).to(dtype)).square().mean()


def reference_training(steps: int, ranks: int, **settings: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Weights, and residuals of each rank, of ``e + rate * gradient``, Top-k of both weights together, and SGD."""
    model = network()
    optimizer, weights = sgd(model, **settings), list(model.parameters())
    residuals = [[torch.zeros_like(w).flatten() for w in weights] for _ in range(ranks)]
    for step, rates in enumerate(SCHEDULE[:steps]):
        total = [torch.zeros_like(w).flatten() for w in weights]
        here = [number for number, rate in enumerate(rates) if rate]
        for rank in range(ranks):
            for w, grad in zip(weights, torch.autograd.grad(loss_of(model, step, rank), weights), strict=True):
                w.grad = grad
            for number in here:
                residuals[rank][number] += rates[number] * weights[number].grad.flatten()
            offered = torch.cat([e if n in here else torch.zeros_like(e) for n, e in enumerate(residuals[rank])])
            k = round(0.05 * len(offered))
            for place in offered.abs().topk(k).indices.tolist() if here else ():
                number = int(place >= len(residuals[rank][0]))
                inside = place - number * len(residuals[rank][0])
                total[number][inside] += offered[place]
                residuals[rank][number][inside] -= offered[place]
        set_rates(optimizer, rates)
        for w, sent, rate in zip(weights, total, rates, strict=True):
            w.grad = (sent / ranks / rate if rate else torch.zeros_like(sent)).view_as(w)
        optimizer.step()
    return [w.detach() for w in weights], residuals


def train(steps: int, more: str, settings: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The weights, and what this rank has not sent yet."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if more == "scaler" else None

    def attached() -> tuple[DistributedDataParallel, ls.Engine, torch.optim.Optimizer]:
        ddp = DistributedDataParallel(model)
        return ddp, ls.attach(ddp, **SPARSE), sgd(model, **settings)

    ddp, engine, optimizer = attached()
    for step, rates in enumerate(SCHEDULE[:steps]):
        if more == "resume" and step == steps // 2:
            states = engine.state_dict(), optimizer.state_dict()
            engine.close()
            ddp, engine, optimizer = attached()
            optimizer.load_state_dict(states[1])
            assert engine.load_state_dict(states[0]) == []
        set_rates(optimizer, rates, of_tensors=more == "tensors")
        optimizer.zero_grad()
        loss = loss_of(ddp, step, dist.get_rank())
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        for parameter, rate in zip(model.parameters(), rates, strict=True):
            assert parameter.grad is not None and (rate or not parameter.grad.any())
    residuals = [engine.residual(name) for name in NAMES]
    engine.close()
    return [p.detach() for p in model.parameters()], [one for one in residuals if one is not None]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("", {"momentum": 0.9, "weight_decay": 0.1}),
    ("", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("tensors", {}),
    ("scaler", {"momentum": 0.9}),
    ("resume", {"momentum": 0.9}),
]


@pytest.mark.parametrize(("more", "settings"), CASES, ids=str)
def test_a_training_is_that_of_the_papers(two_ranks: Ranks, more: str, settings: dict[str, Any]) -> None:
    weights, residuals = reference_training(len(SCHEDULE), 2, **settings)
    for own, (found, waiting) in zip(residuals, two_ranks(train, len(SCHEDULE), more, settings), strict=True):
        for one, expected in zip([*found, *waiting], [*weights, *own], strict=True):
            assert torch.allclose(one.flatten(), expected.flatten(), rtol=0, atol=1e-13)


def reference_of_parts(steps: int, **settings: Any) -> tuple[list[Tensor], list[list[list[Tensor]]]]:
    """Weights, and residuals of both places of two nodes of two ranks, of the same with means over nodes, in halves."""
    model = network()
    optimizer, weights = sgd(model, **settings), list(model.parameters())
    residuals = [[[torch.zeros(w.numel() // 2).double() for w in weights] for _ in range(2)] for _ in range(2)]
    for step, rates in enumerate(SCHEDULE[:steps]):
        total = [torch.zeros(2, w.numel() // 2).double() for w in weights]
        here = [number for number, rate in enumerate(rates) if rate]
        for node in range(2):
            each = [torch.autograd.grad(loss_of(model, step, 2 * node + rank), weights) for rank in range(2)]
            means = [sum(pair).view(2, -1) / 2 for pair in zip(*each, strict=True)]
            for place, waiting in enumerate(residuals[node]):
                for number in here:
                    waiting[number] += rates[number] * means[number][place]
                offered = torch.cat([e if n in here else torch.zeros_like(e) for n, e in enumerate(waiting)])
                for coordinate in offered.abs().topk(round(0.04 * len(offered))).indices.tolist() if here else ():
                    number = int(coordinate >= len(waiting[0]))
                    inside = coordinate - number * len(waiting[0])
                    total[number][place, inside] += offered[coordinate] / 2
                    waiting[number][inside] -= offered[coordinate]
        set_rates(optimizer, rates)
        for w, sent, rate in zip(weights, total, rates, strict=True):
            w.grad = (sent / rate if rate else torch.zeros_like(sent)).view_as(w)
        optimizer.step()
    return [w.detach() for w in weights], residuals


def train_in_parts(kind: str, settings: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The weights, what this rank has not sent yet, and the weights after a flush."""
    model: Any = network()
    if kind == "nodes":
        ddp: Any = DistributedDataParallel(model)
        engine = ls.attach(ddp, **SPARSE | {"density": 0.04, "node_size": 2})
    else:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        ddp = fully_shard(model, mesh=mesh["shard"])
        engine = ls.attach_hsdp(model, mesh, **SPARSE | {"density": 0.04})
    optimizer = sgd(model, **settings)

    def weights() -> list[Tensor]:
        whole: list[Any] = [p.detach() for p in model.parameters()]
        return [x.full_tensor() if kind == "replicas" else x.clone() for x in whole]

    for step, rates in enumerate(SCHEDULE):
        set_rates(optimizer, rates)
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
    found, residuals = weights(), [engine.residual(name).clone().flatten() for name in NAMES]
    set_rates(optimizer, (0.5, 0.25))
    ls.flush(engine, [optimizer])
    return found, residuals, weights()


@pytest.mark.parametrize("kind", ["nodes", "replicas"])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=str)
def test_parts_are_trained_as_in_the_papers(four_ranks: Ranks, kind: str, settings: dict[str, Any]) -> None:
    weights, residuals = reference_of_parts(len(SCHEDULE), **settings)
    for rank, (found, waiting, flushed) in enumerate(four_ranks(train_in_parts, kind, settings)):
        for one, expected in zip([*found, *waiting], [*weights, *residuals[rank // 2][rank % 2]], strict=True):
            assert torch.allclose(one.flatten(), expected.flatten(), rtol=0, atol=1e-13)
        if not settings:
            for one, before, number in zip(flushed, weights, range(2), strict=True):
                halves = [(residuals[0][place][number] + residuals[1][place][number]) / 2 for place in range(2)]
                assert torch.allclose(one.flatten(), before.flatten() - torch.cat(halves), rtol=0, atol=1e-13)


def amounts(settings: dict[str, Any], dtype: torch.dtype = torch.float64, clip: float = 0.0) -> tuple[Tensor, Tensor]:
    """What all steps and the residuals amount to in units of the parameters, and what all gradients do."""
    model = network(dtype)
    ddp = DistributedDataParallel(model)
    engine, optimizer = ls.attach(ddp, **{**SPARSE, **settings}), sgd(model)
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    moved = torch.zeros_like(gradients)
    for step, rates in enumerate(SCHEDULE):
        if step == 4:
            engine.regroup(ls.grouping.make_plan([p for g in engine.groups for p in g.parameters][::-1], "layer"))
        set_rates(optimizer, rates)
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank(), dtype).backward()
        if clip:
            engine.clip_grad_norm_(model.parameters(), clip)
        pairs = list(zip(model.parameters(), rates, strict=True))
        gradients += torch.cat([rate * p.grad.double().flatten() for p, rate in pairs])
        optimizer.step()
        moved += torch.cat([rate * p.grad.double().flatten() for p, rate in pairs])
    waiting = torch.cat([engine.residual(name).double().flatten() for name in NAMES])
    engine.close()
    dist.all_reduce(gradients)
    dist.all_reduce(waiting)
    return moved + waiting / dist.get_world_size(), gradients / dist.get_world_size()


@pytest.mark.parametrize(
    ("settings", "dtype", "clip"),
    [
        ({}, torch.float64, 0.01),
        ({"sparsifier": "exdyna", "density": 0.1}, torch.float64, 0.0),
        ({"sparsifier": "union_top_k"}, torch.float32, 0.0),
        ({"sparsifier": "union_top_k"}, torch.bfloat16, 0.0),
        ({"density": ls.Warmup(1.0, 0.02, 3)}, torch.float64, 0.0),
    ],
    ids=str,
)
def test_steps_and_residuals_amount_to_all_gradients_times_their_rates(
    two_ranks: Ranks, settings: dict[str, Any], dtype: torch.dtype, clip: float
) -> None:
    off = 1e-14 if dtype == torch.float64 else 1e-8
    for got, should in two_ranks(amounts, settings, dtype, clip):
        assert torch.allclose(got, should, rtol=0, atol=off)


def on_devices() -> list[tuple[Tensor, Tensor]]:
    with static_path():
        return [amounts(SPARSE | {"sparsifier": one}, torch.float32) for one in ("top_k", "union_top_k")]


def test_nothing_is_lost_where_shapes_are_static(two_ranks: Ranks) -> None:
    for each in two_ranks(on_devices):
        for got, should in each:
            assert torch.allclose(got, should, rtol=0, atol=1e-8)


def dense_ones(rates: bool) -> list[Tensor]:
    """Of a training in which the second weight is dense."""
    model = network(torch.float32)
    ddp = DistributedDataParallel(model)
    rules = ls.Rules(dense=("1.*",), dense_ndim=0, dense_numel=0)
    ls.attach(ddp, **{**SPARSE, "rules": rules, "memory": ls.memories.Residual(rates=rates)})
    optimizer = sgd(model)
    loss_of(ddp, 0, dist.get_rank(), torch.float32).backward()
    own = model[1].weight.grad.clone()
    optimizer.step()
    dist.all_reduce(own)
    return [model[1].weight.grad, own / 2]


def test_gradients_that_are_sent_as_a_whole_are_not_multiplied(two_ranks: Ranks) -> None:
    for grad, mean in two_ranks(dense_ones, True):
        assert torch.equal(grad, mean)


def whole(rates: bool) -> Tensor:
    """Weights of a training at density 1, or of plain DDP."""
    model = network(torch.float32)
    ddp = DistributedDataParallel(model)
    if rates:
        ls.attach(ddp, **{**SPARSE, "density": 1.0})
    optimizer = sgd(model, momentum=0.9)
    for step, each in enumerate(SCHEDULE):
        set_rates(optimizer, each)
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank(), torch.float32).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_at_density_1_a_training_is_that_of_plain_ddp(two_ranks: Ranks) -> None:
    for one, other in zip(two_ranks(whole, True), two_ranks(whole, False), strict=True):
        assert torch.equal(one, other)


def flushed(bound: bool) -> tuple[Tensor, Tensor, list[bool]]:
    """What a flush moves weights by, the mean residual before it, and whether anything waits behind it."""
    model = network()
    ddp = DistributedDataParallel(model)
    engine, optimizer = ls.attach(ddp, **SPARSE), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
    if bound:  # a new engine that has never seen the optimizer
        state = engine.state_dict()
        engine.close()
        ddp = DistributedDataParallel(model)
        engine = ls.attach(ddp, **SPARSE)
        assert engine.load_state_dict(state) == []
    set_rates(optimizer, (0.003, 0.0))
    before, residual = model[0].weight.detach().clone(), engine.residual(NAMES[0]).view(30, 20).clone()
    dist.all_reduce(residual)
    waited = engine.residual(NAMES[1]).clone()
    ls.flush(engine, [optimizer])
    assert torch.equal(engine.residual(NAMES[1]), waited)
    left = [bool(engine.residual(name).any()) for name in NAMES]
    engine.close()
    return before - model[0].weight.detach(), residual / dist.get_world_size(), left


@pytest.mark.parametrize("bound", [False, True])
def test_a_flush_moves_weights_by_what_waits(two_ranks: Ranks, bound: bool) -> None:
    for moved, mean, left in two_ranks(flushed, bound):
        assert torch.allclose(moved, mean, rtol=0, atol=1e-14) and bool(mean.any())
        assert left == [False, True]


def in_units(saved: bool, now: bool) -> tuple[list[str], bool]:
    """What is said of a state with residuals of other units, and whether anything of them is left."""
    found: list[str] = []
    model, state = network(), None
    for rates in (saved, now):
        ddp = DistributedDataParallel(model)
        engine = ls.attach(ddp, **{**SPARSE, "memory": ls.memories.ClipByNorm(10.0, ls.memories.Residual(rates=rates))})
        if state is not None:
            found = engine.load_state_dict(state)
            waits = bool(engine.residual(NAMES[0]).any())
        optimizer = sgd(model)
        loss_of(ddp, 0, dist.get_rank()).backward()
        optimizer.step()
        state = engine.state_dict()
        engine.close()
    return found, waits


@pytest.mark.parametrize(("saved", "now"), [(False, True), (True, False)])
def test_residuals_of_other_units_are_dropped_and_that_is_said(two_ranks: Ranks, saved: bool, now: bool) -> None:
    for found, waits in two_ranks(in_units, saved, now):
        assert any(f"memory.memory.rates was {saved}, and is {now}" in one for one in found)
        assert any("Residuals had other units, by rates of Residual: they are dropped." in one for one in found)
        assert not waits


def saved_before_the_step() -> tuple[Tensor, Tensor]:
    """What all that a state has waiting amounts to, between exchange and step; and what it should."""
    model = network()
    ddp = DistributedDataParallel(model)
    engine, optimizer = ls.attach(ddp, **SPARSE), sgd(model)
    states: list[Any] = []
    engine._binding.watchers.append(lambda _: states.append(engine.state_dict()))
    set_rates(optimizer, (0.02, 0.005))
    loss_of(ddp, 0, dist.get_rank()).backward()
    should = torch.cat([r * p.grad.flatten() for p, r in zip(model.parameters(), (0.02, 0.005), strict=True)])
    optimizer.step()
    [state] = states
    waiting = []
    for name in NAMES:
        whole = state["parameters"][name]["residual"].clone()
        pending = state["pending"].get(name)
        if pending is not None:
            whole[pending["indices"].long()] += dist.get_world_size() * pending["values"]
        waiting.append(whole)
    got = torch.cat(waiting)
    dist.all_reduce(got)
    dist.all_reduce(should)
    engine.close()
    return got, should


def test_a_state_between_exchange_and_step_has_all_in_one_unit(two_ranks: Ranks) -> None:
    for got, should in two_ranks(saved_before_the_step):
        assert torch.allclose(got, should, rtol=0, atol=1e-14)


# ---- What is refused


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_optimizers_with_other_steps_are_refused(two_ranks: Ranks, kind: Any) -> None:
    for message in two_ranks(step_of, kind):
        assert "Residual(rates=True) needs steps of lr * gradient, as torch.optim.SGD takes them, but got" in message


def step_of(kind: Any) -> str:
    model = network()
    ddp = DistributedDataParallel(model)
    ls.attach(ddp, **SPARSE)
    loss_of(ddp, 0, dist.get_rank()).backward()
    return error_of(kind(model.parameters(), lr=0.1).step)


def other_rates(rates: Sequence[Sequence[float]]) -> str:
    model = network()
    ddp = DistributedDataParallel(model)
    ls.attach(ddp, **SPARSE)
    optimizer = sgd(model)
    set_rates(optimizer, rates[dist.get_rank()])
    loss_of(ddp, 0, dist.get_rank()).backward()
    return error_of(optimizer.step)


@pytest.mark.parametrize("rates", [[(0.1, 0.1), (0.1, 0.2)], [(0.1, 0.0), (0.1, 0.1)]], ids=str)
def test_ranks_at_other_rates_end_together(two_ranks: Ranks, rates: Any) -> None:
    for message in two_ranks(other_rates, rates):
        assert "rank 1 takes a step of an optimizer, at other learning rates than rank 0" in message


def without_optimizer() -> str:
    ddp = DistributedDataParallel(network())
    engine = ls.attach(ddp, **SPARSE)
    loss_of(ddp, 0, dist.get_rank()).backward()
    return error_of(engine.exchange, ddp.parameters())


def test_rates_that_nobody_knows_are_missed(two_ranks: Ranks) -> None:
    for message in two_ranks(without_optimizer):
        assert "engine.exchange() knows no learning rates" in message
    with pytest.raises(ValueError, match=r"Residual\(rates=True\) needs the learning rates of an optimizer"):
        list(ls.simulate(torch.ones(1, 1, 8), sparsifier="top_k", memory=ls.memories.Residual(rates=True), density=0.5))
