"""Which engine acts in the steps of an optimizer, and what is said of optimizers."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_sparse as ls
from lightning_sparse.engine.optimizers import choice
from tests.covering import by_default
from tests.engine.optimizers.test_adam_rule import Training
from tests.ranks import Ranks


def attached_twice() -> tuple[bool, bool]:
    """Whether the engine takes steps of its AdamW before and after another attach, which fails."""
    training = Training()
    training.step(0)
    before = training.engine._binding.takes(training.optimizer)
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        ls.attach(training.ddp, density=0.1)
    return before, training.engine._binding.takes(training.optimizer)


def test_an_attach_that_fails_takes_nothing_from_the_engine_before(two_ranks: Ranks) -> None:
    assert two_ranks(attached_twice) == [(True, True)] * 2


def watched(closed: bool) -> int:
    """How many steps, of an optimizer of other parameters, a watcher sees."""
    training, seen = Training(), []
    training.engine._binding.watchers.append(seen.append)
    if closed:
        training.engine.close()
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    stranger.step()
    assert all(optimizer is stranger for optimizer in seen)
    return len(seen)


@pytest.mark.parametrize("closed", [False, True])
def test_watchers_see_the_steps_of_all_optimizers_until_the_engine_ends(two_ranks: Ranks, closed: bool) -> None:
    assert two_ranks(watched, closed) == [0 if closed else 1] * 2


OWN = [name for name, cls in ls.sparsifiers.SPARSIFIERS.items() if cls.is_its_exchange]
CANNOT = [
    name
    for name, cls in ls.sparsifiers.SPARSIFIERS.items()
    if not dict(ls.exchanges.EXCHANGES.items())[cls.exchange].carries_second
]


def exchanges_of(sparsifier: str, shown: bool) -> tuple[list[Any], bool, int]:
    """Exchanges before a step with Adam, after it, after a reload, and with SGD again; whether steps are equal."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "say", told.append)
        training = Training(sparsifier=sparsifier, density=0.3)
        seen = [training.engine.settings.exchange]
        for _ in range(2 if shown else 0):
            training.engine._show([training.optimizer])
        training.step(0)
        seen.append(training.engine.settings.exchange)
        training.step(1)
        again = Training(shown=shown, sparsifier=sparsifier, density=0.3)
        misfits = again.load(training.saved())
        seen.append(again.engine.settings.exchange)
        for one in (training, again):
            one.step(2)
        alike = all(map(torch.equal, training.weights(), again.weights())) and not misfits
        training.engine._show(torch.optim.SGD(training.ddp.parameters(), lr=0.1))
        seen.append(training.engine.settings.exchange)
    return seen, alike, sum("takes the place" in sentence for sentence in told)


@pytest.mark.parametrize(
    ("name", "shown"), by_default([(name, at % 2 == 0) for at, name in enumerate(sorted({*CANNOT} - {*OWN}))], 3)
)
def test_an_exchange_without_second_moments_is_replaced_and_said_once(two_ranks: Ranks, name: str, shown: bool) -> None:
    natural = ls.engine.config.SparsificationConfig(sparsifier=name).exchange_in_use
    union = ls.exchanges.ReduceUnion()
    for rank, (seen, alike, told) in enumerate(two_ranks(exchanges_of, name, shown)):
        assert seen == [natural, union, union, natural] and alike
        assert told == (rank == 0) * (2 if shown else 1)  # a loaded state has brought it to the second engine


def refused(name: str) -> list[str]:
    """What is said where an Adam is shown, and what is taken where the user has decided."""
    training = Training(sparsifier=name)
    with pytest.raises(ValueError, match="is its exchange") as error:
        training.engine._show([training.optimizer])
    training.engine._show(torch.optim.SGD(training.ddp.parameters(), lr=0.1))
    decided = []
    for options in ({"memory": "residual"}, {"exchange": "reduce_union"}, {"density": 1.0}):
        one = Training(sparsifier=name, watch=None, **options)
        one.step(0)
        decided.append(one.engine._binding.takes(one.optimizer))
    return [str(error.value), *map(str, decided)]


@pytest.mark.parametrize("name", OWN)
def test_methods_that_are_their_exchange_refuse_adam(two_ranks: Ranks, name: str) -> None:
    first, second = two_ranks(refused, name)
    assert first == second and "'top_k' or 'union_top_k'" in first[0]
    assert first[1:] == ["False", "True", "False"]


def found_late(name: str) -> None:
    """An Adam that steps."""
    Training(sparsifier=name).step(0)


def test_an_adam_that_is_found_in_a_step_is_refused_on_all_ranks(two_ranks: Ranks) -> None:
    with pytest.raises(Exception, match="is its exchange"):
        two_ranks(found_late, OWN[0])


def beside(optimizer: str) -> tuple[int, bool, bool]:
    """Another optimizer takes a step in another thread, while a step of the engine's is running.

    Returns:
        Steps; whether averages are still to be applied, and whether agreed weights are equal on all ranks.
    """
    training = Training()
    if optimizer == "RMSprop":
        training.optimizer = torch.optim.RMSprop(training.ddp.parameters(), lr=0.01)
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9)

    def in_a_thread(*_: Any) -> None:
        thread = threading.Thread(target=stranger.step)
        thread.start()
        thread.join()

    training.optimizer.register_step_post_hook(in_a_thread)  # torch calls it before the engine's
    with warnings.catch_warnings(action="ignore"):  # RMSprop trains copies of the weights
        for step in range(4):
            training.step(step)
    state = training.engine.state_dict()
    with training.engine.agreed():
        weights = torch.cat([p.detach().flatten() for p in training.ddp.parameters()])
    rows = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(rows, weights)
    return training.engine.step, bool(state["pending"]), torch.equal(*rows)


@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop"])
def test_a_step_of_others_in_another_thread_changes_nothing(two_ranks: Ranks, optimizer: str) -> None:
    assert two_ranks(beside, optimizer) == [(4, False, True)] * 2
