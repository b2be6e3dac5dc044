"""What a rank's gradients are clipped to, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.engine.optimizers.clipping import Clipping
from tests.engine.optimizers.test_adam_rule import Training, loss_of
from tests.engine.optimizers.test_momentum_rule import plan_of
from tests.ranks import Ranks


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_limit_is_for_averages_which_are_shorter_by_the_root_of_the_number_of_ranks(
    algorithm: str, scale: float | None
) -> None:
    x = [torch.tensor([3.0, -0.5, 0.0]), torch.tensor([[4.0]])]
    loss_scale = None if scale is None else torch.tensor(scale)
    pieces = [piece * (scale or 1.0) for piece in x]
    Clipping(0.5, algorithm).apply_(pieces, 4, 1.0, loss_scale)
    found = [piece / (scale or 1.0) for piece in pieces]
    if algorithm == "value":
        assert torch.equal(found[0], torch.tensor([1.0, -0.5, 0.0])) and torch.equal(found[1], torch.tensor([[1.0]]))
        return
    length = math.sqrt(9 + 0.25 + 16)
    for piece, whole in zip(found, x, strict=True):
        torch.testing.assert_close(piece, whole / length)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_what_is_not_finite_is_left_to_be_found(algorithm: str) -> None:
    piece = torch.tensor([math.inf, math.nan, 3.0])
    Clipping(0.5, algorithm).apply_([piece], 4, 1.0, None)
    if algorithm == "value":
        assert piece[0] == math.inf and bool(piece[1].isnan()) and float(piece[2].abs()) <= 3.0
    else:  # nobody knows how long the rest should be
        assert bool(piece.isnan().all())


def asked_within_a_step() -> list[list[Any]]:
    """Clippings in states, from the next step on: before an optimizer's step, after it, and where ranks differ."""
    training = Training()
    engine, optimizer = training.engine, training.optimizer
    loss_of(training.ddp, 0, training.rank).backward()
    engine._binding.clip_in_place_of_averages(0.5, "norm", optimizer)
    found = [engine.state_dict()["clippings"]]
    optimizer.step()
    state = engine.state_dict()
    found.append(state["clippings"])
    again = Training()
    if again.rank == 1:  # saved by a signal before clipping was asked for there
        state["clippings"] = []
    again.engine.load_state_dict(state)
    found.append(again.engine.state_dict()["clippings"])
    return found


def test_a_state_says_what_the_next_step_clips(two_ranks: Ranks) -> None:
    everything = ["0.bias", "0.weight", "2.bias", "2.weight"]
    clipped = [{"limit": 0.5, "algorithm": "norm", "parameters": everything}]
    assert two_ranks(asked_within_a_step) == [[clipped] * 3] * 2


def past_the_groups() -> list[tuple[bool, float]]:
    """Return whether DDP averages by itself, and the length of averages: without a limit, with one, without again."""
    training = Training(memory=None)
    engine, found = training.engine, []
    engine.regroup(plan_of(engine, "model", rules=ls.Rules(dense=["*"])))
    loss_of(training.ddp, 0, training.rank).backward()  # residuals are empty then
    for step, limit in enumerate((None, 1e-3, math.inf)):
        if limit is not None:
            engine.clip_gradients(limit)
        engine._go_direct()
        training.optimizer.zero_grad()
        loss_of(training.ddp, step, training.rank).backward()
        grads = [p.grad for p in training.ddp.parameters() if p.grad is not None]
        found.append((engine._direct, float(torch.nn.utils.get_total_norm(grads))))
    return found


@pytest.mark.in_backward
def test_what_the_user_clips_is_clipped_in_dense_steps(two_ranks: Ranks) -> None:
    for before, clipped, after in two_ranks(past_the_groups):
        assert before[0] and before[1] > 0.01
        assert not clipped[0] and clipped[1] < 1.001 * math.sqrt(2) * 1e-3
        assert after[0] and after[1] > 0.01


def limits_of(engine: ls.Engine) -> list[tuple[float, list[str]]]:
    """The limits of a step that has begun."""
    acting = engine.router.clipping.begin_step(lambda: engine.router.sparsified)
    return [(limit.clipping.limit, sorted(limit.names)) for limit in acting]


def where_optimizers_change() -> list[list[tuple[float, list[str]]]]:
    """Limits when an optimizer gets more parameters, when others take its place, and when these have limits."""
    training = Training()
    engine, parameters, found = training.engine, training.engine.parameters, []

    def step() -> None:
        loss_of(training.ddp, 0, training.rank).backward()
        found.append(limits_of(engine))

    first = torch.optim.AdamW([parameters["0.weight"]])
    engine._show([first])
    engine.clip_gradients(0.1, optimizer=first)
    first.add_param_group({"params": [parameters["2.weight"]]})
    step()
    others = [torch.optim.AdamW([parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]]) for layer in (0, 2)]
    engine._show(others)
    step()
    for optimizer, limit in zip(others, (5.0, 6.0), strict=True):
        engine.clip_gradients(limit, optimizer=optimizer)
        step()
    return found


@pytest.mark.in_backward
def test_a_limit_is_for_what_an_optimizer_holds_now(two_ranks: Ranks) -> None:
    for added, replaced, one, both in two_ranks(where_optimizers_change):
        assert added == replaced == [(0.1, ["0.weight", "2.weight"])]
        assert one == [(0.1, ["2.weight"]), (5.0, ["0.bias", "0.weight"])]
        assert both == [(5.0, ["0.bias", "0.weight"]), (6.0, ["2.bias", "2.weight"])]
