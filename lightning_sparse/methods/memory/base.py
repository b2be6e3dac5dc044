"""What a memory is, and the pairs of buffers that most of them keep.

A step reads one buffer of each pair and writes the other one. When the step is committed, the two exchange their roles:
what is remembered is never written to, and what was remembered before stays whole until the next step begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.registry import Registry
from lightning_sparse.core.step import Context, Update
from lightning_sparse.ops import copy_if_, put_, static_shapes, take, zeros

HOST_PIECE, DEVICE_PIECE = 1 << 15, 1 << 24
"""Elements worked on at once: what is only needed on the way stays in cache, or below 64 MiB."""


class Memory(ABC):
    """Turns gradients into accumulators and forgets what was sent. A frozen dataclass of settings, nothing else.

    A step goes through :meth:`accumulate_`, :meth:`settle_` and :meth:`commit`, in this order. The first two change
    nothing that is remembered; a step that is given up after them leaves no trace.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if old := {"check_optimizer", "has_momentum"} & vars(cls).keys():
            raise TypeError(
                f"Expected the memory {cls.__name__} not to define {' and '.join(sorted(old))}, which nobody calls any "
                "more: say by the properties averages and decays what is averaged over ranks."
            )

    @property
    def reads_parameters(self) -> bool:
        """Whether :meth:`accumulate_` needs ``ctx.parameters``."""
        return False

    @property
    def needs_second(self) -> bool:
        """Whether exchanges have to average :meth:`second`, too."""
        return False

    @property
    def second_decay(self) -> float:
        """By how much :meth:`second` is multiplied in a step, in [0, 1), where there is one."""
        return 0.0

    @property
    def averages(self) -> Literal["gradients", "velocities", "directions"]:
        """What ranks average. Velocities and directions are for optimizers that do not form them, too."""
        return "gradients"

    @property
    def decays(self) -> bool:
        """Whether what is averaged holds a weight decay."""
        return False

    @abstractmethod
    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Any:
        """State for one group, empty. ``dtype`` is the accumulator's, float32 or float64."""

    @abstractmethod
    def accumulate_(self, state: Any, grad: Gradient, ctx: Context) -> Tensor:
        """Form the accumulator of this step.

        Args:
            state: this group's state.
            grad: this rank's gradient, in runs. The average takes its place at the end of the step; a memory may
                overwrite it before.
            ctx: the step.

        Returns:
            acc, (numel + 1,), the last slot zero. The caller may change it until :meth:`settle_`.
        """

    def score_(self, state: Any, acc: Tensor, grad: Gradient, ctx: Context) -> Tensor | None:
        """What coordinates are selected by: the larger the magnitude, the sooner they are sent.

        Args:
            state: this group's state, in a step that has been accumulated.
            acc: what :meth:`accumulate_` gave.
            grad: this rank's gradient; the score may take its place, or its :meth:`~.Gradient.room`.
            ctx: the step.

        Returns:
            (numel,), or None: acc itself.
        """
        return None

    def second(self, state: Any) -> Tensor | None:
        """(numel + 1,) vector whose mean over ranks is wanted wherever an average arrives; None: nothing more."""
        return None

    @abstractmethod
    def settle_(self, state: Any, update: Update, rounding: Tensor | None = None) -> None:
        """Turn acc into what is to be remembered: take out what was sent.

        Args:
            state: this group's state.
            update: what the ranks agreed on. Some exchanges have taken out of acc already what they sent
                (:attr:`Update.settled <lightning_sparse.core.step.Update.settled>`); :func:`take_out_` knows.
            rounding: (u,) what casting the average to the gradient's dtype lost, at the update's coordinates.
        """

    @abstractmethod
    def commit(self, state: Any, void: Tensor | bool, unused: Sequence[slice] = ()) -> Any:
        """The state after the step; the given one is still that of before, until the next step begins.

        Args:
            state: this group's state.
            void: () whether the step counts for nothing; a bool where the host knows it.
            unused: coordinates of parameters that no rank used: what is remembered of them stays as it was.
        """

    def divisor(self, state: Any) -> Tensor | None:
        """(numel + 1,) what the latest averages have to be divided by to be steps of Adam; None: they are gradients."""
        return None

    def lengthen_(self, state: Any, where: Tensor | slice, by: Tensor) -> None:  # noqa: B027  # most divide nothing
        """Multiply :meth:`divisor` as if gradients had been so many times longer.

        Args:
            state: this group's state.
            where: (u,) int64 coordinates, or a range of them.
            by: (u,) or (), at least 0.
        """

    def divide_all_(  # noqa: B027  # most divide nothing
        self, state: Any, average: Tensor, mean: Callable[[Tensor], Tensor], density: float
    ) -> None:
        """Form :meth:`divisor` for averages at all coordinates, between two steps; collective.

        Args:
            state: this group's state.
            average: (numel,) of residuals.
            mean: over ranks, of a vector.
            density: that the next step would have.
        """

    def scale(self, state: Any, factors: Sequence[tuple[slice, float]]) -> Any:
        """The state with the residual multiplied by factors; the given one is still that of before.

        Args:
            state: this group's state, between two steps.
            factors: for spans that cover all coordinates.
        """
        return state

    @abstractmethod
    def vectors(self, state: Any) -> dict[str, Tensor]:
        """What is remembered of each coordinate, by name: the live buffers, numel slots and a spare one."""

    @abstractmethod
    def residual(self, state: Any) -> Tensor | None:
        """(numel,) view of what has not been sent yet, or None if nothing is remembered."""

    def carry_(self, state: Any, target: slice, memory: Memory, other: Any, source: slice) -> None:
        """Take over what is remembered of some coordinates from the state of another group.

        Args:
            state: of the group that takes, which is still being formed.
            target: where the coordinates lie in it.
            memory: of the other group. What this one has no place for is dropped.
            other: state of the other group.
            source: where the coordinates lie there.
        """
        vectors, others = self.vectors(state), memory.vectors(other)
        for name in vectors.keys() & others.keys():
            vectors[name][target].copy_(others[name][source])
        self.complete_(state, target, others.keys())

    def complete_(self, state: Any, span: slice, names: Collection[str]) -> None:  # noqa: B027  # most start at zero
        """Make up for vectors that are not known of some coordinates, when a state is being formed.

        Args:
            state: what is known is in it.
            span: the coordinates.
            names: of the vectors that are known.
        """

    def start_(  # noqa: B027  # most have none
        self, state: Any, second: Tensor, spans: Sequence[slice], steps: float
    ) -> None:
        """Start from second moments of earlier gradients, where none is known yet, when a state is being formed.

        Args:
            state: is changed.
            second: (numel,), corrected for their start at 0.
            spans: where they are meant.
            steps: that they are of; where steps are known already, these count.
        """

    def adapted(self, state: Any, before: Memory) -> Any:
        """The state for this memory, as it was for one of its kind with other settings; the given one stays.

        Args:
            state: of a group, between two steps.
            before: the other one.
        """
        return state

    def counters(self, state: Any) -> dict[str, Tensor]:
        """What is remembered of the group as a whole, by name; the tensors themselves, to be filled at the start."""
        return {}

    def for_dense(self) -> Memory:
        """The memory of groups that are kept dense, where nothing is left unsent."""
        return NoMemory()


MEMORIES: Registry[Memory] = Registry("memory", Memory)  # type: ignore[type-abstract]
"""Error feedback by name."""


@MEMORIES.register
@dataclass(frozen=True)
class NoMemory(Memory):
    """No error feedback: what is not sent in its own step is lost. For comparison, and for dense groups.

    Training on a biased selection without feedback converges worse or not at all; use :class:`Residual`.
    """

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """One vector of ``numel + 1`` slots, scratch for acc."""
        return zeros(numel + 1, device, dtype)

    def accumulate_(self, state: Tensor, grad: Gradient, ctx: Context) -> Tensor:
        """``acc = grad``."""
        for span, run in grad:
            state[span].copy_(run)
        state[-1:].zero_()
        return state

    def settle_(self, state: Tensor, update: Update, rounding: Tensor | None = None) -> None:
        """Nothing is remembered."""

    def commit(self, state: Tensor, void: Tensor | bool, unused: Sequence[slice] = ()) -> Tensor:
        """The same."""
        return state

    def vectors(self, state: Tensor) -> dict[str, Tensor]:
        """None."""
        return {}

    def residual(self, state: Tensor) -> None:
        """Always None."""


class Pair(NamedTuple):
    """Two vectors of numel + 1 slots: what is remembered, and the one that a step writes."""

    now: Tensor
    following: Tensor
    """Between steps, what was remembered before the latest one."""

    @classmethod
    def zeros(cls, numel: int, device: torch.device, dtype: torch.dtype) -> Pair:
        """Both empty."""
        return cls(*(zeros(numel + 1, device, dtype) for _ in range(2)))

    def commit(self, void: Tensor | bool, unused: Sequence[slice]) -> Pair:
        """What follows becomes what is remembered, unless the flag is set; see :meth:`Memory.commit`."""
        if isinstance(void, Tensor) and static_shapes(void.device):
            copy_if_(self.following, self.now, void)
        elif void:
            return self
        for span in unused:
            self.following[span].copy_(self.now[span])
        return Pair(self.following, self.now)

    def scale(self, factors: Sequence[tuple[slice, float]]) -> Pair:
        """What is remembered times factors, see :meth:`Memory.scale`."""
        for span, factor in factors:
            torch.mul(self.now[span], factor, out=self.following[span])
        return Pair(self.following, self.now)


@dataclass(frozen=True)
class FeedbackState:
    """What is remembered of a group, in pairs; a commit makes a new one of the same buffers."""

    residual: Pair
    """What follows is acc, while a step goes on."""

    @property
    def pairs(self) -> dict[str, Pair]:
        """Pairs of buffers by name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Pair)}


class Feedback(Memory):
    """What all memories with a residual have in common; they differ in :meth:`accumulate_`."""

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> FeedbackState:
        """Two zero vectors of ``numel + 1`` slots."""
        return FeedbackState(Pair.zeros(numel, device, dtype))

    def settle_(self, state: FeedbackState, update: Update, rounding: Tensor | None = None) -> None:
        """Leave in acc what did not travel.

        Each rank keeps the rounding error of the mean; over n ranks that is n times it, what the sum lost.
        """
        take_out_(state.residual.following, update)
        if rounding is not None:
            give_back_(state.residual.following, update, rounding)

    def commit(self, state: FeedbackState, void: Tensor | bool, unused: Sequence[slice] = ()) -> FeedbackState:
        """All pairs."""
        return replace(state, **{name: pair.commit(void, unused) for name, pair in state.pairs.items()})

    def scale(self, state: FeedbackState, factors: Sequence[tuple[slice, float]]) -> FeedbackState:
        """The residual and nothing else."""
        return replace(state, residual=state.residual.scale(factors))

    def vectors(self, state: FeedbackState) -> dict[str, Tensor]:
        """All that there are."""
        return {name: pair.now for name, pair in state.pairs.items()}

    def residual(self, state: FeedbackState) -> Tensor:
        """(numel,) view."""
        return state.residual.now[:-1]


@dataclass(frozen=True)
class CountedState(FeedbackState):
    """Pairs, and the number of committed steps."""

    steps: Tensor
    """() float64."""


class CountedFeedback(Feedback):
    """A residual, and moments that are corrected by the number of committed steps, as Adam's are."""

    def commit(  # type: ignore[override]
        self, state: CountedState, void: Tensor | bool, unused: Sequence[slice] = ()
    ) -> CountedState:
        """All pairs; steps that are void do not count."""
        after = super().commit(state, void, unused)
        return replace(after, steps=state.steps + (not void if isinstance(void, bool) else ~void))  # type: ignore[return-value, call-arg]

    def carry_(self, state: CountedState, target: slice, memory: Memory, other: Any, source: slice) -> None:
        """Vectors, and the number of steps: the largest, where groups that become one have counted differently."""
        super().carry_(state, target, memory, other, source)
        if isinstance(other, type(state)):
            state.steps.copy_(torch.maximum(state.steps, other.steps))

    def counters(self, state: CountedState) -> dict[str, Tensor]:
        """The number of steps."""
        return {"steps": state.steps}


def pieces(x: Gradient) -> Iterator[tuple[slice, Tensor]]:
    """To work on one after the other, so that what is only needed on the way stays in cache."""
    return x.cut(DEVICE_PIECE if static_shapes(x.device) else HOST_PIECE)


def take_out_(acc: Tensor, update: Update) -> None:
    """Set what was sent to zero, or to the rounding error of what was sent."""
    if update.sent is None:
        if update.sent_values is None:
            acc.zero_()
        else:
            acc[:-1].sub_(update.sent_values)
    elif update.sent_values is None:
        put_(acc, update.sent, 0.0)
    else:
        put_(acc, update.sent, take(acc, update.sent) - update.sent_values)


def give_back_(acc: Tensor, update: Update, rounding: Tensor) -> None:
    """Add what casting the average lost."""
    if update.indices is None:
        acc[:-1].add_(rounding)
        return
    # Not index_add_: a repeated coordinate carries the same value and must count once.
    put_(acc, update.indices, take(acc, update.indices) + rounding)
    acc[-1:].zero_()
