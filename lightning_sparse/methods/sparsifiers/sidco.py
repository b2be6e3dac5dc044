"""SIDCo: a threshold from a distribution that is fitted to the magnitudes, and again to what lies beyond."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_integer, expect
from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.methods.sparsifiers.estimation import check_variant
from lightning_sparse.methods.sparsifiers.fitted import Fit, threshold
from lightning_sparse.ops import above, static_shapes

CAPACITY = 4
"""Device slots per pick at the target density. Where the rule adapts, more picks than that are not told apart either,
and it never aims for less than this part of the target."""
GAIN = 0.1
"""Gain: change of the logarithm of the aim per relative error of one step."""
LAST_RATIO = 0.75
"""The stages of the corrected variant leave at least this share to the last one."""


class SIDCoState(NamedTuple):
    """What one rank knows of its own group; all tensors are scalars."""

    stages: Tensor
    """int64 number of fits M."""
    quality: Tensor
    """float64 sum of picks / target since the number of stages was last looked at."""
    calls: Tensor
    """int64 number of steps in that sum."""
    aim: Tensor
    """float64 logarithm of what the fits aim for, in multiples of k. Always 0 in the published variant."""


@dataclass(frozen=True)
class _SIDCo(Sparsifier):
    """What the three methods share. They differ in the distributions they fit."""

    first_ratio: float = 0.25
    tolerance: float = 0.2
    interval: int = 5
    max_stages: int | None = None
    variant: Literal["corrected", "published"] = "corrected"

    fits: ClassVar[tuple[Fit, Fit]]
    """Distributions fitted in the first stage, and in all others."""
    agreement: ClassVar[Agreement] = Agreement.INDEPENDENT
    exchange: ClassVar[str] = "gather_pairs"

    def __post_init__(self) -> None:
        for name in ("first_ratio", "tolerance"):
            value = getattr(self, name)
            expect(0 < value < 1, name, "in (0, 1)", value)
        check_integer(self.interval, "interval")
        if self.max_stages is not None:
            check_integer(self.max_stages, "max_stages")
        check_variant(self.variant)

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> SIDCoState:
        """The fewest stages, nothing observed yet, and k itself as the aim."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        fewest, _ = self._limits(density)
        calls = torch.zeros((), dtype=torch.int64, device=device)
        return SIDCoState(torch.full_like(calls, fewest), zero, calls, zero)

    def select(self, acc: Tensor, state: SIDCoState, ctx: Context) -> tuple[Selection, SIDCoState]:
        """All that reach the last threshold: more or fewer than k, and none is possible."""
        numel, k = acc.numel(), count(ctx.density, acc.numel())
        aligned = static_shapes(acc.device)
        fewest, most = self._limits(ctx.density)
        stages = state.stages.clamp(fewest, most)
        decided, nonzero = threshold(
            acc,
            k * state.aim.exp(),
            stages,
            self.fits,
            most=most,
            first_ratio=self.first_ratio,
            recount=self.variant == "corrected",
            candidates=ctx.candidates,
        )
        room = min(numel, CAPACITY * k)
        indices, picks = above(acc, decided, capacity=room, phase=ctx.step, candidates=ctx.candidates)
        quality = torch.where(nonzero > 0, picks / nonzero.clamp(1, k), 1.0).clamp(max=CAPACITY)
        return Selection(indices, picks, decided, aligned=aligned), self._adapt(state, stages, quality, most, numel / k)

    def _limits(self, density: float) -> tuple[int, int]:
        """Fewest and most stages."""
        most = self.max_stages or max(1, math.ceil(math.log(density) / math.log(0.5)))
        if self.variant == "published" or density >= self.first_ratio:
            return 1, most
        fewest, left = 2, density / self.first_ratio
        while left < LAST_RATIO:
            fewest, left = fewest + 1, left / max(math.sqrt(left), self.first_ratio)
        return min(fewest, most), most

    def _adapt(self, state: SIDCoState, stages: Tensor, quality: Tensor, most: int, widest: float) -> SIDCoState:
        """Note the quality of this step, and after ``interval`` of them see to the number of stages.

        Args:
            state: before this step.
            stages: that were used.
            quality: picks of this step in multiples of the target.
            most: stages that are allowed.
            widest: largest aim in multiples of the target.
        """
        calls, total, aim = state.calls + 1, state.quality + quality, state.aim
        mean = total / self.interval
        over, under = (mean > 1 + self.tolerance).long(), (mean < 1 - self.tolerance).long()
        if self.variant == "published":
            change = under - over
        else:
            change = under + over
            aim = (aim - GAIN * (quality - 1)).clamp(-math.log(CAPACITY), math.log(widest))
        due = calls >= self.interval
        return SIDCoState(
            torch.where(due, (stages + change).clamp(1, most), stages),
            total.masked_fill(due, 0),
            calls.masked_fill(due, 0),
            aim,
        )


@SPARSIFIERS.register
@dataclass(frozen=True)
class SIDCoE(_SIDCo):
    """Each rank fits an exponential distribution to its magnitudes, again to what lies beyond, and picks the rest.

    The threshold for a share r of magnitudes with mean mu is ``mu ln(1/r)``: one pass instead of a sort. Far in the
    tail one fit is wrong, hence *stages*: the first asks for ``first_ratio`` of the magnitudes, each of the others fits
    what is left, ``z = |acc| - threshold so far``, asks for a smaller share of that and adds its increment. The picks
    are all coordinates that reach the last threshold: about k *per rank*, in some steps none. State and threshold are
    each rank's own.

    Two rules for what the stages aim for:

    - ``variant="corrected"`` (default, ours): stages aim from the survivors they really see, and so make up for the
      errors of those before them. The last asks for ``k / survivors``, each between it and the first for the square
      root of that. There are at first as many stages as it takes to leave 3/4 to the last one, and one more whenever
      the mean of ``picks / k`` over ``interval`` steps is outside ``1 +- tolerance``, on whichever side. Moreover the
      fits aim for ``c k`` instead of k: after each step ``ln c -= 0.1 (picks / k - 1)``, with at most 4 for the
      quotient and at least 1/4 for c. That is no statistics but an integral controller: it takes out the bias that the
      fits have left.
    - ``variant="published"``: every stage after the first asks for ``(d / first_ratio) ** (1 / (M - 1))``, where M
      starts at 1, loses one when the mean is too large and gains one when it is too small. That direction is right for
      tails lighter than exponential only. With heavier ones a single stage picks too many, and M stays at 1 for ever.

    In both, these errors of the paper and its code are corrected:

    - increments are added to the threshold so far, and what was cut off does not enter later fits as zeros;
    - zeros are left out of all fits, and k is compared with the other coordinates: where these are k or fewer, they are
      all picked. Ratios and quality refer to them. (The code adds 2e-16, which drives ``mean ln`` towards minus
      infinity.)
    - the scale of the generalised Pareto uses the variance, as its shape does, and not the standard deviation;
    - the quantile of the gamma distribution is exact; the closed form is negative for small shapes;
    - the quality is the mean over all ``interval`` steps, not the sum of all but one divided by ``interval``;
    - every group has its own state, and one stage is all there is where ``density >= first_ratio``.

    Magnitudes that are all equal, or a single one that is not zero, end the stages: what is left is picked. On CUDA at
    most 4 k are sent, more is thinned evenly; all stages that are allowed are computed there, used or not.

    Args:
        first_ratio: share of magnitudes that the first stage keeps, in (0, 1).
        tolerance: relative error of the mean number of picks that leaves the number of stages alone, in (0, 1).
        interval: steps over which that mean is taken, at least 1.
        max_stages: most stages, at least 1. None: ``ceil(ln density / ln 0.5)``, 7 at 1 % and 10 at 0.1 %.
        variant: "corrected" or "published".

    Raises:
        ValueError: for a setting outside its range.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(30, 2, 20_000, generator=torch.Generator().manual_seed(0))
        >>> steps = list(ls.simulate(stream, sparsifier="sidco_e", density=0.01))
        >>> round(sum(step.counts.double().mean().item() for step in steps[10:]) / 20 / 200, 1)
        1.0

    References:
        Abdelmoniem, Elzanaty, Alouini, Canini, An Efficient Statistical-based Gradient Compression Technique for
        Distributed Training Systems, MLSys 2021, arXiv 2101.10761, algorithm 1.
    """

    name: ClassVar[str] = "sidco_e"
    fits: ClassVar[tuple[Fit, Fit]] = ("exponential", "exponential")


@SPARSIFIERS.register
@dataclass(frozen=True)
class SIDCoGP(_SIDCo):
    """As :class:`SIDCoE`, but with a gamma distribution in the first stage and generalised Pareto ones after it.

    Gamma: ``s = ln mean - mean ln``, shape ``A = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s)`` (an approximation of the
    maximum likelihood), scale ``mean / A``, and the exact quantile. Its logarithms make the first stage dearer. The
    generalised Pareto distributions are those of :class:`SIDCoP`. Stages, variants and corrected errors are those of
    :class:`SIDCoE`.

    Args:
        first_ratio: share of magnitudes that the first stage keeps, in (0, 1).
        tolerance: relative error of the mean number of picks that leaves the number of stages alone, in (0, 1).
        interval: steps over which that mean is taken, at least 1.
        max_stages: most stages, at least 1. None: ``ceil(ln density / ln 0.5)``, 7 at 1 % and 10 at 0.1 %.
        variant: "corrected" or "published".

    Raises:
        ValueError: for a setting outside its range.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(30, 2, 20_000, generator=torch.Generator().manual_seed(0))
        >>> steps = list(ls.simulate(stream, sparsifier="sidco_gp", density=0.01))
        >>> round(sum(step.counts.double().mean().item() for step in steps[10:]) / 20 / 200, 1)
        1.0

    References:
        Abdelmoniem et al., MLSys 2021, arXiv 2101.10761, algorithm 1 and appendix.
    """

    name: ClassVar[str] = "sidco_gp"
    fits: ClassVar[tuple[Fit, Fit]] = ("gamma", "pareto")


@SPARSIFIERS.register
@dataclass(frozen=True)
class SIDCoP(_SIDCo):
    """As :class:`SIDCoE`, but with a generalised Pareto distribution in all stages.

    By moments: with mean mu and variance v, shape ``A = (1 - mu^2 / v) / 2`` and scale ``B = mu (mu^2 / v + 1) / 2``;
    the quantile for a share r is ``B / A (r^-A - 1)``, or ``mu ln(1/r)`` where A is 0. Moments always give ``A < 1/2``,
    so that very heavy tails are taken for lighter ones; more stages help. Stages, variants and corrected errors are
    those of :class:`SIDCoE`. (A footnote of the paper swaps the names of P and GP; its appendix and its code do not.)

    Args:
        first_ratio: share of magnitudes that the first stage keeps, in (0, 1).
        tolerance: relative error of the mean number of picks that leaves the number of stages alone, in (0, 1).
        interval: steps over which that mean is taken, at least 1.
        max_stages: most stages, at least 1. None: ``ceil(ln density / ln 0.5)``, 7 at 1 % and 10 at 0.1 %.
        variant: "corrected" or "published".

    Raises:
        ValueError: for a setting outside its range.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(30, 2, 20_000, generator=torch.Generator().manual_seed(0))
        >>> steps = list(ls.simulate(stream, sparsifier="sidco_p", density=0.01))
        >>> round(sum(step.counts.double().mean().item() for step in steps[10:]) / 20 / 200, 1)
        1.0

    References:
        Abdelmoniem et al., MLSys 2021, arXiv 2101.10761, algorithm 1.
    """

    name: ClassVar[str] = "sidco_p"
    fits: ClassVar[tuple[Fit, Fit]] = ("pareto", "pareto")
