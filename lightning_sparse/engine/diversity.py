"""Gradient diversity: how much ranks' gradients have in common, and how much longer Adam's steps are for it.

Adam divides the mean gradient by its size. :class:`~lightning_sparse.methods.memory.SecondMoment` divides it by that of
one rank's gradient, which is larger by ``f = sqrt(mean_i |g_i|^2 / |mean_i g_i|^2)``: 1 where ranks have equal
gradients, ``sqrt(n)`` where they share nothing. Yin et al., Gradient Diversity: a Key Ingredient for Scalable
Distributed Learning, AISTATS 2018, arXiv 1706.05699, call ``f^2 / n`` the gradient diversity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_sparse.core.messages import AllReduce, Steps

EVERY = 8
"""Steps from one comparison of the ranks' gradients to the next."""
COMMON = "common"
"""Its name in states."""
KEEPS = 0.9**EVERY
"""What the running mean keeps of those before."""


class Diversity:
    """Follows what gradients have in common; equal on all ranks.

    Args:
        common: what was known of it.

    Example:
        >>> diversity = Diversity()
        >>> diversity.factor(4)
        2.0
        >>> diversity.measure(8.0, 8.0)
        >>> diversity.factor(4)
        1.0
    """

    def __init__(self, common: float = 0.0) -> None:
        self.common = common
        """``1 / f^2``, a mean over some ten steps; 0: ranks have not compared gradients yet."""

    @classmethod
    def of(cls, counters: Iterable[Mapping[str, float]]) -> Diversity:
        """Go on from the counters of parameters in a state."""
        return cls(max((one.get(COMMON, 0.0) for one in counters), default=0.0))

    def counters(self) -> dict[str, float]:
        """Return what a state keeps of it."""
        return {COMMON: self.common}

    def measure(self, own: float, mean: float) -> None:
        """Follow a step that counts; gradients that are zero or not finite tell nothing.

        Args:
            own: squared norm of a rank's gradient, the mean over ranks.
            mean: that of their mean gradient.
        """
        if 0 < mean < math.inf and 0 < own < math.inf:
            share = mean / own
            self.common = KEEPS * self.common + (1 - KEEPS) * share if self.common else share

    def factor(self, ranks: int) -> float:
        """Return f, between 1 and ``sqrt(n)``; ``sqrt(n)`` before the first comparison."""
        return 1 / math.sqrt(min(max(self.common, 1 / ranks), 1.0))


def squares_of(sketch: Tensor, ranks: int) -> Steps[Tensor]:
    """Return (2,) float64, what :meth:`Diversity.measure` takes, of sketches: those of equal gradients are equal.

    Args:
        sketch: of this rank's gradient, see :func:`~lightning_sparse.ops.sketch.narrow_sketch`.
        ranks: number of them.
    """
    here = sketch.double()
    mean = (yield AllReduce(torch.cat([here, here.square().sum().view(1)]))) / ranks
    return torch.stack([mean[-1], mean[:-1].square().sum()])
