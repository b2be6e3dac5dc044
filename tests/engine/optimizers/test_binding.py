"""Which engine acts in the steps of an optimizer, and what it is told of optimizers that nobody bound."""

from __future__ import annotations

import pytest
import torch

import lightning_sparse as ls
from tests.engine.optimizers.test_adam_rule import Training
from tests.ranks import Ranks


def attached_twice() -> tuple[bool, bool]:
    """Whether the engine takes steps of its AdamW before and after another attach, which fails."""
    training = Training()
    before = training.engine._takes_steps_of(training.optimizer)
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        ls.attach(training.ddp, density=0.1)
    return before, training.engine._takes_steps_of(training.optimizer)


def test_an_attach_that_fails_takes_nothing_from_the_engine_before(two_ranks: Ranks) -> None:
    assert two_ranks(attached_twice) == [(True, True)] * 2


def watched(closed: bool) -> int:
    """How many steps, of an optimizer of other parameters, a watcher sees."""
    training, seen = Training(), []
    training.engine._watch_optimizers(seen.append)
    if closed:
        training.engine.close()
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    stranger.step()
    assert all(optimizer is stranger for optimizer in seen)
    return len(seen)


@pytest.mark.parametrize("closed", [False, True])
def test_watchers_see_the_steps_of_all_optimizers_until_the_engine_ends(two_ranks: Ranks, closed: bool) -> None:
    assert two_ranks(watched, closed) == [0 if closed else 1] * 2
