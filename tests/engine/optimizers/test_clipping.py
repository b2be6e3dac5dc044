"""What a rank's gradients are clipped to, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning_sparse.engine.optimizers.clipping import Clipping

from tests.engine.optimizers.test_adam_rule import Training, loss_of
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
