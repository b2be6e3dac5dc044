"""What a memory is, and the two buffers that most of them keep.

The ``residual`` and the ``acc`` of a group are swapped when a step is committed. What was remembered before the step
therefore stays whole until the next one begins, and a step that turns out to be void (a non-finite gradient on some
rank, in this group or in another one) is taken back bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_sparse.kernels import static_shapes
from lightning_sparse.types import Context, Update


class Memory(ABC):
    """Turns gradients into accumulators and forgets what was sent. A frozen dataclass of settings, nothing else."""

    @property
    def reads_parameters(self) -> bool:
        """Whether :meth:`accumulate_` needs ``ctx.parameters``."""
        return False

    @property
    def has_momentum(self) -> bool:
        """Whether it averages gradients over steps itself, and says so where the optimizer does, too."""
        return False

    @abstractmethod
    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Any:
        """State for one group, empty. ``dtype`` is the accumulator's, float32 or float64."""

    @abstractmethod
    def accumulate_(self, state: Any, grad: Tensor, ctx: Context) -> Tensor:
        """Form the accumulator of this step.

        Args:
            state: this group's state.
            grad: (numel,) or (numel + 1,), this rank's gradient. The average takes its place at the end of the step; a
                memory may scale it before, and may look at it again in :meth:`forget_`.
            ctx: the step.

        Returns:
            acc, (numel + 1,), the last slot zero. Scratch until :meth:`forget_`; what is remembered is unchanged.
        """

    @abstractmethod
    def forget_(self, state: Any, update: Update) -> None:
        """Commit the step: take what was sent out of acc and remember the rest."""

    @abstractmethod
    def keep_(self, state: Any, update: Update, rounding: Tensor) -> None:
        """Take back what casting the average to the gradient's dtype lost: (u,) at the update's coordinates."""

    @abstractmethod
    def undo_(self, state: Any, void: Tensor) -> None:
        """Take the latest commit back, bit for bit, where the flag is set; once, before the next step begins."""

    @abstractmethod
    def vectors(self, state: Any) -> dict[str, Tensor]:
        """What is remembered of each coordinate, by name: the live buffers, numel slots and a spare one."""

    @abstractmethod
    def residual(self, state: Any) -> Tensor | None:
        """(numel,) view of what has not been sent yet, or None if nothing is remembered."""

    def set_aside_(self, state: Any, spans: list[slice]) -> list[Tensor]:
        """Empty the memory in these spans and return what was there, for :meth:`bring_back_`."""
        aside = []
        for vector in self.vectors(state).values():
            for span in spans:
                aside.append(vector[span].clone())
                vector[span].zero_()
        return aside

    def bring_back_(self, state: Any, spans: list[slice], aside: list[Tensor]) -> None:
        """Undo :meth:`set_aside_`, whatever a step in between has left there."""
        places = [vector[span] for vector in self.vectors(state).values() for span in spans]
        for place, piece in zip(places, aside, strict=True):
            place.copy_(piece)

    def carry_(self, state: Any, target: slice, memory: Memory, other: Any, source: slice) -> None:
        """Take over what is remembered of some coordinates from the state of another group.

        Args:
            state: of the group that takes.
            target: where the coordinates lie in it.
            memory: of the other group: this one, or one that remembers less.
            other: state of the other group.
            source: where the coordinates lie there.
        """
        vectors = self.vectors(state)
        for name, vector in memory.vectors(other).items():
            vectors[name][target].copy_(vector[source])

    def counters(self, state: Any) -> dict[str, Tensor]:
        """What is remembered of the group as a whole, by name; the live tensors, to be read and overwritten."""
        return {}

    def for_dense(self) -> Memory:
        """The memory of groups that are kept dense, where nothing is left unsent."""
        return NoMemory()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  # most have nothing to say
        """Look at an optimizer that will be given the averages.

        Raises:
            ValueError: if the two do not go together; a warning where they may.
        """


@dataclass(frozen=True)
class NoMemory(Memory):
    """No error feedback: what is not sent in its own step is lost. For comparison, and for dense groups.

    Training on a biased selection without feedback converges worse or not at all; use :class:`Residual`.
    """

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """One vector of ``numel + 1`` slots, scratch for acc."""
        return torch.zeros(numel + 1, device=device, dtype=dtype)

    def accumulate_(self, state: Tensor, grad: Tensor, ctx: Context) -> Tensor:
        """``acc = grad``."""
        numel = state.numel() - 1
        state[:numel].copy_(grad[:numel])
        state[numel:].zero_()
        return state

    def forget_(self, state: Tensor, update: Update) -> None:
        """Nothing is remembered."""

    def keep_(self, state: Tensor, update: Update, rounding: Tensor) -> None:
        """Nothing is remembered."""

    def undo_(self, state: Tensor, void: Tensor) -> None:
        """Nothing is remembered."""

    def vectors(self, state: Tensor) -> dict[str, Tensor]:
        """None."""
        return {}

    def residual(self, state: Tensor) -> None:
        """Always None."""


@dataclass
class FeedbackState:
    """Two buffers of numel + 1 slots, swapped at each commit."""

    residual: Tensor
    acc: Tensor
    """Between steps, the residual before the latest one."""


StateT = TypeVar("StateT", bound=FeedbackState)


class Feedback(Memory):
    """What all memories with a residual have in common; they differ in :meth:`accumulate_`."""

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> FeedbackState:
        """Two zero vectors of ``numel + 1`` slots."""
        return FeedbackState(*zeros(2, numel, device, dtype))

    def forget_(self, state: FeedbackState, update: Update) -> None:
        """``residual = acc`` with the sent coordinates at zero, or at the rounding error of what was sent."""
        self.settle_(state, update)
        state.residual, state.acc = state.acc, state.residual

    def undo_(self, state: FeedbackState, void: Tensor) -> None:
        """Swap back."""
        state.residual, state.acc = take_back(state.residual, state.acc, void)

    def settle_(self, state: FeedbackState, update: Update) -> None:
        """Turn acc into the next residual: leave in it what did not travel."""
        acc = state.acc
        if update.sent is None:
            if update.sent_values is None:
                acc.zero_()
            else:
                acc[:-1].sub_(update.sent_values)
        elif update.sent_values is None:
            acc.index_fill_(0, update.sent, 0)
        else:
            acc.index_copy_(0, update.sent, acc[update.sent] - update.sent_values)

    def keep_(self, state: FeedbackState, update: Update, rounding: Tensor) -> None:
        """Each rank keeps the rounding error of the mean; over n ranks that is n times it, what the sum lost."""
        if update.indices is None:
            state.residual[:-1].add_(rounding)
            return
        # Not index_add_: a repeated coordinate carries the same value and must count once.
        state.residual.index_copy_(0, update.indices, state.residual[update.indices] + rounding)
        state.residual[-1:].zero_()

    def vectors(self, state: FeedbackState) -> dict[str, Tensor]:
        """The residual."""
        return {"residual": state.residual}

    def residual(self, state: FeedbackState) -> Tensor:
        """(numel,) view."""
        return state.residual[:-1]


def zeros(count: int, numel: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Vectors of ``numel + 1`` slots."""
    return [torch.zeros(numel + 1, device=device, dtype=dtype) for _ in range(count)]


def take_back(now: Tensor, before: Tensor, void: Tensor) -> tuple[Tensor, Tensor]:
    """The buffer that counts, and the other one: ``before`` takes the place of ``now`` where the flag is set."""
    if static_shapes(void.device):
        return torch.where(void, before, now, out=now), before
    return (before, now) if void else (now, before)


def check_share(value: float, name: str, *, zero: bool = False, one: bool = True) -> None:
    """Raise if a setting is no real number between 0 and 1, of which each end may or may not be allowed.

    Raises:
        ValueError: naming the setting and the interval.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1 or (value == 0 and not zero) or (value == 1 and not one):
        interval = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
        raise ValueError(f"Expected {name} to be a number in {interval} but got {value!r}.")
