"""Gradient diversity: how much ranks' gradients have in common, and how much longer Adam's steps are for it.

Adam divides the mean gradient by its size. :class:`~lightning_sparse.methods.memory.SecondMoment` divides it by that of
one rank's gradient, which is larger. With n ranks, steps are longer by f,

    ``f^2 = (1 + 2/n) mean_i |g_i|^2 / |mean_i g_i|^2``, at most n.

The quotient is 1 where ranks have equal gradients, as nearly in the first steps of a training, and n where they share
nothing. Yin et al., Gradient Diversity: a Key Ingredient for Scalable Distributed Learning, AISTATS 2018, arXiv
1706.05699, call it n times the gradient diversity. ``1 + 2/n`` is for averages that agree most, which their bound
shortens: at rates below the best one, steps by the quotient alone are too short. Between two ranks f is the root of 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparse.core.messages import AllReduce, Steps
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.ops.sketch import narrow_sketch

EVERY = 8
"""Steps from one comparison of the ranks' gradients to the next."""
KEEPS = 0.95**EVERY
"""What sums keep of the comparisons before."""
LONG = 4.0
"""Times the mean square of the comparisons before that a new one may have; longer gradients count as little."""
FEW = 2
"""Ranks that compare nothing: their factor is known."""
NAMES = "own_squares", "mean_squares", "compared_steps"
"""Of what is followed, in states."""


class Diversity:
    """Follows how much gradients differ; equal on all ranks.

    Both squares are summed over some twenty steps. A mean of their quotients, in which long gradients would not count
    more, follows the first steps faster and trains worse.

    Args:
        own: sum of squared norms of the ranks' gradients, the mean over ranks; 0: they have not been compared yet.
        mean: sum of squared norms of their mean.
        steps: that have counted.

    Example:
        >>> diversity = Diversity()
        >>> diversity.factor(4)
        2.0
        >>> diversity.learn(8.0, 8.0)
        >>> round(diversity.factor(4) ** 2, 6)
        1.5
    """

    def __init__(self, own: float = 0.0, mean: float = 0.0, steps: float = 0) -> None:
        self._own, self._mean, self._steps = own, mean, int(steps)

    @classmethod
    def of(cls, counters: Iterable[Mapping[str, float]]) -> Diversity:
        """Go on from the counters of parameters in a state: from those with the longest gradients."""
        known = [tuple(one[name] for name in NAMES) for one in counters if one.keys() >= {*NAMES}]
        return cls(*max(known, default=()))

    def counters(self) -> dict[str, float]:
        """Return what a state keeps of it."""
        return dict(zip(NAMES, (self._own, self._mean, float(self._steps)), strict=True))

    def is_open(self, ranks: int) -> bool:
        """Return whether f follows from a comparison, and there was none."""
        return ranks > FEW and not self._own

    def asks(self, ranks: int) -> bool:
        """Return whether ranks compare their gradients in the next step."""
        return ranks > FEW and self._steps % EVERY == 0

    def learn(self, own: float, mean: float) -> None:
        """Add a comparison; gradients that are zero or not finite tell nothing.

        Args:
            own: squared norm of a rank's gradient, the mean over ranks.
            mean: that of their mean gradient.
        """
        if 0 < mean < math.inf and 0 < own < math.inf:
            weights = (1 - KEEPS ** -(-self._steps // EVERY)) / (1 - KEEPS)
            share = min(1.0, LONG * self._own / weights / own) if self._own and weights else 1.0
            self._own, self._mean = KEEPS * self._own + share * own, KEEPS * self._mean + share * mean

    def count(self, own: float = 0.0, mean: float = 0.0) -> None:
        """Count a step, with what ranks have found in it, if they have compared their gradients."""
        self.learn(own, mean)
        self._steps += 1

    def follow(self, groups: Sequence[Sequence[Tensor]], step: int) -> None:
        """Follow a step of ranks that are simulated in this process, as real ones do.

        Args:
            groups: of each group, the (numel,) gradient of each rank.
            step: number of it, which decides signs of sketches.
        """
        found = []
        for rows in groups if self.asks(len(groups[0])) else ():
            found.append(drive_ranks([squares_of([row], step, len(rows)) for row in rows])[0])
        self.count(*(total(torch.stack(found)).tolist() if found else ()))

    def factor(self, ranks: int) -> float:
        """Return f; ``sqrt(n)`` before the first comparison."""
        quotient = max(1.0, self._own / self._mean) if self._mean else ranks
        return math.sqrt(min((1 + 2 / ranks) * quotient, ranks))


def squares_of(pieces: Sequence[Tensor], step: int, ranks: int, scale: Tensor | None = None) -> Steps[Tensor]:
    """Return (2,) float64, what :meth:`Diversity.learn` takes, of sketches: those of equal gradients are equal.

    Gradients are read before the message.

    Args:
        pieces: of this rank's gradient, see :func:`~lightning_sparse.ops.sketch.sketch`.
        step: number of it, which decides signs.
        ranks: number of them.
        scale: () of the loss, which gradients still have; None: none.
    """
    sketch = narrow_sketch(pieces, step).double()
    here = sketch if scale is None else sketch / scale
    mean = (yield AllReduce(torch.cat([here, here.square().sum().view(1)]))) / ranks
    return torch.stack([mean[-1], total(mean[:-1].square())])


def total(x: Tensor) -> Tensor:
    """Return the sum over the first dimension, in an order that no processor chooses: all ranks find the same bits."""
    while len(x) > 1:
        x = torch.cat([x, x.new_zeros(len(x) % 2, *x.shape[1:])])
        x = x[::2] + x[1::2]
    return x[0]
