"""RedSync: a threshold between the mean and the maximum of the magnitudes, by bisection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.methods.sparsifiers.bracket import Bracket, Survivors, narrow, next_above
from lightning_sparse.methods.sparsifiers.estimation import check_variant
from lightning_sparse.ops import Number, either, known, lesser, mean_and_maximum

ROUNDS = 20
"""Most trials of the corrected bisection. Four to eight are usual."""


@SPARSIFIERS.register
@dataclass(frozen=True)
class RedSync(Sparsifier):
    """Each rank bisects between the mean and the maximum of its magnitudes for a threshold that k to 2k reach.

    No sorting and no model of the distribution, only
    counts. k is meant per rank; any count from k to 2k ends the search, so that somewhat more than k are sent.

    Formula:
        ``S_i = {j : |acc_i[j]| >= threshold_i}``, ``threshold = mean + q (max - mean)`` of the magnitudes, q by
        bisection from 1/2; ``update = (1/n) sum_i scatter(S_i, acc_i[S_i])``

    Differs from the paper:
        - ``variant="corrected"`` (default): up to 20 trials, each in the right direction. If fewer than k coordinates
          reach twice the mean, the bisection continues below the mean. If it isolates nothing (ties, zeros, an outlier
          by many orders of magnitude), the k largest of the rest are selected. Every rank selects k to 2k.
        - ``variant="published"``: the rule as it was released for comparisons, with its faults. It stops when q is
          known to 0.2, that is after three trials, and uses the last threshold with any count (0.009 k to 1.7 k in
          ordinary data); counts from k/2 to k raise the threshold though they are too low already; a constant group
          never sends anything. On CUDA at most 4 k are sent, more are thinned evenly.

        The original system also sends small tensors densely and keeps a threshold for five steps; here every group is
        searched in every step. To keep tensors dense, name them in the strategy's ``dense``.

    Args:
        variant: "corrected" or "published".

    Raises:
        ValueError: for an unknown variant.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(1, 2, 100_000, generator=torch.Generator().manual_seed(0))      # k = 1000
        >>> [next(ls.simulate(stream, sparsifier=ls.sparsifiers.RedSync(variant), density=0.01)).counts.tolist()
        ...  for variant in ("corrected", "published")]
        [[1458, 1276], [164, 136]]

    References:
        Fang, Fu, Yang, Hsieh, RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training
        System, Journal of Parallel and Distributed Computing 133, 2019, arXiv 1808.04357.
        The published variant is the baseline in the released codes of GaussianK-SGD and SIDCo.
    """

    variant: Literal["corrected", "published"] = "corrected"

    name: ClassVar[str] = "redsync"
    agreement: ClassVar[Agreement] = Agreement.INDEPENDENT
    exchange: ClassVar[str] = "gather_pairs"

    def __post_init__(self) -> None:
        check_variant(self.variant)

    def select(self, acc: Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
        """Select the coordinates that reach the threshold of the bisection; no state."""
        k = count(ctx.density, acc.numel())
        mean, largest = map(known, mean_and_maximum(acc))
        survivors = Survivors(acc, 2 * k, ctx.candidates)
        if self.variant == "published":
            return survivors.beyond(_published(survivors, mean, largest, k), k, ctx.step), state

        def middle(bracket: Bracket) -> Number:
            # Fewer than k coordinates may reach the mean.
            floor = either(bracket.high > 2 * mean, mean, 0.0)
            left = either(bracket.low > 0, bracket.low, floor)
            return (left + lesser(bracket.high, largest)) / 2

        bracket = narrow(survivors, middle, k, 2 * k, ROUNDS)
        return survivors.trim(bracket, k, 2 * k), state


def _published(survivors: Survivors, mean: Number, largest: Number, k: int) -> Number:
    left, right = 0 * mean, 0 * mean + 1
    threshold, done = mean, left > 0
    for _ in range(3):  # the interval is 1, 1/2, 1/4 and then below 0.2
        q = (left + right) / 2
        threshold = either(done, threshold, mean + q * (largest - mean))
        reached = survivors.count(next_above(threshold, survivors.acc.dtype))
        done = done | ((k < reached) & (reached < 2 * k))
        if done is True:
            break
        short = reached < k / 2
        left, right = either(short, left, q), either(short, q, right)
    return threshold
