"""A state taken at any moment holds all that was absorbed and is not in the weights: in residuals, and as pending."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

import lightning_sparse as ls
from lightning_sparse.core.layout import Gradient
from tests.covering import by_default
from tests.ranks import Ranks
from tests.sums import SPARSE, Sums, check_sums, gradient, waiting


class DataSGD(torch.optim.Optimizer):
    """Writes past autograd, as many optimizers outside of torch do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-group["lr"])


Look = tuple[dict[str, Tensor], dict[str, Any]]


class Training:
    """Sums in plain PyTorch."""

    def __init__(self, optimizer: Any = torch.optim.SGD, **options: Any) -> None:
        self.module = Sums()
        # Small buckets, so that groups run at different times of backward.
        self.ddp = DistributedDataParallel(self.module, bucket_cap_mb=0.0005)
        self.engine = ls.attach(self.ddp, **{**SPARSE, **options})
        self.optimizer = optimizer(self.module.parameters(), lr=1.0)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(dist.get_rank()).backward()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def look(self) -> Look:
        return self.weights(), self.engine.state_dict()

    def when_backward_reaches(self, ending: str, do: Callable[[], None]) -> RemovableHandle:
        """Call a function where the gradient of a parameter is here, and others may be on their way."""
        [parameter] = [p for name, p in self.module.named_parameters() if name.endswith(ending)]
        return parameter.register_post_accumulate_grad_hook(lambda _: do())


def look_within_steps(optimizer: Any) -> dict[str, list[Look]]:
    """What is seen at several moments of each of some steps."""
    training = Training(optimizer)
    looks: dict[str, list[Look]] = {"backward": [], "before": [], "between": [], "after": []}
    training.when_backward_reaches("second", lambda: looks["backward"].append(training.look()))
    for _ in range(5):
        looks["before"].append(training.look())
        training.backward()
        looks["between"].append(training.look())
        training.optimizer.step()
        looks["after"].append(training.look())
    return looks


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, DataSGD])
def test_a_state_holds_what_the_weights_do_not(two_ranks: Ranks, optimizer: Any) -> None:
    seen = two_ranks(look_within_steps, optimizer)
    for moment in seen[0]:
        for step in range(5):
            both = [looks[moment][step] for looks in seen]
            states = [state for _, state in both]
            check_sums(both[0][0], states, step + (moment == "after"))
            assert not any(state["pending"] or state["absorbed"] for state in states)


def two_optimizers() -> list[Look]:
    """One backward, and two optimizers that step one after the other."""
    training = Training()
    parameters = list(training.module.parameters())
    optimizers = [torch.optim.SGD(part, lr=1.0) for part in (parameters[:2], parameters[2:])]
    looks = []
    for _ in range(2):
        training.backward()
        looks.append(training.look())
        for optimizer in optimizers:
            optimizer.step()
            looks.append(training.look())
    return looks


def test_each_of_two_optimizers_exchanges_what_it_holds(two_ranks: Ranks) -> None:
    for number, both in enumerate(zip(*two_ranks(two_optimizers), strict=True)):
        [weights, _], _ = both
        states = [state for _, state in both]
        for place, (name, weight) in enumerate(weights.items()):
            steps = number // 3 + (place // 2 < number % 3)
            given = steps * sum(gradient(name, rank).double() for rank in range(2))
            assert torch.equal(waiting(states, name) - 2 * weight.double().flatten(), given)
        assert not any(state["pending"] or state["absorbed"] for state in states)


class Half(nn.Module):
    """One parameter that an optimizer holds, and one that none holds."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.free = Sums(), nn.Parameter(torch.ones(50))

    def forward(self, rank: int) -> Tensor:
        return self.sums(rank) + self.free.square().sum()


def nobody_holds() -> tuple[list[int], float]:
    module = Half()
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp, **SPARSE)
    optimizer = torch.optim.SGD(module.sums.parameters(), lr=1.0)
    steps = []
    for _ in range(3):
        ddp(0).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = engine.state_dict()
        steps.append(state["step"])
    same = torch.equal(state["parameters"]["free"]["residual"], engine.residual("free"))
    return steps, float(same)


def test_parameters_that_no_optimizer_holds_are_not_waited_for(two_ranks: Ranks) -> None:
    assert two_ranks(nobody_holds) == [([1, 2, 3], 1.0)] * 2


# ---- Several threads, signals, ranks at different moments


def look_from_a_thread() -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    """Weights after each step, and states that another thread has taken at any moment."""
    training, looks, busy = Training(), [], threading.Event()
    weights: list[dict[str, Tensor]] = [training.weights()]

    def look() -> None:
        generator = random.Random(0)
        while len(looks) < 20 and busy.wait(10):
            time.sleep(generator.uniform(0, 0.003))
            looks.append(training.engine.state_dict())

    thread = threading.Thread(target=look)
    thread.start()
    while thread.is_alive():
        busy.set()
        training.backward()
        training.optimizer.step()
        weights.append(training.weights())
    return weights, looks


@pytest.mark.in_backward
def test_another_thread_sees_what_the_weights_do_not_hold(alone: Ranks) -> None:
    [(weights, looks)] = alone(look_from_a_thread)
    for state in looks:
        for name in weights[0]:  # the optimizer may have been in the middle of its step, past some parameters
            check_sums({name: weights[state["step"] - (name in state["pending"])][name]}, [state])


@pytest.fixture(scope="module")
def alone() -> Any:
    with Ranks(1) as ranks:
        yield ranks


class Saved(NamedTuple):
    """What a rank has saved, with the weights of rank 0."""

    weights: dict[str, Tensor]
    state: dict[str, Any]


def save_together(training: Training) -> Saved:
    """What checkpoints do: the weights of rank 0, and the state of each rank after the newest exchange of any."""
    state = training.engine.state_dict()
    newest = torch.tensor([state["moment"]])
    dist.all_reduce(newest, dist.ReduceOp.MAX)
    if state["moment"] < int(newest):
        state = training.engine.state_dict(newest)
    weights = training.weights()
    for weight in weights.values():
        dist.broadcast(weight, 0)
    return Saved(weights, state)


def check_saved(both: Sequence[Saved], steps: int | None = None) -> None:
    """Whether what two ranks have saved together belongs together."""
    check_sums(both[0].weights, [saved.state for saved in both], steps)


def save_on_signals(moments: int, steps: int) -> list[Saved]:
    """All ranks are sent a signal at about the same time, again and again, while they train."""
    training, looks = Training(), []
    handled = threading.Event()

    def handle(*_: Any) -> None:
        looks.append(save_together(training))
        handled.set()

    def send() -> None:
        generator = random.Random(0)
        for _ in range(moments):
            time.sleep(generator.uniform(0.001, 0.008))
            handled.clear()
            os.kill(os.getpid(), signal.SIGUSR1)
            handled.wait()  # however long it takes: another handler within this one would mix up their messages

    before = signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send)
    for step in range(steps):
        if step == 3:  # DDP has cut its buckets anew
            dist.barrier()
            sender.start()
        training.backward()
        training.optimizer.step()
    sender.join()  # the handler goes on here
    signal.signal(signal.SIGUSR1, before)
    return looks


@pytest.mark.parametrize(("moments", "count"), by_default([(8, 90), (20, 200)]))
def test_ranks_that_are_sent_a_signal_save_the_same_step(two_ranks: Ranks, moments: int, count: int) -> None:
    seen = two_ranks(save_on_signals, moments, count)
    steps = set()
    for both in zip(*seen, strict=True):
        steps.add(both[0].state["step"])
        check_saved(both)
    assert len(steps) >= 3


class Interrupted(torch.optim.SGD):
    """Is sent a signal when it has updated half of its parameters, in its third step."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        parameters = self.param_groups[0]["params"]
        for place, p in enumerate(parameters):
            if self.steps == 3 and place == len(parameters) // 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            with torch.no_grad():
                p.add_(p.grad, alpha=-1.0)


def save_within_an_optimizer() -> Saved:
    training, looks = Training(Interrupted), []
    before = signal.signal(signal.SIGUSR1, lambda *_: looks.append(save_together(training)))
    for _ in range(3):
        training.backward()
        training.optimizer.step()
    signal.signal(signal.SIGUSR1, before)
    [saved] = looks
    return saved


def test_a_handler_waits_until_an_optimizer_has_stepped(two_ranks: Ranks) -> None:
    both = two_ranks(save_within_an_optimizer)
    assert not any(saved.state["pending"] or saved.state["absorbed"] for saved in both)
    check_saved(both, 3)


@dataclass(frozen=True)
class Late(ls.memories.Residual):
    """One rank is slow in the third step, when it has told the others that it comes."""

    rank: int = -1

    def absorb_(self, state: Any, grad: Gradient, ctx: Any) -> Any:
        if (dist.get_rank(), ctx.step) == (self.rank, 2):
            time.sleep(0.1)
        return super().absorb_(state, grad, ctx)


def save_apart(early: int, where: str) -> Saved:
    """One rank waits in the exchange of a step when a signal comes; the other one is at another moment."""
    late = 1 - early
    training, saved = Training(memory=Late(rank=late if where == "after the step" else -1)), []

    def save(*_: Any) -> None:
        saved.append(save_together(training))

    def send(seconds: float) -> None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1)).start()

    for _ in range(2):
        training.backward()
        training.optimizer.step()
    training.backward()
    before = signal.signal(signal.SIGUSR1, save)
    if dist.get_rank() == early:
        send(0.1)
    elif where != "after the step":
        time.sleep(0.3)  # the other rank's handler waits for this one's
    if dist.get_rank() == late and where == "before the step":
        save()
    if dist.get_rank() == late and where == "within the exchange":
        send(0.1)
    training.optimizer.step()
    if dist.get_rank() == late and where == "after the step":
        save()
    signal.signal(signal.SIGUSR1, before)
    training.backward()
    training.optimizer.step()
    return saved[0]


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("where", ["before the step", "within the exchange", "after the step"])
def test_a_rank_that_waits_saves_the_same_exchange_as_the_others(two_ranks: Ranks, early: int, where: str) -> None:
    both = two_ranks(save_apart, early, where)
    check_saved(both, 2 + (where == "after the step"))
    assert bool(both[0].state["pending"]) == (where == "after the step" and early == 0)
    absorbed = {"before the step": {early}, "within the exchange": {0, 1}, "after the step": set()}[where]
    assert [bool(saved.state["absorbed"]) for saved in both] == [rank in absorbed for rank in range(2)]


def ask_for_other_moments() -> list[str]:
    """For the state after an exchange that is over, and for one that does not come."""
    training, said = Training(), []
    for moment in (2, 0):
        training.backward()
        training.optimizer.step()
        with pytest.raises(RuntimeError) as error:
            training.engine.state_dict(torch.tensor([moment]))
        said.append(str(error.value))
    return said


def test_a_state_of_another_moment_is_not_given(alone: Ranks) -> None:
    [(future, past)] = alone(ask_for_other_moments)
    assert "Another rank has settled exchange 2, and this one has only settled 1. Save a moment later." in future
    assert "The state after exchange 0 is asked for, and this rank has settled 2." in past
    assert "take a state on each of them, and another one where" in past


@dataclass(frozen=True)
class Slow(ls.memories.Residual):
    """Takes a while after all communication is over."""

    def settle_(self, *args: Any) -> None:
        super().settle_(*args)
        time.sleep(0.03)


def ask_from_a_thread() -> list[Look]:
    """For the state after an exchange that is about to end, and after it."""
    training, looks = Training(memory=Slow()), []

    def ask() -> None:
        looks.append((training.weights(), training.engine.state_dict(torch.tensor([3]))))

    for _ in range(2):
        training.backward()
        training.optimizer.step()
    thread = threading.Thread(target=ask)
    training.when_backward_reaches("first", thread.start)
    training.backward()
    thread.join()
    looks.append((training.weights(), training.engine.state_dict(torch.tensor([3]))))
    return looks


@pytest.mark.in_backward
def test_a_state_is_waited_for(two_ranks: Ranks) -> None:
    looks = [*zip(*two_ranks(ask_from_a_thread), strict=True)]
    assert len(looks) == 2
    for ranks in looks:
        states = [state for _, state in ranks]
        check_sums(ranks[0][0], states, 3)
        assert len(states[0]["pending"]) == 4


# ---- Errors


@dataclass(frozen=True)
class FailsWithin(ls.memories.Residual):
    """Has an error in the third step, while the residual of the second group of 300 coordinates is being changed."""

    where: str = ""
    calls: list[int] = field(default_factory=list, repr=False, compare=False)

    def absorb_(self, state: Any, grad: Gradient, ctx: Any) -> Any:
        absorbed = super().absorb_(state, grad, ctx)
        self._fail("absorb", state)
        return absorbed

    def settle_(self, state: Any, *others: Any) -> None:
        self._fail("settle", state)
        super().settle_(state, *others)

    def _fail(self, where: str, state: Any) -> None:
        if where == self.where and state.residual.numel() == 301:
            self.calls.append(1)
            if len(self.calls) == 6:
                raise ZeroDivisionError("only here")


@dataclass(frozen=True)
class FailsBetween(ls.sparsifiers.TopK):
    """Has an error when all residuals are whole."""

    def select(self, acc: Tensor, state: Any, ctx: Any) -> Any:
        if ctx.step == 2 and acc.numel() == 20:
            raise ZeroDivisionError("only here")
        return super().select(acc, state, ctx)


def fail(options: dict[str, Any]) -> tuple[list[Look], list[str]]:
    """Looks after each step and after an error, if states are given then, and what else is said."""
    training, looks, said = Training(**options), [], []
    with pytest.raises(ZeroDivisionError):
        for _ in range(3):
            training.backward()
            training.optimizer.step()
            looks.append(training.look())
    try:
        looks.append(training.look())
    except RuntimeError as error:
        said.append(str(error))
    return looks, said


def test_after_an_error_there_is_a_state_unless_residuals_were_being_changed(alone: Ranks) -> None:
    for where in ("absorb", "settle"):
        [(looks, [said])] = alone(fail, {"memory": FailsWithin(where=where)})
        assert len(looks) == 2
        assert "An error has ended a step while residuals were being changed" in said
        assert "go on from an earlier checkpoint" in said
    [(looks, said)] = alone(fail, {"sparsifier": FailsBetween()})
    assert (len(looks), said) == (3, [])
    for steps, (weights, state) in zip((1, 2, 2), looks, strict=True):
        check_sums(weights, [state], steps)
    assert {"in_fourth.fourth", "in_third.third"} <= set(looks[-1][1]["absorbed"])


# ---- What else changes what is remembered


def flush_in_pieces() -> list[tuple[Look, int]]:
    """States while residuals are emptied, and the number of steps they should be of."""
    training = Training()
    for _ in range(4):
        training.backward()
        training.optimizer.step()
    looks = [(training.look(), 4)]
    pending = training.engine._take_pending()
    looks.append((training.look(), 4))
    for name, p in training.module.named_parameters():
        p.grad = pending[name]
    training.optimizer.step()
    looks.append((training.look(), 4))
    assert not any(training.engine.residual(name).any() for name in pending)
    ls.flush(training.engine, [training.optimizer])  # there is nothing left
    training.backward()
    looks.append((training.look(), 5))
    training.optimizer.step()
    looks.append((training.look(), 5))
    return looks


@pytest.mark.in_backward
def test_what_residuals_held_is_pending_until_it_is_applied(two_ranks: Ranks) -> None:
    seen = list(zip(*two_ranks(flush_in_pieces), strict=True))
    for both in seen:
        [steps] = {steps for _, steps in both}
        check_sums(both[0][0][0], [state for (_, state), _ in both], steps)
    assert [len(state["pending"]) for ((_, state), _), _ in seen] == [0, 4, 0, 4, 0]
