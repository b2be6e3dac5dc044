"""DGC: Top-k by a threshold from a sample, with a second selection among the coordinates that reach it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from lightning_sparse.core.checks import check_integer, check_share
from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.methods.sparsifiers.bracket import Bracket, Survivors, narrow, picked
from lightning_sparse.methods.sparsifiers.estimation import check_variant, kth_magnitude
from lightning_sparse.ops import Number, either, known, top_k

ROUNDS = 11
"""The threshold from the sample, and ten times a lower one."""
LOWER = 0.8
HITS = {"corrected": 32, "published": 2}
"""Least number of samples that are expected to reach the threshold. With h of them the first count misses k by a factor
of about ``1 +- 1 / sqrt(h)``, and each further threshold costs a pass over the group."""


@SPARSIFIERS.register
@dataclass(frozen=True)
class DGC(Sparsifier):
    """Each rank selects about its k largest magnitudes, by a threshold from a sample of them: the selection of DGC.

    Of s magnitudes at equal distances, the ``ceil(s k / numel)``-th largest is the threshold. If more than 1.3 k
    coordinates reach it, the k largest of these are selected again, exactly; if fewer than 0.8 k do, it is lowered by a
    factor of 0.8, up to ten times. k is meant per rank. The sample starts at another coordinate in each step, in turns
    instead of at random, so that runs can be repeated.

    The complete DGC is this with the memory ``ClipByNorm`` around ``MomentumCorrection``, which also masks the
    momentum, with ``density=Warmup(0.25, d, steps)``, and with an optimizer *without* momentum.

    Formula:
        ``S_i = {j : |acc_i[j]| >= threshold_i}``, threshold_i the ``ceil(s k / numel)``-th largest of s sampled
        magnitudes; ``update = (1/n) sum_i scatter(S_i, acc_i[S_i])``

    Differs from the paper:
        - ``variant="corrected"`` (default): every rank selects 0.8 k to 1.3 k, all that reach the threshold. The sample
          is large enough for 32 hits: with the two of the released code, the first threshold passes 0.02 k to 2 k in a
          group of 1e5 at a density of 0.001. Groups that are small, or small for such a sample, are selected exactly,
          and so are those for which ten lower thresholds are not enough.
        - ``variant="published"``: the released code's rule. Samples for two hits, in groups of any size; the
          coordinates that reach the tenth lower threshold are sent, however few; and of k to 1.3 k coordinates the
          first k *in order of their indices* are sent, so that the last ones of a group wait longer. (Its k is rounded
          up; here it is rounded down.)

    Args:
        sample: share of the coordinates to sample, in (0, 1]; the paper uses 0.001 to 0.01.
        exact_below: corrected only: groups of fewer coordinates are not sampled but selected exactly.
        variant: "corrected" or "published".

    Raises:
        ValueError: if the sample is outside (0, 1], for a bound that is no positive integer or an unknown variant.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(3, 2, 200_000, generator=torch.Generator().manual_seed(0))      # k = 2000
        >>> [step.counts.tolist() for step in ls.simulate(stream, sparsifier=ls.sparsifiers.DGC(), density=0.01)]
        [[1928, 1865], [2257, 1928], [2085, 1790]]

    References:
        Lin, Han, Mao, Wang, Dally, Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
        Training, ICLR 2018, arXiv 1712.01887, section 5 (hierarchical selection). The bounds 0.8 and 1.3 and the
        published variant are those of the authors' released code.
    """

    sample: float = 0.01
    exact_below: int = 100_000
    variant: Literal["corrected", "published"] = "corrected"

    agreement: ClassVar[Agreement] = Agreement.INDEPENDENT
    exchange: ClassVar[str] = "gather_pairs"

    def __post_init__(self) -> None:
        check_share(self.sample, "sample")
        check_integer(self.exact_below, "exact_below")
        check_variant(self.variant)

    def select(self, acc: Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
        """Select about the k largest; no state."""
        numel = acc.numel()
        k = count(ctx.density, numel)
        published = self.variant == "published"
        samples = min(numel, math.ceil(max(self.sample * numel, HITS[self.variant] * numel / k)))
        stride = (numel // samples - 1) | 1  # odd, to sample all columns of a weight matrix
        if not published and (numel < self.exact_below or stride == 1):
            return picked(acc, top_k(acc, k, ctx.candidates))._replace(aligned=True), state
        most = 13 * k // 10
        survivors, start = Survivors(acc, most, ctx.candidates), _sampled_threshold(acc, stride, k, ctx.step)

        def lower(bracket: Bracket) -> Number:
            untried = either(bracket.high == math.inf, start, LOWER * bracket.high)
            return either(bracket.low > 0, bracket.low, untried)

        bracket = narrow(survivors, lower, -(-4 * k // 5), most, ROUNDS)
        if not published:
            return survivors.trim(bracket, k, most), state
        gave_up = (bracket.low == 0) & (bracket.high < math.inf)
        bracket = bracket._replace(low=either(gave_up, bracket.high, bracket.low))
        selection = survivors.trim(bracket, k, most)
        return selection._replace(indices=selection.indices[:k], count=selection.count.clamp(max=k)), state


def _sampled_threshold(acc: Tensor, stride: int, k: int, step: int) -> Number:
    """Return the magnitude that a share of samples reaches: the share of k in the group."""
    size = acc.numel() // stride
    sampled = acc[step % stride :: stride][:size]
    magnitude: Number = known(kth_magnitude(sampled, -(-size * k // acc.numel())))
    return magnitude
