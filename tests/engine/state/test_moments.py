"""A state taken at any moment is that of the last completed step: weights and residuals of one and the same step."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.engine.state.test_state import Run
from tests.ranks import Ranks
from tests.sums import SPARSE, Sums, check_sums


class DataSGD(torch.optim.Optimizer):
    """Writes past autograd, as many optimizers outside of torch do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-group["lr"])


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

    def look(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        weights = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        return weights, self.engine.state_dict()


Look = tuple[dict[str, Tensor], dict[str, Any]]


def look_within_steps(executor: str, optimizer: Any) -> dict[str, list[Look]]:
    """What is seen at several moments of each of some steps."""
    training = Training(optimizer, executor=executor)
    looks: dict[str, list[Look]] = {"backward": [], "before": [], "between": [], "after": []}
    [in_the_middle] = [p for name, p in training.module.named_parameters() if name.endswith("second")]
    in_the_middle.register_post_accumulate_grad_hook(lambda _: looks["backward"].append(training.look()))
    for _ in range(5):
        looks["before"].append(training.look())
        training.backward()
        looks["between"].append(training.look())
        training.optimizer.step()
        looks["after"].append(training.look())
    training.engine.close()
    return looks


@pytest.mark.parametrize("executor", ["inline", "thread"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, DataSGD])
def test_a_state_belongs_to_the_weights(two_ranks: Ranks, executor: str, optimizer: Any) -> None:
    seen = two_ranks(look_within_steps, executor, optimizer)
    for moment in seen[0]:
        for step in range(5):
            both = [looks[moment][step] for looks in seen]
            check_sums(both[0][0], [state for _, state in both], step + (moment == "after"))
            assert {state["step"] for _, state in both} == {step + (moment == "after")}


def two_optimizers() -> list[Look]:
    """One exchange, and two optimizers that take its averages one after the other."""
    training = Training()
    parameters = list(training.module.parameters())
    optimizers = [torch.optim.SGD(part, lr=1.0) for part in (parameters[:2], parameters[2:])]
    training.engine.bind(optimizers)
    looks = []
    for _ in range(2):
        training.backward()
        for optimizer in optimizers:
            optimizer.step()
            looks.append(training.look())
    training.engine.close()
    return looks


def test_each_parameter_belongs_to_the_step_of_its_optimizer(two_ranks: Ranks) -> None:
    for number, both in enumerate(zip(*two_ranks(two_optimizers), strict=True)):
        names = list(both[0][0])
        done, half = divmod(number + 1, 2)
        steps = {name: done + (half and name in names[:2]) for name in names}
        check_sums(both[0][0], [state for _, state in both], steps)
        assert {state["step"] for _, state in both} == {done}


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
    engine.bind([optimizer])
    steps = []
    for _ in range(3):
        ddp(0).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = engine.state_dict()
        steps.append(state["step"])
    same = torch.equal(state["parameters"]["free"]["residual"], engine.residual("free"))
    engine.close()
    return steps, float(same)


def test_parameters_that_no_optimizer_holds_are_not_waited_for(two_ranks: Ranks) -> None:
    assert two_ranks(nobody_holds) == [([1, 2, 3], 1.0)] * 2


# ---- Several threads, signals, ranks at different moments


def look_from_a_thread(executor: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]]:
    """The training waits after each look, which may take place at any moment of a step."""
    training, looks, busy = Training(executor=executor), [], threading.Event()
    weights: list[dict[str, Tensor]] = [{name: p.detach().clone() for name, p in training.module.named_parameters()}]

    def look() -> None:
        generator = random.Random(0)
        while len(looks) < 40 and busy.wait(10):
            time.sleep(generator.uniform(0, 0.003))
            looks.append(training.engine.state_dict())

    thread = threading.Thread(target=look)
    thread.start()
    while thread.is_alive():
        busy.set()
        training.backward()
        training.optimizer.step()
        weights.append({name: p.detach().clone() for name, p in training.module.named_parameters()})
    training.engine.close()
    return [(weights[state["step"]], weights[min(state["step"] + 1, len(weights) - 1)], state) for state in looks]


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_another_thread_sees_whole_steps(alone: Ranks, executor: str) -> None:
    [looks] = alone(look_from_a_thread, executor)
    for weights, following, state in looks:
        for name in weights:  # the optimizer may have been in the middle of its step, past some parameters
            try:
                check_sums({name: weights[name]}, [state], state["step"])
            except AssertionError:
                check_sums({name: following[name]}, [state], state["step"] + 1)


@pytest.fixture(scope="module")
def alone() -> Any:
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


class Saved(NamedTuple):
    """What a rank has saved, with the weights of rank 0."""

    weights: dict[str, Tensor]
    steps: dict[str, int]
    """Of each weight: a handler may have interrupted an optimizer, past some of them."""
    state: dict[str, Any] | None
    refused: str = ""


def save_together(training: Training) -> Saved:
    """What checkpoints do: the weights of rank 0, and the state of each rank that belongs to them."""
    moment = training.engine.moment
    dist.broadcast(moment, 0)
    weights = {name: p.detach().clone() for name, p in training.module.named_parameters()}
    for weight in weights.values():
        dist.broadcast(weight, 0)
    steps = dict(zip(weights, moment.tolist()[1:], strict=True))
    try:
        return Saved(weights, steps, training.engine.state_dict(moment))
    except RuntimeError as error:
        return Saved(weights, steps, None, str(error))


def check_saved(both: Sequence[Saved]) -> None:
    """Whether what two ranks have saved together belongs together."""
    states = [saved.state for saved in both if saved.state is not None]
    assert len(states) == 2, [saved.refused for saved in both]
    check_sums(both[0].weights, states, both[0].steps)


def save_on_signals(moments: int, steps: int) -> list[Saved]:
    """All ranks are sent a signal at about the same time, again and again, while they train."""
    training, looks = Training(executor="thread"), []
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
    training.engine.close()
    return looks


def test_ranks_that_are_sent_a_signal_save_the_same_step(two_ranks: Ranks) -> None:
    seen = two_ranks(save_on_signals, 20, 200)
    refused, steps = 0, set()
    for both in zip(*seen, strict=True):
        if any(saved.refused for saved in both):
            refused += 1
            continue
        steps.add(both[0].state["step"])
        check_saved(both)
    assert refused <= 16  # where two signals came several exchanges apart: 1 to 7 of 20, up to 11 on a busy machine
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
    training, looks = Training(Interrupted, executor="thread"), []
    before = signal.signal(signal.SIGUSR1, lambda *_: looks.append(save_together(training)))
    for _ in range(3):
        training.backward()
        training.optimizer.step()
    signal.signal(signal.SIGUSR1, before)
    training.engine.close()
    [saved] = looks
    return saved


def test_a_handler_that_interrupts_an_optimizer_saves_each_parameter_with_its_own_step(two_ranks: Ranks) -> None:
    both = two_ranks(save_within_an_optimizer)
    assert list(both[0].steps.values()) == [3, 3, 2, 2]
    assert both[0].state["step"] == 2
    check_saved(both)


def save_apart(ahead: bool) -> Saved:
    """Rank 0 is at the end of backward, and rank 1 within the next one, if it is ahead, or has just stepped."""
    training = Training(executor="thread")
    training.backward()
    training.optimizer.step()
    training.backward()
    if dist.get_rank() == 0:
        saved = save_together(training)
        training.optimizer.step()
        training.backward()
    elif not ahead:
        training.optimizer.step()
        saved = save_together(training)
        training.backward()
    else:
        training.optimizer.step()
        results = []
        [in_the_middle] = [p for name, p in training.module.named_parameters() if name.endswith("first")]
        hook = in_the_middle.register_post_accumulate_grad_hook(lambda _: results.append(save_together(training)))
        training.backward()
        hook.remove()
        [saved] = results
    training.engine.close()
    return saved


def test_a_rank_that_is_one_optimizer_step_ahead_saves_what_was_before(two_ranks: Ranks) -> None:
    both = two_ranks(save_apart, False)
    assert set(both[0].steps.values()) == {1}
    check_saved(both)


def test_a_rank_that_has_gone_on_says_so(two_ranks: Ranks) -> None:
    """It has begun to write over what it held two exchanges ago."""
    first, second = two_ranks(save_apart, True)
    assert first.state["step"] == 1
    assert "are those after exchange 1, and this rank holds what it remembered after 2 only" in second.refused


# ---- What else changes what is remembered


class Watching(Run):
    """Saves between backward and the optimizer's step, where asked to."""

    def train(self, steps: int, save_at: int | None = None) -> bytes:
        saved = b""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(100 * self.step + dist.get_rank())
            self.optimizer.zero_grad()
            self.ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
            if self.step == save_at:
                saved = self.save()
            self.optimizer.step()
            self.step += 1
        return saved


def go_on_from_within_a_step(options: dict[str, Any]) -> tuple[bool, list[str]]:
    whole = Watching(**options)
    whole.engine.bind([whole.optimizer])
    saved = whole.train(13, save_at=7)
    expected, step = whole.digest(), whole.engine.step
    whole.engine.close()
    resumed = Watching(**options)
    resumed.engine.bind([resumed.optimizer])
    notes = resumed.load(saved)
    resumed.train(6)
    found = resumed.digest()
    same = len(found) == len(expected) and all(map(torch.equal, found, expected)) and resumed.engine.step == step
    resumed.engine.close()
    return same, notes


RUNS: list[dict[str, Any]] = [
    {"sparsifier": "union_topk"},
    {"sparsifier": "exdyna", "executor": "inline"},
    {"memory": ls.MomentumCorrection(0.9)},
    {"memory": ls.AdamCorrection(beta1=0.5)},
    {"memory": ls.LowPass(0.3)},
    {"density": ls.Accordion(0.02, 0.2, interval=4)},  # decides in the step that is repeated
    {"density": ls.Accordion(0.02, 0.2, interval=7)},
    {"density": ls.Accordion(0.02, 0.2, interval=3), "sparsifier": "everything"},
    {"lr_aware": True},
]


@pytest.mark.parametrize("options", RUNS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_run_goes_on_bit_for_bit_from_between_backward_and_step(two_ranks: Ranks, options: dict[str, Any]) -> None:
    for same, notes in two_ranks(go_on_from_within_a_step, options):
        assert notes == []
        assert same


def flush_in_pieces() -> list[tuple[Look, int]]:
    """States while residuals are emptied, and the number of steps they should be of."""
    training = Training()
    for _ in range(4):
        training.backward()
        training.optimizer.step()
    looks = [(training.look(), 4)]
    pending = training.engine.take_pending()
    looks.append((training.look(), 4))
    for name, p in training.module.named_parameters():
        p.grad = pending[name]
    training.optimizer.step()
    looks.append((training.look(), 4))
    assert not any(training.engine.residual(name).any() for name in pending)
    ls.flush(training.engine, [training.optimizer])  # there is nothing left
    training.backward()
    looks.append((training.look(), 4))
    training.optimizer.step()
    looks.append((training.look(), 5))
    training.engine.close()
    return looks


def test_residuals_that_are_emptied_belong_to_the_weights_too(two_ranks: Ranks) -> None:
    for both in zip(*two_ranks(flush_in_pieces), strict=True):
        [steps] = {steps for _, steps in both}
        check_sums(both[0][0][0], [state for (_, state), _ in both], steps)
