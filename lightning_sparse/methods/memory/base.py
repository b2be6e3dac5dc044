"""The protocol of memories, and the residual that most of them keep.

Each quantity is stored once and updated in place. A step absorbs the gradient first (:meth:`Memory.absorb_`). Values
that were sent leave the residual when the step is known to count (:meth:`Memory.settle_`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.checks import Settings
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.registry import Registry
from lightning_sparse.core.step import Absorbed, Context, Update
from lightning_sparse.ops import advance_ as advance_  # as memories need it
from lightning_sparse.ops import all_finite, static_shapes, subtract_at_, zeros
from lightning_sparse.ops.reference import PIECE

HOST_PIECE = 1 << 15
"""Elements processed at once on the CPU: temporaries stay in cache."""


class Memory(Settings, ABC):
    """Error feedback: absorbs gradients and removes values that were sent. A frozen dataclass of settings.

    A step calls :meth:`absorb_` and, if it counts, :meth:`settle_`. A skipped step ends after the first: the gradient
    that it has absorbed stays in the residual and is sent later.
    """

    reads_parameters = False
    """True if :meth:`absorb_` needs ``ctx.parameters``."""

    @property
    def reads_rates(self) -> bool:
        """True if the residual, and with it the update, is a sum of gradients times learning rates: ``ctx.rates``."""
        return False

    takes_runs = False
    """True if :meth:`absorb_` takes gradients in several runs on a device, too; there others are given one vector."""
    remembers_at_once = True
    """True if :meth:`absorb_` changes the residual; False if only :meth:`settle_` does."""
    needs_second = False
    """True if exchanges have to average :attr:`.Absorbed.second`, too."""
    averages = "gradients"
    """Quantity that is averaged over ranks: "gradients"; "velocities" or "directions", which the optimizer must not
    form a second time; or "moves", where :meth:`absorb_` is given weights, which optimizers have moved already."""
    decays = False
    """True if the average contains a weight decay."""

    @property
    def second_decay(self) -> float:
        """Decay of :attr:`.Absorbed.second` in a step, in [0, 1); 0 if there is none."""
        return 0.0

    @abstractmethod
    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Return an empty state for one group. ``dtype`` is the accumulator's, float32 or float64."""

    @abstractmethod
    def absorb_(self, state: Any, grad: Gradient, ctx: Context) -> Absorbed:
        """Add this rank's gradient to the state, in place.

        A coordinate keeps its old values if any new one would not be finite.

        Args:
            state: this group's state.
            grad: this rank's gradient, in runs. Its storage, and its :meth:`~.Gradient.room`, are scratch from here on,
                for a score, for instance. The average is written there at the end of the step.
            ctx: the step.
        """

    @abstractmethod
    def settle_(self, state: Any, update: Update, rounding: Tensor | None = None) -> None:
        """Remove sent values from the residual, in place, when the step counts.

        Args:
            state: this group's state, which has absorbed the gradient.
            update: the result of the exchange.
            rounding: (u,) error of casting the average to the gradient's dtype, at the update's coordinates.
        """

    def measure_anew_(self, state: Any) -> None:  # most follow no lengths
        """Go on with gradients of other parameters, in place: how long those before were says nothing of them."""

    def skip_(self, state: Any) -> None:  # most have absorbed all of the gradient at once
        """Keep the finite part of the gradient when the step is skipped, in place of :meth:`settle_`."""

    def divisors(self, state: Any, update: Update, ctx: Context) -> Tensor | None:
        """Return the (u,) numbers that averages have to be divided by to be steps of Adam; None: they are gradients.

        Args:
            state: this group's state, which has absorbed the gradient.
            update: the result of the exchange.
            ctx: the step.
        """
        return None

    def divide_all(
        self, state: Any, average: Tensor, mean: Callable[[Tensor], Tensor], density: float
    ) -> Tensor | None:
        """Return the (numel,) :meth:`divisors` of averages at all coordinates, between two steps; collective.

        Args:
            state: this group's state.
            average: (numel,) mean of the residuals.
            mean: returns the mean of a vector over ranks.
            density: of the next step.
        """
        return None

    @abstractmethod
    def vectors(self, state: Any) -> dict[str, Tensor]:
        """Return the vectors of the state by name: the live buffers, of numel slots and a spare one."""

    @abstractmethod
    def residual(self, state: Any) -> Tensor | None:
        """Return a (numel,) view of the values that have not been sent yet, or None if the memory keeps none."""

    def carry_(self, state: Any, target: slice, memory: Memory, other: Any, source: slice) -> None:
        """Copy the state of some coordinates from another group; of each counter, keep the larger value.

        Args:
            state: state that is being formed.
            target: span of the coordinates in it.
            memory: memory of the other group. Vectors that this memory does not have are dropped.
            other: state of the other group.
            source: span of the coordinates there.
        """
        vectors, others = self.vectors(state), memory.vectors(other)
        for name in vectors.keys() & others.keys():
            vectors[name][target].copy_(others[name][source])
        known = memory.counters(other)
        for name, counter in self.counters(state).items():
            counter.copy_(torch.maximum(counter, known.get(name, counter)))
        self.complete_(state, target, others.keys())

    def complete_(self, state: Any, span: slice, names: Collection[str]) -> None:  # most start at zero
        """Fill in the vectors that are missing for some coordinates of a new state.

        Args:
            state: state with the vectors that are known.
            span: the coordinates.
            names: names of the vectors that are known.
        """

    def start_(  # most have none
        self, state: Any, second: Tensor, spans: Sequence[slice], steps: float
    ) -> None:
        """Start coordinates of a new state from second moments of earlier gradients.

        Args:
            state: state that is being formed; changed in place.
            second: (numel,) second moments with Adam's bias correction applied.
            spans: coordinates to start.
            steps: number of steps behind them; ignored if the state has counted steps already.
        """

    def adapt_(self, state: Any, before: Memory) -> None:  # most have nothing to change
        """Adapt a state to changed settings, between two steps.

        Args:
            state: state of a group.
            before: the memory of the same kind that has formed it.
        """

    def counters(self, state: Any) -> dict[str, Tensor]:
        """Return the scalars of the state by name: the live tensors, which loading a checkpoint fills in."""
        return {}

    def for_dense(self) -> Memory:
        """Return the memory of groups that are kept dense, where nothing is left unsent.

        Velocities and directions are formed for dense groups, too: the optimizer does not form them.
        """
        return NoMemory() if self.averages == "gradients" else self

    def for_whole(self) -> Memory:
        """Return the memory of groups whose density is always 1, which the optimizer steps by itself."""
        return self


MEMORIES: Registry[Memory] = Registry("memory", Memory)  # type: ignore[type-abstract]
"""Error feedback by name."""


@MEMORIES.register
@dataclass(frozen=True)
class NoMemory(Memory):
    """No error feedback: values that are not sent in their own step are lost. For comparison and dense groups.

    Training on a biased selection without feedback converges worse or not at all; use :class:`Residual`.
    """

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return a vector of ``numel + 1`` slots, scratch for acc."""
        return zeros(numel + 1, device, dtype)

    def absorb_(self, state: Tensor, grad: Gradient, ctx: Context) -> Absorbed:
        """Set ``acc = grad``, finite or not."""
        for span, run in grad:
            state[span].copy_(run)
        state[-1:].zero_()
        return Absorbed(state, all_finite(state[:-1]))

    def settle_(self, state: Tensor, update: Update, rounding: Tensor | None = None) -> None:
        """Do nothing."""

    def vectors(self, state: Tensor) -> dict[str, Tensor]:
        """Return no vectors."""
        return {}

    def residual(self, state: Tensor) -> None:
        """Return None."""


@dataclass(frozen=True)
class FeedbackState:
    """State of a group: vectors of numel + 1 slots, the last one zero, changed in place."""

    residual: Tensor
    remembered: ClassVar[tuple[str, ...]] = ("residual",)
    """Names of the vectors that survive a step."""


class Feedback(Memory):
    """Error feedback: a residual, in :attr:`state_class`. Subclasses define :meth:`absorb_`."""

    state_class = FeedbackState

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Make a zero vector of ``numel + 1`` slots for each field of :attr:`state_class`."""
        return self.state_class(*(zeros(numel + 1, device, dtype) for _ in fields(self.state_class)))

    def settle_(self, state: FeedbackState, update: Update, rounding: Tensor | None = None) -> None:
        """Remove sent values from the residual.

        Each rank keeps the rounding error of the mean. Over n ranks, that is the rounding error of the sum.
        """
        take_out_(state.residual, update)
        if rounding is not None:
            put_back_(state.residual, update, rounding)

    def vectors(self, state: FeedbackState) -> dict[str, Tensor]:
        """Return the vectors of :attr:`FeedbackState.remembered` that are not None."""
        return {name: vector for name in state.remembered if (vector := getattr(state, name)) is not None}

    def residual(self, state: FeedbackState) -> Tensor:
        """Return the residual as a (numel,) view."""
        return state.residual[:-1]


@dataclass(frozen=True)
class CountedState(FeedbackState):
    """State with the number of steps that counted."""

    steps: Tensor
    """() float64, changed in place."""


class CountedFeedback(Feedback):
    """Error feedback with moments whose bias correction, as in Adam, follows the number of steps that counted."""

    def settle_(  # type: ignore[override]
        self, state: CountedState, update: Update, rounding: Tensor | None = None
    ) -> None:
        """Remove sent values from the residual and count the step."""
        super().settle_(state, update, rounding)
        state.steps.add_(1)

    def counters(self, state: CountedState) -> dict[str, Tensor]:
        """Return the number of steps."""
        return {"steps": state.steps}


def pieces(x: Gradient) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over a gradient in pieces so small that temporaries stay in cache."""
    return x.cut(PIECE if static_shapes(x.device) else HOST_PIECE)


def take_out_(acc: Tensor, update: Update) -> None:
    """Subtract sent values; a coordinate keeps the rounding error of its message. See :meth:`Memory.settle_`."""
    if update.sent is not None:
        subtract_at_(acc, update.sent, update.sent_values)
    elif update.sent_values is not None:
        acc[:-1].sub_(update.sent_values)
    else:
        acc.zero_()


def put_back_(acc: Tensor, update: Update, rounding: Tensor) -> None:
    """Add the error of casting the average; see :meth:`Memory.settle_`."""
    take_out_(acc, update._replace(sent=update.indices, sent_values=rounding.neg()))
