"""Gradient diversity: how much ranks' gradients have in common, and how much longer Adam's steps are for it.

Adam divides the mean gradient by its size. :class:`~lightning_sparse.methods.memory.SecondMoment` divides it by that of
one rank's gradient, which is larger by ``f = sqrt(mean_i |g_i|^2 / |mean_i g_i|^2)``: 1 where ranks have equal
gradients, ``sqrt(n)`` where they share nothing. Yin et al., Gradient Diversity: a Key Ingredient for Scalable
Distributed Learning, AISTATS 2018, arXiv 1706.05699, call ``f^2 / n`` the gradient diversity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparse.core.messages import AllReduce, Steps
from lightning_sparse.engine.network import drive_ranks
from lightning_sparse.ops.sketch import narrow_sketch

EVERY = 8
"""Steps from one comparison of the ranks' gradients to the next."""
KEEPS = 0.95**EVERY
"""What sums keep of the comparisons before."""
NAMES = "own_squares", "mean_squares"
"""Of the two sums, in states."""


class Diversity:
    """Follows how much gradients differ; equal on all ranks.

    Both squares are summed over some twenty steps. A mean of their quotients, in which long gradients would not count
    more, follows the first steps faster and trains worse.

    Args:
        own: sum of squared norms of the ranks' gradients, the mean over ranks; 0: they have not been compared yet.
        mean: sum of squared norms of their mean.

    Example:
        >>> diversity = Diversity()
        >>> diversity.factor(4)
        2.0
        >>> diversity.measure(8.0, 8.0)
        >>> diversity.factor(4)
        1.0
    """

    def __init__(self, own: float = 0.0, mean: float = 0.0) -> None:
        self._own, self._mean = own, mean

    @classmethod
    def of(cls, counters: Iterable[Mapping[str, float]]) -> Diversity:
        """Go on from the counters of parameters in a state."""
        known = [(one[NAMES[0]], one[NAMES[1]]) for one in counters if one.keys() >= {*NAMES}]
        return cls(*max(known, default=()))

    def counters(self) -> dict[str, float]:
        """Return what a state keeps of it."""
        return dict(zip(NAMES, (self._own, self._mean), strict=True))

    def measure(self, own: float, mean: float) -> None:
        """Follow a step that counts; gradients that are zero or not finite tell nothing.

        Args:
            own: squared norm of a rank's gradient, the mean over ranks.
            mean: that of their mean gradient.
        """
        if 0 < mean < math.inf and 0 < own < math.inf:
            self._own, self._mean = KEEPS * self._own + own, KEEPS * self._mean + mean

    def follow(self, groups: Sequence[Sequence[Tensor]], step: int) -> None:
        """Follow a step of ranks that are simulated in this process, as real ones do.

        Args:
            groups: of each group, the (numel,) gradient of each rank.
            step: number of it.
        """
        if step % EVERY == 0:
            asked = [[squares_of(narrow_sketch([row], step), len(rows)) for row in rows] for rows in groups]
            self.measure(*torch.stack([drive_ranks(each)[0] for each in asked]).sum(0).tolist())

    def factor(self, ranks: int) -> float:
        """Return f, between 1 and ``sqrt(n)``; ``sqrt(n)`` before the first comparison."""
        return math.sqrt(min(max(self._own / self._mean, 1.0), ranks) if self._mean else ranks)


def squares_of(sketch: Tensor, ranks: int, scale: Tensor | None = None) -> Steps[Tensor]:
    """Return (2,) float64, what :meth:`Diversity.measure` takes, of sketches: those of equal gradients are equal.

    Args:
        sketch: of this rank's gradient, see :func:`~lightning_sparse.ops.sketch.narrow_sketch`.
        ranks: number of them.
        scale: () of the loss, which gradients still have; None: none.
    """
    here = sketch.double() if scale is None else sketch.double() / scale
    mean = (yield AllReduce(torch.cat([here, here.square().sum().view(1)]))) / ranks
    return torch.stack([mean[-1], mean[:-1].square().sum()])
