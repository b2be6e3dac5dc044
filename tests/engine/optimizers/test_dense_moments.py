"""Sparse trainings that begin with the states of a dense AdamW: second moments go on, and nothing unused is kept."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.engine.optimizers.test_adam_rule import CLASSES, HYPER, N, Training, loss_of, model
from tests.ranks import Ranks

BETA2 = HYPER["betas"][1]
EXACT = {"sparsifier": "shared_top_k", "exchange": "reduce_union"}
SPARSE = ("0.weight", "2.weight")


def dense(steps: int, kind: str = "adamw") -> tuple[dict[str, Any], Any]:
    """Weights, and the optimizer, of plain DDP."""
    ddp = DistributedDataParallel(model())
    optimizer = CLASSES[kind](ddp.parameters(), **HYPER)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
    return copy.deepcopy(ddp.module.state_dict()), optimizer


def gone_on(training: Training, weights: dict[str, Any], states: dict[str, Any] | None) -> Training:
    training.module.load_state_dict(weights)
    if states is not None:
        inner = getattr(training.optimizer, "optimizer", training.optimizer)
        inner.load_state_dict(copy.deepcopy(states))
    return training


def own_gradients(module: torch.nn.Module, step: int, rank: int) -> dict[str, Tensor]:
    other = copy.deepcopy(module)
    other.zero_grad()
    loss_of(other, step, rank).backward()
    return {name: p.grad.flatten() for name, p in other.named_parameters() if p.grad is not None}


def first_step(kind: str, shown: bool, everywhere: bool) -> tuple[float, float, set[str]]:
    """Largest relative error of second moments and of steps, and the parameters whose states the optimizer keeps."""
    weights, optimizer = dense(5)
    moments = {
        name: optimizer.state[p]["exp_avg_sq"].flatten().clone()
        for name, p in zip(model().state_dict(), optimizer.param_groups[0]["params"], strict=True)
    }
    states = optimizer.state_dict() if everywhere or dist.get_rank() == 0 else None
    training = gone_on(Training(kind, shown=shown, **EXACT), weights, states)
    gradients = own_gradients(training.module, 5, training.rank)
    training.step(5)
    state, worst, moved = training.engine.state_dict(), 0.0, 0.0
    for name in SPARSE:
        assert state["counters"][name]["steps"] == 6.0
        expected = BETA2 * N * moments[name] + (1 - BETA2) * gradients[name].square()
        second = state["parameters"][name]["second"]
        worst = max(worst, float(((second - expected).abs() / expected).max()))
        mean = second.clone()
        dist.all_reduce(mean)
        average = dict(training.module.named_parameters())[name].grad
        assert average is not None
        average = average.flatten()
        divisor = ((mean / N / (1 - BETA2**6)) + (average / 2.5).square()).sqrt() + 1e-8
        wanted = HYPER["lr"] * math.sqrt(N) * average / divisor
        got = weights[name].flatten() * (1 - HYPER["lr"] * HYPER["weight_decay"])
        got = got - training.module.state_dict()[name].flatten()
        moved = max(moved, float((got - wanted).abs().max()))
    inner = getattr(training.optimizer, "optimizer", training.optimizer)
    names = {id(p): name for name, p in training.module.named_parameters()}
    kept = {names[id(p)] for p, each in inner.state.items() if each}
    return worst, moved, kept


@pytest.mark.parametrize(
    ("kind", "shown", "everywhere"), [("adamw", True, True), ("adamw", False, True), ("wrapped", True, False)]
)
def test_second_moments_go_on_from_those_of_dense_steps(
    two_ranks: Ranks, kind: str, shown: bool, everywhere: bool
) -> None:
    for worst, moved, kept in two_ranks(first_step, kind, shown, everywhere):
        assert worst < 1e-5 and moved < 2e-6
        assert kept == {"0.bias", "2.bias"}


def sharded_start() -> tuple[bool, list[Tensor]]:
    """Whether each rank has the second moments of all parameters, and the weights after three steps."""
    weights, optimizer = dense(5, "sharded")
    optimizer.consolidate_state_dict(0)
    states = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(states, 0)
    training = gone_on(Training("sharded"), weights, states[0])
    training.step(5)
    remembered = training.engine.state_dict()
    whole = all(
        float(remembered["parameters"][name]["second"].min()) > 0 and remembered["counters"][name]["steps"] == 6.0
        for name in SPARSE
    )
    for step in (6, 7):
        training.step(step)
    return whole, training.weights()


def test_where_ranks_hold_states_of_different_parameters_all_start_from_all(two_ranks: Ranks) -> None:
    (whole, weights), (also_whole, others) = two_ranks(sharded_start)
    assert whole and also_whole
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def late_parameter(late: int | None) -> dict[str, Any]:
    """What is remembered after the first step, where the states of one parameter are of fewer steps, or missing."""
    weights, optimizer = dense(5)
    parameter = optimizer.param_groups[0]["params"][2]
    if late is None:
        del optimizer.state[parameter]
    else:
        state = optimizer.state[parameter]
        state["exp_avg_sq"] *= (1 - BETA2**late) / (1 - BETA2**5)
        state["step"].fill_(late)
    training = gone_on(Training(), weights, optimizer.state_dict())
    training.step(5)
    remembered = training.engine.state_dict()
    return {
        "steps": remembered["counters"]["0.weight"]["steps"],
        "corrected": {
            name: (remembered["parameters"][name]["second"] / (1 - BETA2 ** remembered["counters"][name]["steps"]))
            for name in SPARSE
        },
    }


@pytest.mark.parametrize("late", [2, None])
def test_the_shortest_history_of_a_group_counts(two_ranks: Ranks, late: int | None) -> None:
    found = two_ranks(late_parameter, late)[0]
    assert found["steps"] == (3 if late else 2)
    whole = two_ranks(late_parameter, 5)[0]
    ratio = found["corrected"]["0.weight"] / whole["corrected"]["0.weight"]
    assert whole["steps"] == 6 and 0.1 < float(ratio.min()) < float(ratio.max()) < 10


def kept_states(options: dict[str, Any], second_step: bool) -> list[set[str]]:
    """Names of what the optimizer keeps of each parameter after some steps."""
    weights, optimizer = dense(3)
    training = gone_on(Training(**options), weights, optimizer.state_dict())
    for step in range(3, 6):
        training.step(step)
        if second_step and step == 4:
            training.optimizer.step()  # torch's, with the averages that are there
            assert "exp_avg" in training.optimizer.state[training.module[0].weight]  # type: ignore[index]
    return [set(training.optimizer.state.get(p, {})) for p in training.module.parameters()]


@pytest.mark.parametrize(
    ("options", "second_step", "kept"),
    [
        ({}, True, False),
        ({"fallback": True}, False, True),  # dense steps go on with them
        ({"density": 1.0}, False, True),
    ],
    ids=str,
)
def test_what_is_unused_is_dropped(two_ranks: Ranks, options: dict[str, Any], second_step: bool, kept: bool) -> None:
    torchs = {"step", "exp_avg", "exp_avg_sq"}
    for states in two_ranks(kept_states, options, second_step):
        assert states == [torchs if kept else set(), torchs] * 2


def resumed_sparse_state() -> bool:
    """Whether second moments of an engine's own state stay, where the optimizer has others, too."""
    training = Training()
    for step in range(3):
        training.step(step)
    state, weights = training.engine.state_dict(), copy.deepcopy(training.module.state_dict())
    again = gone_on(Training(), weights, dense(5)[1].state_dict())
    assert again.engine.load_state_dict(state) == []
    gradients = own_gradients(again.module, 3, again.rank)
    again.step(3)
    remembered = again.engine.state_dict()["parameters"]
    return all(
        torch.allclose(
            remembered[name]["second"],
            BETA2 * state["parameters"][name]["second"] + (1 - BETA2) * gradients[name].square(),
            rtol=1e-5,
        )
        for name in SPARSE
    )


def test_second_moments_of_own_gradients_are_not_replaced(two_ranks: Ranks) -> None:
    assert two_ranks(resumed_sparse_state) == [True, True]
