"""An engine that is closed between a backward and a step: gradients are each rank's own then, and nobody steps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import by_default
from tests.ranks import Ranks, error_of

SENTENCE = "The engine was closed between a backward and this step of"
WITHIN = 5.0
"""Seconds in which ranks have to end."""


class Net(nn.Sequential):
    """Two layers, of which a backward may leave out the first."""

    half = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x)
        return self[2](torch.ones(8, 40)) if self.half else found


def network() -> Net:
    torch.manual_seed(0)
    return Net(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20))


def wrapped(kind: str, density: float = 0.05) -> tuple[nn.Module, ls.Engine]:
    """A model on four ranks, and its engine."""
    settings: dict[str, Any] = {"density": density, "watch": None}
    if kind == "sharded":
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        sharded = fully_shard(network(), mesh=mesh["shard"])
        return sharded, ls.attach_hsdp(sharded, mesh, **settings)
    ddp = DistributedDataParallel(network())
    return ddp, ls.attach(ddp, node_size=2 if kind == "nodes" else None, **settings)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    each = model.parameters()
    return torch.optim.AdamW(each, lr=0.01) if kind == "adamw" else torch.optim.SGD(each, lr=0.1, momentum=0.9)


def backward(model: nn.Module) -> None:
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(dist.get_rank()))
    (model(x) - x[:, :20].sin()).square().mean().backward()


def weights(model: nn.Module) -> Tensor:
    whole: Any = [p.detach() for p in model.parameters()]
    return torch.cat([(x.full_tensor() if hasattr(x, "full_tensor") else x).flatten() for x in whole])


def closed_before_its_step(kind: str, rule: str) -> tuple[str, str, bool]:
    """What the step says, and the same step again; and whether weights are those of before."""
    model, engine = wrapped(kind)
    optimizer = optimizer_of(rule, model)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    engine.close()
    before = weights(model).clone()
    said = [error_of(optimizer.step) for _ in range(2)]
    return said[0], said[1], torch.equal(weights(model), before)


@pytest.mark.parametrize("kind", ["plain", "nodes", "sharded"])
@pytest.mark.parametrize("rule", by_default(["momentum", "adamw"]))
def test_a_step_with_gradients_of_one_rank_is_refused_on_each(four_ranks: Ranks, kind: str, rule: str) -> None:
    for first, second, equal in four_ranks(closed_before_its_step, kind, rule):
        assert first.startswith(f"RuntimeError: {SENTENCE}"), first
        assert second == first
        assert equal


def goes_on(how: str) -> tuple[str, bool]:
    """What is said of steps that need no exchange of a closed engine, and whether ranks stay equal."""
    ddp, engine = wrapped("plain", 1.0 if how == "dense" else 0.05)
    optimizer = optimizer_of("momentum", ddp)
    backward(ddp)
    if how in ("cleared", "zeros"):
        optimizer.zero_grad(set_to_none=how == "cleared")
    if how == "stepped":
        optimizer.step()
    engine.close()
    if how in ("by hand", "another engine", "another engine, half", "plain DDP"):
        module: Any = ddp.module
        other = DistributedDataParallel(module, find_unused_parameters=True)
        later = ls.attach(other, density=0.05, watch=None) if how.startswith("another") else None
        module.half = how.endswith("half")
        if how == "by hand":
            for p in module.parameters():
                p.grad = p.grad.clone()
                dist.all_reduce(p.grad)
        else:
            backward(other)  # on top of what is there
        said = error_of(optimizer.step)
        del later
    else:
        said = error_of(optimizer.step)
    rows = [torch.empty_like(weights(ddp)) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, weights(ddp))
    return said, all(torch.equal(row, rows[0]) for row in rows)


HOW = ["cleared", "zeros", "stepped", "dense", "by hand", "another engine", "another engine, half", "plain DDP"]


@pytest.mark.parametrize("how", HOW)
def test_steps_that_lack_no_exchange_go_on(two_ranks: Ranks, how: str) -> None:
    for said, equal in two_ranks(goes_on, how):
        assert said == "nothing"
        assert equal


def closed_by_one() -> tuple[str, str, float]:
    """One rank closes its engine in an exception, and the others step."""
    ddp, engine = wrapped("plain")
    optimizer = optimizer_of("momentum", ddp)
    backward(ddp)
    begin = time.monotonic()
    closing = dist.get_rank() == 1
    try:
        if closing:
            raise OSError("as asked for")
        said = error_of(optimizer.step)
    except OSError:
        engine.close()
        said = error_of(optimizer.step)
    return said, error_of(optimizer.step), time.monotonic() - begin


def test_a_rank_that_closes_alone_ends_the_others_soon() -> None:
    with Ranks(3) as ranks:
        found = ranks(closed_by_one)
    for rank, (first, again, seconds) in enumerate(found):
        expected = f"RuntimeError: {SENTENCE}" if rank == 1 else "LostRankError"
        assert first.startswith(expected)
        assert again != "nothing"
        assert seconds < WITHIN


def moved_after_a_step(closed: bool) -> bool:
    """Torch moves the parts of a sharded model by swapping tensors, which none that is watched allows."""
    model, engine = wrapped("sharded")
    optimizer = optimizer_of("momentum", model)
    backward(model)
    optimizer.step()
    if closed:
        engine.close()
    model.to("cpu")
    return all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("closed", [False, True])
def test_a_sharded_model_may_be_moved_with_its_gradients(four_ranks: Ranks, closed: bool) -> None:
    assert all(four_ranks(moved_after_a_step, closed))
