"""The protocol of memories, and the residual that most of them keep.

There is one vector of each thing remembered. A step takes the gradient in at once (:meth:`Memory.absorb_`); when it is
known that the step counts, what was sent leaves again (:meth:`Memory.settle_`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.registry import Registry
from lightning_sparse.core.step import Absorbed, Context, Update
from lightning_sparse.ops import all_finite, static_shapes, subtract_at_, zeros

OLD_NAMES = {
    "accumulate_": "absorb_ adds the gradient to the residual in place and returns Absorbed",
    "score_": "Absorbed.score",
    "second": "Absorbed.second",
    "commit": "a step that counts ends with settle_, a skipped one without",
    "divisor": "divisors returns one value for each average",
    "scale": "scale_ works in place",
    "adapted": "adapt_ works in place",
    "check_optimizer": "the properties averages and decays say what is averaged over ranks",
    "has_momentum": "the properties averages and decays say what is averaged over ranks",
}
"""Methods of earlier versions, and what has taken their place."""
HOST_PIECE, DEVICE_PIECE = 1 << 15, 1 << 24
"""Elements worked on at once: what is only needed on the way stays in cache, or below 64 MiB."""


class Memory(ABC):
    """Absorbs gradients and forgets what was sent. A frozen dataclass of settings, nothing else.

    A step goes through :meth:`absorb_` and, if it counts, :meth:`settle_`. A step that is skipped ends after the first:
    what it has absorbed stays, and is sent later.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if old := OLD_NAMES.keys() & vars(cls).keys():
            advice = "; ".join(f"{name}: {OLD_NAMES[name]}" for name in sorted(old))
            raise TypeError(
                f"Expected the memory {cls.__name__} not to define {' and '.join(sorted(old))}, which nobody calls any "
                f"more. {advice}."
            )

    reads_parameters: ClassVar[bool] = False
    """True if :meth:`absorb_` needs ``ctx.parameters``."""
    remembers_at_once: ClassVar[bool] = True
    """True if :meth:`absorb_` changes the residual; False if only :meth:`settle_` does."""
    needs_second: ClassVar[bool] = False
    """True if exchanges have to average :attr:`.Absorbed.second`, too."""
    averages: ClassVar[Literal["gradients", "velocities", "directions"]] = "gradients"
    """Quantity that is averaged over ranks. The optimizer must not form velocities or directions a second time."""
    decays: ClassVar[bool] = False
    """True if the average contains a weight decay."""

    @property
    def second_decay(self) -> float:
        """Decay of :attr:`.Absorbed.second` in a step, in [0, 1); 0 if there is none."""
        return 0.0

    @abstractmethod
    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Any:
        """State for one group, empty. ``dtype`` is the accumulator's, float32 or float64."""

    @abstractmethod
    def absorb_(self, state: Any, grad: Gradient, ctx: Context) -> Absorbed:
        """Take this rank's gradient in, in place.

        A coordinate at which something would not be finite is left as it is.

        Args:
            state: this group's state.
            grad: this rank's gradient, in runs. From here on its place, and its :meth:`~.Gradient.room`, are scratch:
                for a score, for instance. The average takes it at the end of the step.
            ctx: the step.
        """

    @abstractmethod
    def settle_(
        self, state: Any, update: Update, rounding: Tensor | None = None, skipped: Tensor | None = None
    ) -> None:
        """Let what was sent leave the residual, in place, when the step counts.

        Args:
            state: this group's state, which has absorbed the gradient.
            update: what the ranks agreed on.
            rounding: (u,) what casting the average to the gradient's dtype lost, at the update's coordinates.
            skipped: () bool on a device, where the host does not know it: whether the step counts for nothing. Nothing
                is changed then, and values may be NaN. None: the step counts.
        """

    def divisors(self, state: Any, update: Update, ctx: Context) -> Tensor | None:
        """Return the (u,) numbers that averages have to be divided by to be steps of Adam; None: they are gradients.

        Args:
            state: this group's state, which has absorbed the gradient.
            update: what the ranks agreed on.
            ctx: the step.
        """
        return None

    def divide_all(
        self, state: Any, average: Tensor, mean: Callable[[Tensor], Tensor], density: float
    ) -> Tensor | None:
        """As :meth:`divisors`, of averages at all coordinates, between two steps; collective.

        Args:
            state: this group's state.
            average: (numel,) of residuals.
            mean: over ranks, of a vector.
            density: that the next step would have.
        """
        return None

    def lengthen_(self, divisors: Tensor, by: Tensor) -> None:  # noqa: B027  # most divide nothing
        """Multiply :meth:`divisors`, in place, as if gradients had been so many times longer.

        Args:
            divisors: (u,) numbers.
            by: (u,) or (), at least 0.
        """

    def scale_(self, state: Any, factors: Sequence[tuple[slice, float]]) -> None:  # noqa: B027  # most keep nothing
        """Multiply the residual by factors, between two steps.

        Args:
            state: this group's state.
            factors: of spans.
        """

    @abstractmethod
    def vectors(self, state: Any) -> dict[str, Tensor]:
        """What is remembered of each coordinate, by name: the live buffers, numel slots and a spare one."""

    @abstractmethod
    def residual(self, state: Any) -> Tensor | None:
        """(numel,) view of what has not been sent yet, or None if nothing is remembered."""

    def carry_(self, state: Any, target: slice, memory: Memory, other: Any, source: slice) -> None:
        """Copy the state of some coordinates from another group; of each counter, keep the larger value.

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
        known = memory.counters(other)
        for name, counter in self.counters(state).items():
            counter.copy_(torch.maximum(counter, known.get(name, counter)))
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

    def adapt_(self, state: Any, before: Memory) -> None:  # noqa: B027  # most have nothing to change
        """Go on with the state of a memory of the same kind that had other settings, between two steps.

        Args:
            state: of a group.
            before: the other one.
        """

    def counters(self, state: Any) -> dict[str, Tensor]:
        """What is remembered of the group as a whole, by name; the tensors themselves, to be filled at the start."""
        return {}

    def for_dense(self) -> Memory:
        """Return the memory of groups that are kept dense, where nothing is left unsent.

        Velocities and directions are formed for dense groups, too: the optimizer does not form them.
        """
        return NoMemory() if self.averages == "gradients" else self


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

    def absorb_(self, state: Tensor, grad: Gradient, ctx: Context) -> Absorbed:
        """``acc = grad``, finite or not."""
        for span, run in grad:
            state[span].copy_(run)
        state[-1:].zero_()
        return Absorbed(state, all_finite(state[:-1]))

    def settle_(
        self, state: Tensor, update: Update, rounding: Tensor | None = None, skipped: Tensor | None = None
    ) -> None:
        """Nothing is remembered."""

    def vectors(self, state: Tensor) -> dict[str, Tensor]:
        """None."""
        return {}

    def residual(self, state: Tensor) -> None:
        """Always None."""


@dataclass(frozen=True)
class FeedbackState:
    """What is remembered of a group: vectors of numel + 1 slots, the last one zero, changed in place."""

    residual: Tensor
    remembered: ClassVar[tuple[str, ...]] = ("residual",)
    """Names of the vectors."""


class Feedback(Memory):
    """Error feedback: a residual, in :attr:`state_class`. Subclasses define :meth:`absorb_`."""

    state_class: ClassVar[type[FeedbackState]] = FeedbackState

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Make a zero vector of ``numel + 1`` slots for each field of :attr:`state_class`."""
        return self.state_class(*(zeros(numel + 1, device, dtype) for _ in fields(self.state_class)))

    def settle_(
        self, state: FeedbackState, update: Update, rounding: Tensor | None = None, skipped: Tensor | None = None
    ) -> None:
        """Leave in the residual what did not travel.

        Each rank keeps the rounding error of the mean; over n ranks that is n times it, what the sum lost.
        """
        take_out_(state.residual, update, skipped)
        if rounding is not None:
            put_back_(state.residual, update, rounding, skipped)

    def scale_(self, state: FeedbackState, factors: Sequence[tuple[slice, float]]) -> None:
        """The residual and nothing else."""
        for span, factor in factors:
            state.residual[span].mul_(factor)

    def vectors(self, state: FeedbackState) -> dict[str, Tensor]:
        """All that there are."""
        return {name: vector for name in state.remembered if (vector := getattr(state, name)) is not None}

    def residual(self, state: FeedbackState) -> Tensor:
        """(numel,) view."""
        return state.residual[:-1]


@dataclass(frozen=True)
class CountedState(FeedbackState):
    """A residual, and the number of steps that counted."""

    steps: Tensor
    """() float64, changed in place."""


class CountedFeedback(Feedback):
    """A residual, and moments that are corrected by the number of steps that counted, as Adam's are."""

    def settle_(  # type: ignore[override]
        self, state: CountedState, update: Update, rounding: Tensor | None = None, skipped: Tensor | None = None
    ) -> None:
        """As of every residual; the step is counted."""
        super().settle_(state, update, rounding, skipped)
        state.steps.add_(1 if skipped is None else ~skipped)

    def counters(self, state: CountedState) -> dict[str, Tensor]:
        """The number of steps."""
        return {"steps": state.steps}


def advance_(vectors: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Replace vectors by values at the coordinates where all values are finite.

    Args:
        vectors: of one length, changed in place.
        values: one for each vector, of its dtype.

    Returns:
        () bool: whether all values are finite.

    Example:
        >>> momentum, residual = torch.zeros(2, 2).unbind()
        >>> advance_([momentum, residual], [torch.tensor([1.0, 2.0]), torch.tensor([3.0, torch.inf])])
        tensor(False)
        >>> momentum, residual
        (tensor([1., 0.]), tensor([3., 0.]))
    """
    if not static_shapes(vectors[0].device) and all(map(all_finite, values)):
        for vector, value in zip(vectors, values, strict=True):
            vector.copy_(value)
        return torch.ones((), dtype=torch.bool, device="cpu")
    finite = reduce(torch.logical_and, [value.abs() < math.inf for value in values])
    for vector, value in zip(vectors, values, strict=True):
        torch.where(finite, value, vector, out=vector)
    return finite.all()


def pieces(x: Gradient) -> Iterator[tuple[slice, Tensor]]:
    """To work on one after the other, so that what is only needed on the way stays in cache."""
    return x.cut(DEVICE_PIECE if static_shapes(x.device) else HOST_PIECE)


def take_out_(acc: Tensor, update: Update, skipped: Tensor | None = None) -> None:
    """Set what was sent to zero, or to the rounding error of what was sent; see :meth:`Memory.settle_`."""
    if update.sent is not None:
        subtract_at_(acc, update.sent, update.sent_values, skipped)
    elif update.sent_values is not None:
        acc[:-1].sub_(update.sent_values if skipped is None else update.sent_values.masked_fill(skipped, 0))
    elif skipped is None:
        acc.zero_()
    else:
        acc.masked_fill_(~skipped, 0.0)


def put_back_(acc: Tensor, update: Update, rounding: Tensor, skipped: Tensor | None = None) -> None:
    """Add what casting the average lost; see :meth:`Memory.settle_`."""
    if update.indices is None:
        acc[:-1].add_(rounding if skipped is None else rounding.masked_fill(skipped, 0))
        return
    subtract_at_(acc, update.indices, rounding.neg(), skipped)
