"""Trainings that keep account of each gradient, to compare what states hold at any moment with what was absorbed.

With ``T = sum_i residual_i + n (pending + applied)``, where an average is applied when an optimizer has taken a step
with it, T changes when a rank absorbs a gradient, by what the memory makes of that gradient, and never otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import lightning_sparse as ls
from lightning_sparse.methods.grouping import make_plan
from tests.sums import SPARSE, Sums, count, pending, waiting


@dataclass(frozen=True)
class Case:
    """A training, and where it is looked at."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of ``ls.attach``."""
    optimizer: Callable[..., Optimizer] = SGD
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 1.0})
    """Of the optimizer."""
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    """Of the loss."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Of DistributedDataParallel."""
    local: int = 0
    """Backwards within ``no_sync()`` before each synchronised one."""
    exchanges: int = 1
    """Synchronised backwards before each step."""
    optimizers: int = 1
    in_turn: bool = False
    """Whether one optimizer steps after each backward, while gradients of the others add up."""
    clip: float | None = None
    """To what the norm of gradients is clipped between backward and step."""
    bad: int | None = None
    """The backward in which rank 1 has some gradients that are not finite."""
    flush: int | None = None
    """The step in which all is sent."""
    empties: int | None = None
    """The step before which residuals are emptied."""
    regroup: int | None = None
    """The step between whose backward and end groups change."""
    unused: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Parameters that no rank uses in a step."""
    steps: int = 4
    off: float = 0.0
    """By how much sums may be off, relative to the largest."""


class Look(NamedTuple):
    """At a rank at some moment."""

    moment: str
    given: dict[str, Tensor]
    """Gradients with which this rank enters the step that an optimizer takes, in double precision."""
    handed: dict[str, Tensor]
    """The latest averages."""
    applied: dict[str, Tensor]
    """Sums of averages with which optimizers have taken a step."""
    weights: dict[str, Tensor]
    state: dict[str, Any]


class Training:
    """Of a case, on this rank."""

    def __init__(self, case: Case) -> None:
        self.case, self.looks = case, list[Look]()
        self.module = Sums().to(case.dtype)
        self.ddp = DistributedDataParallel(self.module, bucket_cap_mb=0.0005, **case.ddp)
        self.engine = ls.attach(self.ddp, **{**SPARSE, **case.options})
        self.engine._binding.watchers.append(self._within)
        self.parameters = dict(self.module.named_parameters())
        share = len(self.parameters) // case.optimizers
        every = list(self.parameters.values())
        parts = [every[i * share : (i + 1) * share] for i in range(case.optimizers)]
        self.optimizers = [case.optimizer(part, **case.settings) for part in parts]
        self.given: dict[str, Tensor] = {}
        self.handed: dict[str, Tensor] = {}
        self.applied = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.register_hook(lambda grad, name=name: self._spoil(name, grad))
        self.backwards = 0
        """Synchronised ones."""

    def _spoil(self, name: str, grad: Tensor) -> Tensor:
        if self.backwards == self.case.bad and dist.get_rank() == 1 and name.endswith(("first", "fourth")):
            grad = grad.clone()
            grad.view(-1)[:5] = torch.tensor([math.nan, math.inf, -math.inf, math.nan, 1.0])
        return grad

    def look(self, moment: str) -> None:
        own = [{name: x.clone() for name, x in each.items()} for each in (self.given, self.handed, self.applied)]
        weights = {name: p.detach().double() for name, p in self.parameters.items()}
        self.looks.append(Look(moment, *own, weights, self.engine.state_dict()))

    def gradients_of(self, optimizer: Optimizer) -> dict[str, Tensor]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        pairs = [(name, p.grad) for name, p in self.parameters.items() if id(p) in held]
        return {name: grad.double() for name, grad in pairs if grad is not None}

    def _within(self, optimizer: Optimizer) -> None:
        """Averages are in the place of gradients; Adam's are applied already, and DDP's are in no state."""
        if not (self.engine._binding.takes(optimizer) or self.engine.stepper.left_to_ddp):
            self.handed = self.gradients_of(optimizer)
            self.look("within a step")

    def backward(self) -> None:
        without = self.case.unused.get(self.backwards, ())
        for _ in range(self.case.local):
            with self.ddp.no_sync():
                (self.ddp(dist.get_rank(), without) * self.case.scale).backward()
            self.look("between two backwards")
        (self.ddp(dist.get_rank(), without) * self.case.scale).backward()
        self.backwards += 1
        self.look("after backward")

    def regroup(self) -> None:
        parameters = [p for group in self.engine.groups for p in group.parameters][::-1]
        self.engine.regroup(make_plan(parameters, "model", rules=ls.Rules(dense_ndim=0, dense_numel=0)))
        self.look("regrouped")

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        if self.case.scale != 1:
            for parameter in (p for optimizer in optimizers for p in optimizer.param_groups[0]["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(self.case.scale)
            self.look("unscaled")
        if self.case.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.case.clip)
            self.look("clipped")
        for optimizer in optimizers:
            given = self.gradients_of(optimizer)
            self.given = given if all(bool(x.isfinite().all()) for x in given.values()) else {}
            self._take(optimizer)

    def _take(self, optimizer: Optimizer) -> None:
        optimizer.step()
        for name, average in self.gradients_of(optimizer).items():
            self.applied[name] += average
        self.look("after a step")
        self.given = {}

    def run(self, steps: int) -> None:
        self.look("before")
        for step in range(steps):
            for optimizer in () if self.case.in_turn else self.optimizers:
                optimizer.zero_grad()
            if step == self.case.empties:
                self.empty()
            if step == self.case.flush:
                self.engine._flush_next_step()
            for number in range(self.case.exchanges):
                self.backward()
                if self.case.in_turn:
                    self.step(self.optimizers[number : number + 1])
                    self.optimizers[number].zero_grad()
            if step == self.case.regroup:
                self.regroup()
            if not self.case.in_turn:
                self.step(self.optimizers)

    def empty(self) -> None:
        """Apply what residuals hold, as a flush does."""
        self.engine._binding.know(self.optimizers)
        averages = self.engine._take_pending()
        self.handed = {name: average.double() for name, average in averages.items()}
        self.look("emptied")
        for name, average in averages.items():
            self.parameters[name].grad = average
        for optimizer in self.optimizers:
            self._take(optimizer)
        self.engine.stepper.end_flush()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def resume(self, looks: Sequence[Look]) -> None:
        """Go on from what all ranks of a run have seen, maybe on another number of ranks."""
        first, n = looks[0], dist.get_world_size()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(first.weights[name])
        states = [look.state for look in looks]
        notes = self.engine.load_state_dict(states[dist.get_rank()] if len(states) == n else ls.merge_states(states))
        assert all("starts anew" in note for note in notes), notes
        assert not notes or len(states) != n or self.case.regroup is not None, notes
        self.handed, self.applied = (
            {name: x.clone() for name, x in each.items()} for each in (first.handed, first.applied)
        )
        self.look("resumed")

    def close(self) -> list[Look]:
        self.engine.close()
        return self.looks


# ---- What memories make of a gradient

Before = dict[str, Tensor]
"""What a rank remembers of a parameter, and how many steps it has counted."""


def plain(memory: Any, before: Before, grad: Tensor, weight: Tensor, n: int) -> Tensor:
    return grad - (1 - memory.decay) * before["residual"]


def velocity(memory: Any, before: Before, grad: Tensor, weight: Tensor, n: int) -> Tensor:
    following = memory.momentum * (before["momentum"] + grad if memory.nesterov else before["momentum"])
    return following + grad


def direction(memory: Any, before: Before, grad: Tensor, weight: Tensor, n: int) -> Tensor:
    steps = before["steps"] + 1
    first = grad if not memory.beta1 else memory.beta1 * before["first"] + (1 - memory.beta1) * grad
    second = memory.beta2 * before["second"] + (1 - memory.beta2) * grad.square()
    first, second = first / (1 - memory.beta1**steps), second / (1 - memory.beta2**steps)
    return math.sqrt(n) * first / (second.sqrt() + memory.eps)


def unchanged(memory: Any, before: Before, grad: Tensor, weight: Tensor, n: int) -> Tensor:
    return grad if grad.isfinite().all() else math.nan * grad  # its length is not known


def clipped(memory: Any, before: Before, grad: Tensor, weight: Tensor, n: int) -> Tensor:
    share = (memory.max_norm / math.sqrt(n) / grad.norm()).clamp(max=1)
    return absorbed(memory.memory, before, share * unchanged(memory, before, grad, weight, n), weight, n)


def decayed(memory: Any, before: Before, grad: Tensor, weight: Tensor, n: int) -> Tensor:
    return absorbed(memory.memory, before, grad + memory.decay * weight, weight, n)


RULES: dict[type[Any], Callable[..., Tensor]] = {
    ls.memories.Residual: plain,
    ls.memories.MomentumCorrection: velocity,
    ls.memories.AdamCorrection: direction,
    ls.memories.SecondMoment: unchanged,
    ls.memories.LowPass: lambda memory, before, grad, weight, n: memory.beta * grad,
    ls.memories.ClipByNorm: clipped,
    ls.memories.WeightDecay: decayed,
}


def absorbed(memory: Any, before: Before, grad: Tensor, weight: Tensor, n: int) -> Tensor:
    """By what T changes when one of n ranks absorbs a gradient, in double precision; NaN: by nothing."""
    return RULES[type(memory)](memory, before, grad, weight, n)


def check(ranks: Sequence[Sequence[Look]], memory: Any, off: float = 0.0) -> None:
    """Whether all that was absorbed is there in each look of all ranks, for each parameter and coordinate.

    Args:
        ranks: the looks of each rank, at the same moments.
        memory: theirs.
        off: by how much sums may be off, relative to the largest.
    """
    for before, after in pairwise(zip(*ranks, strict=True)):
        for look, other in zip(before, after, strict=True):
            assert other.moment != "resumed" or look.state["step"] == other.state["step"]
        _check_pending(after[0])
        for name in kept_by(before):
            expected = total(before, name, memory) + sum(
                more(look, other, name, memory, len(ranks)) for look, other in zip(before, after, strict=True)
            )
            if after[0].moment == "resumed":
                expected += given_back(before, name, memory)
            found = total(after, name, memory)
            worst = float((found - expected).abs().max())
            assert worst <= off * float(expected.abs().max()), (name, before[0].moment, after[0].moment, worst)


def check_resized(before: Sequence[Look], after: Sequence[Look], memory: Any, off: float) -> None:
    """Whether as much is there, in the mean over ranks, when another number of ranks has loaded a state; as above."""
    for name in kept_by(before):
        expected = (total(before, name, memory) + given_back(before, name, memory)) / len(before)
        worst = float((total(after, name, memory) / len(after) - expected).abs().max())
        assert worst <= off * float(expected.abs().max()), (name, worst)


def kept_by(looks: Sequence[Look]) -> list[str]:
    """Names of the parameters of which something may wait; of those that are always sent as a whole, nothing does."""
    return [name for name, vectors in looks[0].state["parameters"].items() if "residual" in vectors]


def total(looks: Sequence[Look], name: str, memory: Any) -> Tensor:
    """(numel,) T, from the looks of all ranks at a moment."""
    states = [look.state for look in looks]
    away = pending(states, name)
    kept = waiting(states, name) - len(looks) * away
    if name in states[0]["pending"]:
        assert torch.equal(away, looks[0].handed[name].flatten()), name
    return kept + share_of(memory) * len(looks) * (away + looks[0].applied[name].flatten())


def share_of(memory: Any) -> float:
    """Which share of an average leaves the residual when it is handed out."""
    return float(memory.beta) if isinstance(memory, ls.memories.LowPass) else 1.0


def given_back(looks: Sequence[Look], name: str, memory: Any) -> Tensor:
    """(numel,) by what T grows when a state is loaded: all that nobody has applied goes back."""
    return (1 - share_of(memory)) * len(looks) * pending([look.state for look in looks], name)


def more(look: Look, later: Look, name: str, memory: Any, n: int) -> Tensor | float:
    """(numel,) by what T grows from one look of a rank to the next; 0: no gradient was absorbed."""
    if later.moment == "resumed":
        assert not later.state["absorbed"] and not later.state["pending"]
        return 0.0
    if isinstance(memory, ls.memories.LowPass):  # whose residual follows when a step has ended, skipped or not
        grown = sum(int(later.state[steps]) - int(look.state[steps]) for steps in ("step", "skipped_steps"))
    else:
        grown = count(later.state, name) - count(look.state, name)
    assert grown in (0, 1), (name, later.state["rank"], later.moment, grown)
    if not grown or name not in later.given:
        return 0.0
    known = {key: x.double() for key, x in look.state["parameters"][name].items()}
    known["steps"] = torch.tensor(look.state["counters"][name].get("steps", 0.0)).double()
    made = absorbed(memory, known, later.given[name].flatten(), later.weights[name].flatten(), n)
    return made.nan_to_num(0, 0, 0)


def _check_pending(look: Look) -> None:
    """Whether averages are pending from exchange to step, and only there."""
    expected = look.handed.keys() & set(kept_by([look])) if look.moment in ("within a step", "emptied") else set()
    assert set(look.state["pending"]) == expected, look.moment
