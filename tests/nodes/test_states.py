"""States of nodes: saved at any moment, loaded by other nodes, merged; with other groups, nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.api.attach import sizes_of
from lightning_sparse.api.checkpoint import SideFiles, restore
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.methods.grouping import make_plan
from tests.covering import by_default
from tests.nodes.model import (
    SHAPES,
    Averages,
    Linear,
    here,
    integers,
    node_mean,
    part,
    weights,
    wrapped,
)
from tests.ranks import Ranks

NAMES = list(SHAPES)


def saved(folder: Path, size: int, steps: int) -> list[dict[str, Tensor]]:
    """Train, save all residuals, and train on."""
    ddp, engine = wrapped(size)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
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


@pytest.mark.parametrize(("old", "new"), by_default([(2, 4), (4, 2), (2, None), (1, 2)]))
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


class Looking(torch.optim.SGD):
    """Takes a state where averages are in ``.grad`` and the step is not taken yet."""

    def __init__(self, ddp: Any, engine: Any) -> None:
        super().__init__(ddp.parameters(), lr=0.125)
        self.engine, self.state_of_engine = engine, dict[str, Any]()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state_of_engine = self.engine.state_dict()
        super().step(closure)


def merged(steps: int) -> list[Any]:
    """The state of all ranks, in plain PyTorch, taken within an optimizer's step."""
    ddp, engine = wrapped(2, sparsifier="top_k")
    optimizer = Looking(ddp, engine)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(here(step, integers)).backward()
        optimizer.step()
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, optimizer.state_of_engine)
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


def parked(whole: bool) -> bool:
    """Whether the residual of a parameter is there again when it thaws; maybe from a state of whole parameters."""
    ddp, engine = wrapped(2, sparsifier="top_k")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    for step in range(3):
        optimizer.zero_grad()
        ddp(here(step)).backward()
        optimizer.step()
    before, state, parameters = engine.residual("long").clone(), engine.state_dict(), dict(engine.stepper.parameters)
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
        state, parameters = engine.state_dict(), {**engine.stepper.parameters, **engine.frozen}
        after = engine.residual("long").clone() if trains else None
        engine.close()
    return torch.equal(before, after)


def test_residuals_of_parts_wait_for_frozen_parameters(four_ranks: Ranks) -> None:
    assert four_ranks(parked, False) == four_ranks(parked, True) == [True] * 4


# ---- Lengths of gradients


def uneven(step: int, rank: int, name: str) -> Tensor:
    """A gradient of the same length in each step, whose first half is far longer than the rest."""
    generator = torch.Generator().manual_seed(100 * step + list(SHAPES).index(name))
    signs = torch.randint(0, 2, SHAPES[name], generator=generator) * 2.0 - 1
    signs.view(-1)[: signs.numel() // 2].mul_(100)
    return signs


def lengths_of(engine: ls.Engine) -> tuple[float, float]:
    counted = engine.state_dict()["counters"]["long"]
    return counted["clipped"], counted["measured_anew"]


def merged_into(old: int | None, new: int | None, steps: int) -> list[float]:
    """How often lengths were found to change, before and after a state was merged for nodes of another size."""
    ddp, engine = wrapped(old)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-6)

    def train(ddp: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            ddp(here(step, uneven)).backward()
            optimizer.step()

    train(ddp, optimizer, range(steps))
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, engine.state_dict())
    found = [*lengths_of(engine)]
    engine.close()
    ddp, engine = wrapped(new)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-6)
    engine.load_state_dict(ls.merge_states(states))
    train(ddp, optimizer, range(steps, 3 * steps))
    return [*found, *lengths_of(engine)]


@pytest.mark.parametrize(("old", "new"), by_default([(2, 2), (None, 2), (2, None), (2, 4), (4, 2)], 3))
def test_lengths_are_those_of_this_ranks_part(four_ranks: Ranks, old: int | None, new: int | None) -> None:
    """Else what waits would be multiplied to match the gradients of another part."""
    assert four_ranks(merged_into, old, new, 8) == [[0.0] * 4] * 4


# ---- Other groups


def regrouped() -> list[Any]:
    """The law with other groups after a step: what is remembered belongs to parameters."""
    ddp, engine = wrapped(2, sparsifier="top_k")
    sizes = sizes_of(engine.stepper.parameters)
    averages = Averages(ddp)
    sent: dict[str, Tensor] = {name: torch.zeros(SHAPES[name]) for name in NAMES}
    for step in range(3):
        ddp(here(step, integers)).backward()
        found = averages()
        sent = {name: sent[name] + found[name] for name in NAMES}
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


# ---- At any moment


def between(steps: int) -> list[bool]:
    """Whether a state between backward and step is that of before the backward, and one who loads it goes on alike."""
    ddp, engine = wrapped(2)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    take(ddp, optimizer, range(steps))
    before = engine.state_dict()
    optimizer.zero_grad()
    ddp(here(steps)).backward()
    state = engine.state_dict()
    equal = all(
        torch.equal(x, state["parameters"][name][key])
        for name, vectors in before["parameters"].items()
        for key, x in vectors.items()
    )
    start = weights(ddp)
    optimizer.step()
    take(ddp, optimizer, range(steps + 1, 2 * steps))
    module = Linear()
    module.load_state_dict(start)
    other, other_engine = wrapped(2, module)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.01)
    notes = other_engine.load_state_dict(state)
    take(other, fresh, range(steps, 2 * steps))
    there, here_now = weights(other), weights(ddp)
    return [equal, not notes, state["pending"] == {}, all(torch.equal(there[name], here_now[name]) for name in NAMES)]


def test_a_state_between_backward_and_step_has_nothing_of_the_backward(four_ranks: Ranks) -> None:
    assert four_ranks(between, 3) == [[True] * 4] * 4


def signalled(late: int) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """A signal comes while all ranks but one wait in an exchange; all of them save in its handler, and train on."""
    ddp, engine = wrapped(2, sparsifier="top_k")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    group, saved = dist.new_group(), list[Any]()

    def handle(*_: Any) -> None:
        state = engine.state_dict()
        moments = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
        dist.all_gather(moments, torch.tensor([state["moment"]]), group=group)
        newest = torch.stack(moments).amax(0)
        saved.append(state if state["moment"] == newest else engine.state_dict(newest))
        dist.barrier(group)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for step in range(3):
            optimizer.zero_grad()
            ddp(here(step, integers)).backward()
            if step == 1:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                deadline = time.monotonic() + 20
                while dist.get_rank() == late and not saved and time.monotonic() < deadline:
                    time.sleep(0.01)
            optimizer.step()
        return saved[0], weights(ddp), {name: engine.residual(name).clone() for name in NAMES}
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("late", [0, 3])
def test_signals_are_handled_while_ranks_of_nodes_wait_for_each_other(four_ranks: Ranks, late: int) -> None:
    found = four_ranks(signalled, late)
    assert {state["moment"] for state, *_ in found} == {1}
    for name in NAMES:
        waits = [torch.zeros(len(weights(Linear())[name].flatten())) for _ in range(2)]
        for rank, (_, now, residuals) in enumerate(found):
            assert torch.equal(now[name], found[0][1][name])
            part(waits[rank // 2], rank % 2, 2).copy_(residuals[name])
        moved = (weights(Linear())[name] - found[0][1][name]).flatten() / 0.125
        given = sum(node_mean(step, node, 2, name, integers) for step in range(3) for node in range(2))
        assert torch.equal(waits[0] + waits[1] + 2 * moved, given)
