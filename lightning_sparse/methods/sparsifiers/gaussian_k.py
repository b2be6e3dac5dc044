"""GaussianK: the threshold of a normal distribution, corrected by counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.methods.sparsifiers.bracket import Bracket, Survivors, narrow, next_above
from lightning_sparse.methods.sparsifiers.estimation import check_variant
from lightning_sparse.ops import Number, either, functions, known, moments

ROUNDS = 12
"""Most trials of the corrected variant. One or two are usual for normal data, four to six for heavy tails."""
RAISE, LOWER = 1.5, 0.5


@SPARSIFIERS.register
@dataclass(frozen=True)
class GaussianK(Sparsifier):
    """Each rank estimates its threshold from the mean and standard deviation of its accumulator.

    The threshold is the two-sided quantile of a normal distribution. It is halved while fewer than 2k/3 magnitudes are
    above it, and multiplied by 1.5 while more than 4k/3 are. k is meant per rank. Gradients have heavier tails than a
    normal distribution, and error feedback makes those of residuals lighter: the estimate is only the start of the
    search.

    Formula:
        ``S_i = {j : |acc_i[j]| >= threshold_i}``, ``threshold_i`` found from ``|mean| + z std`` (published: ``mean + z
        std``) with ``z = Phi^-1(1 - d/2)`` and ``d = k / numel``; ``update = (1/n) sum_i scatter(S_i, acc_i[S_i])``

    Differs from the paper:
        - ``variant="corrected"`` (default): once one threshold is known to be too low and one too high, the next trial
          is their geometric mean; up to 12 trials. All coordinates that reach the last threshold are selected. The mean
          enters by its magnitude, since magnitudes are compared. If no threshold isolates enough coordinates (ties,
          zeros), the k largest of the rest are selected. Every rank selects 2k/3 to 4k/3.
        - ``variant="published"``: the released code's rule, with its faults. Three trials; the selection belongs to the
          third threshold, and the correction that follows from it is computed but never used. A negative mean lowers
          the threshold, below zero if it is large enough: all coordinates are then sent, and multiplication by 1.5
          leads further away. On CUDA at most 4 k are sent, more are thinned evenly.

    Args:
        variant: "corrected" or "published".

    Raises:
        ValueError: for an unknown variant.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(1, 2, 100_000, generator=torch.Generator().manual_seed(0)) ** 5      # k = 100
        >>> [next(ls.simulate(stream, sparsifier=ls.sparsifiers.GaussianK(variant), density=0.001)).counts.tolist()
        ...  for variant in ("corrected", "published")]
        [[132, 86], [307, 325]]

    References:
        Shi, Chu, Cheung, See, Understanding Top-k Sparsification in Distributed Deep Learning, arXiv 1911.08772,
        algorithm 1. The published variant is that of its released code, with the mean of the signed accumulator.
    """

    variant: Literal["corrected", "published"] = "corrected"

    agreement: ClassVar[Agreement] = Agreement.INDEPENDENT
    exchange: ClassVar[str] = "gather_pairs"

    def __post_init__(self) -> None:
        check_variant(self.variant)

    def select(self, acc: Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
        """Select the coordinates that reach the estimated threshold; no state."""
        numel = acc.numel()
        k = count(ctx.density, numel)
        z = -NormalDist().inv_cdf(k / numel / 2)
        most = 4 * k // 3
        survivors = Survivors(acc, most, ctx.candidates)
        if self.variant == "published":
            mean, deviation = known(acc.mean().double()), known(acc.std().double())
            return survivors.beyond(_published(survivors, mean + z * deviation, k), k, ctx.step), state
        mean, deviation = moments(acc)
        # Squares may overflow though the values do not.
        start = known((mean.abs() + z * deviation).nan_to_num().clamp(max=torch.finfo(acc.dtype).max))

        def between(bracket: Bracket) -> Number:
            low, high = bracket
            rising = either(low > 0, RAISE * low, start)
            falling = either(low > 0, functions(low).sqrt(low * high), LOWER * high)
            return either(high == math.inf, rising, falling)

        bracket = narrow(survivors, between, -(-2 * k // 3), most, ROUNDS)
        return survivors.trim(bracket, k, most), state


def _published(survivors: Survivors, start: Number, k: int) -> Number:
    threshold = following = start
    for _ in range(3):
        threshold = following
        reached = survivors.count(next_above(threshold, survivors.acc.dtype))
        raised = either(reached > 4 * k / 3, RAISE * threshold, threshold)
        following = either(reached < 2 * k / 3, LOWER * threshold, raised)
        if not isinstance(following, Tensor) and following == threshold:
            break
    return threshold
