"""What a group is exchanged of, and how often, changes between steps; optimizers take the place of others."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.methods.grouping import ParameterSize, Rules, make_plan
from tests.engine.drift.models import Lion
from tests.ranks import Ranks


class Pair(nn.Module):
    """Two matrices whose gradients are the data; those of the first are 20 or 100 times as long."""

    def __init__(self, longer: float = 100.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.longer = longer
        self.a, self.b = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: Tensor, with_a: bool = True, with_b: bool = True) -> Tensor:
        loss = 0.01 * (self.b.weight * x[1]).sum() if with_b else x.new_zeros(())
        return loss + 0.01 * self.longer * (self.a.weight * x[0]).sum() if with_a else loss


def data(step: int) -> Tensor:
    return torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())) + 0.3


def in_phases(sparse: bool, every_step: bool) -> tuple[list[float], dict[str, float]]:
    """Mean move of the first matrix by steps that use it, in units of the rate, by phases; mean second moments."""
    model = Pair()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    engine = ls.attach(ddp, density=0.05, grouping="model", watch=None) if sparse else None
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, weight_decay=0.0)
    moves = []
    for phase in range(6):
        before, steps = model.a.weight.detach().clone(), 0
        for step in range(20):
            with_a = step % 2 == 0 if every_step else phase % 2 == 0
            steps += with_a
            optimizer.zero_grad()
            ddp(data(20 * phase + step), with_a).backward()
            optimizer.step()
        if steps:
            moves.append(float((before - model.a.weight.detach()).mean()) / 1e-3 / steps)
    vectors = engine.state_dict()["parameters"] if engine else {}
    return moves, {name: float(one["second"].mean()) for name, one in vectors.items()}


@pytest.mark.parametrize("every_step", [False, True])
def test_parameters_that_are_idle_for_a_while_train_on_as_with_ddp(two_ranks: Ranks, every_step: bool) -> None:
    """Their second moments stay in their own unit, and those of others do."""
    [dense, _], [moves, second] = two_ranks(in_phases, False, every_step)[0], two_ranks(in_phases, True, every_step)[0]
    assert moves[2:] == pytest.approx(dense[2:], rel=0.25)
    assert second["a.weight"] / 100**2 == pytest.approx(second["b.weight"], rel=0.5)


def split_by(how: str) -> list[float]:
    """Mean second moments of gradients that stay as they are, before their group is split, and after it."""
    model = Pair(20.0)
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, density=0.05, grouping="model", watch=None)
    optimizers = [torch.optim.AdamW(ddp.parameters(), lr=1e-3)]
    means = []
    for step in range(130):
        if step == 100 and how == "regroup":
            engine.regroup(make_plan([ParameterSize.of(n, p) for n, p in model.named_parameters()], "layer"))
        if step == 100 and how == "optimizers":
            optimizers = [torch.optim.AdamW([p], lr=1e-3) for p in ddp.parameters()]
        if step == 100 and how == "resume":
            state = engine.state_dict()
            engine.close()
            ddp = DistributedDataParallel(model)
            engine = ls.attach(ddp, density=0.05, grouping="layer", watch=None)
            engine.load_state_dict(state)
            optimizers = [torch.optim.AdamW(ddp.parameters(), lr=1e-3)]
        ddp.zero_grad()
        ddp(data(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        if step in (99, 129):
            means.append(float(engine.state_dict()["parameters"]["b.weight"]["second"].mean()))
    return means


@pytest.mark.parametrize("how", ["regroup", "resume", "optimizers"])
@pytest.mark.filterwarnings("ignore:.*What was learned about the group")
def test_what_is_remembered_keeps_its_length_where_a_group_is_split(two_ranks: Ranks, how: str) -> None:
    """With beta2 = 0.999, thirty steps add 30 % to what a hundred have added up."""
    for before, after in two_ranks(split_by, how):
        assert after == pytest.approx(1.3 * before, rel=0.1)


def in_turn(sparsifier: str, density: float, optimizers: int, resumed: bool) -> tuple[list[float], Tensor]:
    """How far rows move of which each rank alone has gradients, by ranks; the weights."""
    model = nn.ModuleDict({name: nn.Linear(16, 8 * dist.get_world_size(), bias=False) for name in "abc"[:optimizers]})
    for p in model.parameters():
        nn.init.zeros_(p)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, name: str, x: Tensor) -> Tensor:
            return (self.inner[name].weight * x).sum() + 0 * sum(p.sum() for p in self.inner.parameters())

    def attach() -> tuple[Any, Any]:
        ddp = DistributedDataParallel(Step())
        options: dict[str, Any] = {"sparsifier": sparsifier, "density": density, "memory": "residual"}
        return ddp, ls.attach(ddp, grouping="layer", watch=None, **options)

    ddp, engine = attach()
    steppers = {name: torch.optim.SGD([layer.weight], lr=1.0) for name, layer in model.items()}
    for step in range(60):
        if resumed and step == 31:
            state = engine.state_dict()
            engine.close()
            ddp, engine = attach()
            engine.load_state_dict(state)
        for name, optimizer in steppers.items():
            x = torch.zeros(8 * dist.get_world_size(), 16)
            x[8 * dist.get_rank() : 8 * dist.get_rank() + 8] = 1.0
            ddp.zero_grad()
            ddp(name, x).backward()
            optimizer.step()
    moved = model["a"].weight.detach()
    return [float(-rows.mean()) for rows in moved.split(8)], moved.clone()


@pytest.mark.parametrize(
    ("sparsifier", "density"),
    [
        ("union_top_k", 1 / 256),
        ("shared_top_k", 1 / 256),
        ("striped_top_k", 0.1),
        ("clt_k", 0.1),
        ("mean_top_k", 0.1),
        ("micro", 0.1),
        ("exdyna", 0.1),
    ],
)
def test_ranks_take_turns_whatever_other_optimizers_do_in_between(
    two_ranks: Ranks, sparsifier: str, density: float
) -> None:
    """Two optimizers in turn: each layer is exchanged in every second step of the engine."""
    [alone, weights], [both, same] = (two_ranks(in_turn, sparsifier, density, n, False)[0] for n in (1, 2))
    assert min(alone) > 0
    assert both == alone
    assert torch.equal(weights, same)


@pytest.mark.parametrize("sparsifier", ["clt_k", "union_top_k"])
def test_turns_go_on_where_a_run_is_resumed(two_ranks: Ranks, sparsifier: str) -> None:
    for (_, went), (_, resumed) in zip(
        two_ranks(in_turn, sparsifier, 0.02, 2, False), two_ranks(in_turn, sparsifier, 0.02, 2, True), strict=True
    ):
        assert torch.equal(went, resumed)


def becomes_dense(kind: str) -> tuple[list[str], Tensor]:
    """Memories of the groups, and a weight, where one rank alone has had gradients of a group that becomes dense."""
    model = Pair()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    engine = ls.attach(ddp, density=0.05, grouping="layer", watch=None)
    optimizer = getattr(torch.optim, kind)(ddp.parameters(), lr=1e-3)
    sizes = [ParameterSize.of(name, p) for name, p in model.named_parameters()]
    for step in range(6):
        if step == 3:
            engine.regroup(make_plan(sizes, "layer", rules=Rules(dense=["b.weight"])))
        optimizer.zero_grad()
        ddp(data(step), with_b=dist.get_rank() == 0).backward()
        optimizer.step()
    ls.flush(engine, optimizer)
    return [type(group.memory).__name__ for group in engine.stepper.groups], model.b.weight.detach().clone()


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_group_becomes_dense_alike_on_all_ranks_if_one_remembers_nothing(two_ranks: Ranks, kind: str) -> None:
    [memories, weights], [others, same] = two_ranks(becomes_dense, kind)
    assert memories == others
    assert torch.equal(weights, same)


def replaced(old: str, new: str, watch: bool) -> tuple[list[str], int, Tensor]:
    """Memories behind a new optimizer, how many old ones live, and weights; rank 0 has not collected the old one."""
    make = {
        "lion": lambda parameters: Lion(parameters, lr=1e-3),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "adamw 0.95": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95)),
    }
    model = nn.Linear(50, 50)
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, density=0.05, **({} if watch else {"watch": None}))
    gc.disable()
    warnings.filterwarnings("ignore", "What waited of gradients is dropped")
    try:
        known = []
        for kind in (old, new):
            optimizer = make[kind](ddp.parameters())
            known.append(weakref.ref(optimizer))
            circle: list[Any] = [optimizer]
            circle.append(circle)
            for step in range(3):
                optimizer.zero_grad()
                ddp(data(step)[0, :, :25].reshape(-1, 50)).square().mean().backward()
                optimizer.step()
            del optimizer, circle
            if dist.get_rank() == 1:
                gc.collect()
    finally:
        gc.enable()
    gc.collect()
    with engine.agreed():
        weights = model.weight.detach().clone()
    return (
        [type(group.memory).__name__ for group in engine.stepper.groups],
        sum(x() is not None for x in known),
        weights,
    )


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize(
    ("old", "new", "memory"),
    [
        ("lion", "adamw", "SecondMoment"),
        ("lion", "sgd", "Residual"),
        ("adamw", "lion", "Drift"),
        ("adamw", "adamw 0.95", "SecondMoment"),
    ],
)
def test_an_optimizer_takes_the_place_of_another_whenever_that_is_collected(
    two_ranks: Ranks, old: str, new: str, memory: str, watch: bool
) -> None:
    [memories, alive, weights], [others, alive_there, same] = two_ranks(replaced, old, new, watch)
    assert memories[0] == others[0] == memory
    assert alive == alive_there == 0
    assert torch.equal(weights, same)


def come_back() -> list[str]:
    """Memories of steps of two optimizers that hold the same parameters and take turns."""
    model = nn.Linear(50, 50, bias=False)
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, density=0.05, watch=None)
    optimizers = torch.optim.SGD(ddp.parameters(), lr=1e-3), torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    found = []
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
            ddp(data(step)[0, :, :25].reshape(-1, 50)).square().mean().backward()
            optimizer.step()
            found.append(type(engine.stepper.groups[0].memory).__name__)
    return found


def test_optimizers_that_take_turns_with_the_same_parameters_keep_a_memory(two_ranks: Ranks) -> None:
    for found in two_ranks(come_back):
        assert len(set(found[4:])) == 1
