"""Error feedback for Adam: selection by residual and second moment of the rank's own gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.checks import check_eps, check_share
from lightning_sparse.core.layout import Gradient, InRuns
from lightning_sparse.core.step import Absorbed, Context, Update
from lightning_sparse.methods.memory.base import MEMORIES, CountedFeedback, CountedState, Memory
from lightning_sparse.methods.memory.residual import Residual
from lightning_sparse.ops import Weights, divisors, weigh_, zeros
from lightning_sparse.ops.length import FOLLOWED, SIZE, joint_norm, measure


@dataclass(frozen=True)
class SecondMomentState(CountedState):
    """State with the second moment and the length of this rank's gradients."""

    second: Tensor
    lengths: Tensor
    """(5,) float64 statistics of the length of this rank's gradients, see
    :func:`~lightning_sparse.ops.length.measure`; changed in place."""
    power: Tensor
    """() float64 ``beta2^t`` of the step that has been absorbed last, with t its number from 1; changed in place."""
    remembered: ClassVar[tuple[str, ...]] = ("residual", "second")


MOST = 2.0**53
"""Largest number of steps."""
SHARE, SHORTEST, LONGEST = 0.25, 2.0, 100.0
"""Bound of an average in single steps: its fraction of the mean delay of a coordinate, and its smallest and largest
value."""


def longest(density: float) -> float:
    """Return the largest quotient of an average and its divisor, up to rounding.

    The bound is ``0.25 / density``, but at least 2 and at most 100. A long sum of gradients that all agree consists of
    stale gradients; a step of its full length does more harm the higher the learning rate. At low densities nearly all
    sums are long, and bounds below 100 cost more than they save (``docs/reports/adam-earlier.md``).

    Args:
        density: density of the step, in (0, 1].

    Example:
        >>> [longest(density) for density in (1.0, 0.01, 0.001)]
        [2.0, 25.0, 100.0]
    """
    return min(LONGEST, max(SHORTEST, SHARE / density))


def damping(density: float) -> float:
    """Return ``1 / longest(density)`` rounded to float32, the precision of CUDA kernels' arguments."""
    return float(np.float32(1 / longest(density)))


@MEMORIES.register
@dataclass(frozen=True)
class SecondMoment(CountedFeedback):
    """Error feedback for Adam and AdamW: coordinates are selected by the gain of a step of Adam.

    With g a rank's gradient, ``acc = residual + g`` as in :class:`Residual`, and ``v_i = beta2 v_i + (1 - beta2) g^2``
    of this rank's own gradients, at every step. Coordinates are selected by ``|acc| / v_i^(1/4)``, which orders them
    like ``acc^2 / sqrt(v_i)``: to first order, the decrease of the loss by the step ``acc / sqrt(v_i)``. The mean of
    all ranks' v_i is exchanged together with the average, and the optimizer steps by

        ``lr f mean(acc) / (sqrt(mean(v) / (1 - beta2^t) + (mean(acc) / L)^2) + eps)``

    with decoupled weight decay, and without a first moment: the residual has already averaged over the steps since the
    coordinate was last sent. The square of the average keeps the quotient within ``L``, see :func:`longest`; the score
    adds ``(acc / L)^2`` to ``v_i / (1 - beta2^t)``, too. Adam after an exchange of sparse averages forms its second
    moment of squares of sums and zeros, so that a step has the same length for any number of steps in the sum; this v
    contains the gradients of every step.

    Dense Adam divides by the size of the mean gradient, this one by that of one rank's. The factor f makes up for it:

        ``f^2 = (1 + 2/n) mean_i |g_i|^2 / |mean_i g_i|^2``, at most n

    With two ranks f is the root of 2. With more it is smallest in the first steps of a training, in which gradients
    agree, and ``sqrt(n)`` where they share nothing but noise. The quotient is n times the gradient diversity of Yin et
    al. Every eighth step ranks compare sketches of their gradients, of at most 251 numbers, and both squares are summed
    over some twenty steps. The learning rate of dense training stays valid (``docs/reports/causes.md``).

    If the length of a rank's gradients changes, residual and second moment are multiplied to match it, and gradients
    far longer than those before are clipped, see :func:`~lightning_sparse.ops.length.measure`. Both factors are 1 while
    gradients keep their length, and at density 1. Lengths are followed anew where a group is exchanged without some of
    its parameters, because nobody used them, where they are used again, and where a rank goes on with another part of
    them.

    The engine applies these steps to sparsified parameters in place of ``torch.optim.Adam`` and ``AdamW``; the
    optimizer itself steps dense parameters. With such an optimizer, ``memory=None`` selects this memory, with the
    optimizer's beta2 and eps of each step.

    The average in the gradients is that of :class:`Residual`; only these two factors change it. This memory costs two
    vectors of ``numel`` accumulator elements a rank, one more than :class:`Residual`; Adam's own two vectors are not
    allocated for sparsified parameters.

    A step is skipped if the squared norm of a group's gradient is beyond float64: if that norm is 1.3e154 or more.

    Squares of a skipped step are absorbed, but the step is not counted: the steps after it are shorter for a while.
    Steps are counted for each group, not for each parameter as in torch. A parameter that is first used at a late
    step T gets first steps that are longer by up to ``sqrt((1 - beta2^T) / (1 - beta2))``, like a new row of an
    embedding with AdamW.

    Args:
        beta2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment, at least 1.2e-38, in units of the gradient.

    Raises:
        ValueError: if a setting is out of its range.

    Example:
        >>> import lightning_sparse as ls
        >>> import torch
        >>> stream = torch.tensor([[[5.0, 0.5]], [[-5.0, 0.5]]]).repeat(4, 1, 1)              # one rank, k = 1
        >>> for memory in (ls.memories.Residual(), ls.memories.SecondMoment(0.9)):
        ...     steps = ls.simulate(stream, sparsifier="shared_top_k", density=0.5, memory=memory)
        ...     print([int(step.indices) for step in steps])
        [0, 0, 0, 0, 0, 0, 0, 0]
        [0, 0, 0, 0, 1, 1, 0, 0]

    References:
        Ours. Kingma, Ba, Adam, ICLR 2015, arXiv 1412.6980, algorithm 1; Loshchilov, Hutter, Decoupled weight decay
        regularization, ICLR 2019, arXiv 1711.05101, algorithm 2; Yin et al., Gradient diversity: a key ingredient for
        scalable distributed learning, AISTATS 2018, arXiv 1706.05699, definition 1.
    """

    beta2: float = 0.999
    eps: float = 1e-8
    needs_second = takes_runs = True

    def __post_init__(self) -> None:
        check_share(self.beta2, "beta2", zero=True, one=False)
        check_eps(self.eps)

    @property
    def second_decay(self) -> float:
        """Return ``beta2``."""
        return self.beta2

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> SecondMomentState:
        """Return two zero vectors of ``numel + 1`` slots."""
        residual, second = (zeros(numel + 1, device, dtype) for _ in range(2))
        steps, power = torch.zeros(2, device=device, dtype=torch.float64).unbind()
        return SecondMomentState(residual, steps, second, torch.zeros(SIZE, device=device, dtype=torch.float64), power)

    def absorb_(self, state: SecondMomentState, grad: Gradient, ctx: Context) -> Absorbed:
        """Set ``residual = carry residual + take grad`` and update the second moment, see :meth:`units`.

        Coordinates are selected by ``acc / (sqrt(v + (acc s / L)^2) + eps s)^(1/2)``, ``s = sqrt(1 - beta2^t)``: v is
        not corrected for its start at 0.
        """
        acc, second = state.residual, state.second
        in_runs = len(grad.runs) > 1 and grad.dtype == acc.dtype
        score = InRuns(grad) if in_runs else grad.room(acc.dtype)
        units = self.units(state, grad.pieces, ctx.density)
        torch.pow(self.beta2, state.steps + 1, out=state.power)
        by = Weights(units, state.power, self.beta2, self.eps, damping(ctx.density))
        finite = weigh_(acc[:-1], second[:-1], score, grad.runs, by, ctx.candidates)
        return Absorbed(acc, finite, score, second)

    def units(self, state: SecondMomentState, pieces: Sequence[Tensor], density: float) -> Tensor:
        """Return the factors of this step, (3,) float64, see :func:`~lightning_sparse.ops.length.measure`.

        Args:
            state: state of this group; its lengths are updated in place.
            pieces: this rank's gradient, cut alike in all steps.
            density: density of the step. At 1, the factors are 1.
        """
        numel = sum(piece.numel() for piece in pieces)
        return measure(state.lengths, joint_norm(pieces), numel, self.beta2, density < 1)

    def measure_anew_(self, state: SecondMomentState) -> None:
        """Forget how long gradients were; what is remembered keeps its length."""
        state.lengths[:3].zero_()

    def for_whole(self) -> Memory:
        """Return :class:`.Residual`: nobody would read the second moments."""
        return Residual()

    def counters(self, state: SecondMomentState) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the number of steps and the statistics of lengths."""
        return {**super().counters(state), **dict(zip(FOLLOWED, state.lengths, strict=True))}

    def divisors(self, state: SecondMomentState, update: Update, ctx: Context) -> Tensor:
        """Return ``sqrt(v + (average / L)^2) + eps`` with the mean v of all ranks."""
        assert update.second is not None, "an exchange that does not carry second values"
        return divisors(update.second, update.values, state.power, self.eps, damping(ctx.density))

    def divide_all(
        self, state: SecondMomentState, average: Tensor, mean: Callable[[Tensor], Tensor], density: float
    ) -> Tensor:
        """Return them from the mean of the ranks' second moments."""
        power = torch.pow(self.beta2, state.steps.clamp(min=1))
        return divisors(mean(state.second[:-1]), average, power, self.eps, damping(density))

    def complete_(self, state: SecondMomentState, span: slice, names: Collection[str]) -> None:
        """Take a residual without a second moment for one gradient of its size, so that first steps are short."""
        if "second" not in names:
            torch.square(state.residual[span], out=state.second[span]).mul_(1 - self.beta2)

    def start_(self, state: SecondMomentState, second: Tensor, spans: Sequence[slice], steps: float) -> None:
        """Multiply them by the group's bias correction."""
        if not bool(state.steps):
            state.steps.fill_(steps)
        left = float(torch.pow(self.beta2, state.steps))
        for span in spans:
            torch.mul(second[span], 1 - left, out=state.second[span])

    def adapt_(self, state: SecondMomentState, before: Memory) -> None:
        """Set the number of steps, which may be fractional, so that ``beta2^t`` stays the same.

        The weights of the gradients in v then still add up to ``1 - beta2^t``.
        """
        if self.beta2 not in (before.second_decay, 0.0):  # with 0, every power of beta2 is 0
            left = torch.pow(before.second_decay, state.steps)
            state.steps.copy_((left.log() / math.log(self.beta2)).clamp(0.0, MOST))
