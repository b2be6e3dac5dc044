"""SIDCo: a threshold from a distribution that is fitted to the magnitudes, and again to those beyond it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_integer, check_share
from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.laws import Fit, threshold
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.methods.sparsifiers.estimation import check_variant, reaching

CAPACITY = 4
"""Device slots in multiples of k at the target density. The adaptive rule does not distinguish larger counts either,
and it never aims for less than this part of the target."""
GAIN = 0.1
"""Change of the logarithm of the aim per relative error of one step."""
LAST_RATIO = 0.75
"""The stages of the corrected variant leave at least this share to the last one."""


class SIDCoState(NamedTuple):
    """State of a group on one rank; all tensors are scalars."""

    stages: Tensor
    """int64 number of fits M."""
    quality: Tensor
    """float64 sum of count / target since the last decision on the number of stages."""
    calls: Tensor
    """int64 number of steps in that sum."""
    aim: Tensor
    """float64 logarithm of the number that the fits aim for, in multiples of k. Always 0 in the published variant."""


@dataclass(frozen=True)
class _SIDCo(Sparsifier):
    """Base class of the three methods, which differ in the distributions that they fit."""

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
            check_share(getattr(self, name), name, one=False)
        check_integer(self.interval, "interval")
        if self.max_stages is not None:
            check_integer(self.max_stages, "max_stages")
        check_variant(self.variant)

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> SIDCoState:
        """Return the state with the fewest stages, no observations, and k as the aim."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        fewest, _ = self._limits(density)
        calls = torch.zeros((), dtype=torch.int64, device=device)
        return SIDCoState(torch.full_like(calls, fewest), zero, calls, zero)

    def select(self, acc: Tensor, state: SIDCoState, ctx: Context) -> tuple[Selection, SIDCoState]:
        """Select all that reach the last threshold: more or fewer than k, maybe none."""
        numel, k = acc.numel(), count(ctx.density, acc.numel())
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
        )
        room = min(numel, CAPACITY * k)
        selection = reaching(acc, decided, room, ctx.step, candidates=ctx.candidates)
        quality = torch.where(nonzero > 0, selection.count / nonzero.clamp(1, k), 1.0).clamp(max=CAPACITY)
        return selection, self._adapt(state, stages, quality, most, numel / k)

    def _limits(self, density: float) -> tuple[int, int]:
        """Return the least and the largest number of stages."""
        most = self.max_stages or max(1, math.ceil(math.log(density) / math.log(0.5)))
        if self.variant == "published" or density >= self.first_ratio:
            return 1, most
        fewest, left = 2, density / self.first_ratio
        while left < LAST_RATIO and fewest < most:
            fewest, left = fewest + 1, left / max(math.sqrt(left), self.first_ratio)
        return min(fewest, most), most

    def _adapt(self, state: SIDCoState, stages: Tensor, quality: Tensor, most: int, widest: float) -> SIDCoState:
        """Add the quality of this step, and decide on the number of stages after ``interval`` steps.

        Args:
            state: before this step.
            stages: number that was used.
            quality: count of this step in multiples of the target.
            most: largest number of stages.
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
    """Each rank fits an exponential distribution to its magnitudes, again to the tail, and selects beyond the last fit.

    The threshold for a share r of magnitudes with mean mu is ``mu ln(1/r)``: one pass instead of a sort. Far in the
    tail one fit is wrong, hence *stages*: the first keeps ``first_ratio`` of the magnitudes, each of the others fits
    the rest, ``z = |acc| - threshold so far``, keeps a smaller share of it and adds its increment. All coordinates
    that reach the last threshold are selected: about k *per rank*, in some steps none. Each rank has its own state and
    threshold.

    If all magnitudes are equal, or a single one is not zero, the stages end and the rest is selected. On CUDA at most
    4 k are sent, more are thinned evenly; all ``max_stages`` are computed there, used or not.

    Formula:
        ``S_i = {j : |acc_i[j]| >= threshold_i}``; a stage that keeps a share r adds ``mu ln(1/r)``, mu the mean of what
        the stages before left; ``update = (1/n) sum_i scatter(S_i, acc_i[S_i])``

    Differs from the paper:
        Two rules for the shares of the stages:

        - ``variant="corrected"`` (default, ours): stages aim from the real number of survivors, which corrects the
          errors of earlier stages. The last keeps ``c k / survivors``, each between it and the first ``max(sqrt(c k /
          survivors), first_ratio)``. At first there are as many stages as it takes to leave 3/4 to the last one, and
          one more whenever the mean of ``count / k`` over ``interval`` steps is outside ``1 +- tolerance``, on either
          side. Moreover the fits aim for ``c k`` instead of k: after each step ``ln c -= 0.1 (count / k - 1)``, with at
          most 4 for the quotient and at least 1/4 for c. This is an integral controller, which removes the remaining
          bias of the fits.
        - ``variant="published"``: every stage after the first keeps ``(d / first_ratio) ** (1 / (M - 1))``, where M
          starts at 1, loses one when the mean is too large and gains one when it is too small. That direction is right
          for tails lighter than exponential only. With heavier ones a single stage selects too many, and M stays at 1.

        In both, these errors of the paper and its code are corrected:

        - increments are added to the threshold so far, and values below it do not enter later fits as zeros;
        - zeros are left out of all fits, and k is compared with the other coordinates: if these are k or fewer, they
          are all selected. Ratios and quality refer to them. (The code adds 2e-16, which drives ``mean ln`` towards
          minus infinity.)
        - the scale of the generalised Pareto uses the variance, as its shape does, and not the standard deviation;
        - the quantile of the gamma distribution is exact; the closed form is negative for small shapes;
        - the quality is the mean over all ``interval`` steps, not the sum of all but one divided by ``interval``;
        - every group has its own state, and there is only one stage if ``density >= first_ratio``.

    Args:
        first_ratio: share of magnitudes that the first stage keeps, in (0, 1).
        tolerance: relative error of the mean count up to which the number of stages stays, in (0, 1).
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
    """:class:`SIDCoE` with a gamma distribution in the first stage and generalised Pareto ones after it.

    Gamma: ``s = ln mean - mean ln``, shape ``A = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s)`` (an approximation of the
    maximum likelihood), scale ``mean / A``, and the exact quantile. Its logarithms make the first stage slower. The
    generalised Pareto distributions are those of :class:`SIDCoP`. Stages, variants and corrected errors are those of
    :class:`SIDCoE`.

    Formula:
        ``S_i = {j : |acc_i[j]| >= threshold_i}``; the first stage adds the quantile of a gamma distribution, each later
        one ``B / A (r^-A - 1)``; ``update = (1/n) sum_i scatter(S_i, acc_i[S_i])``

    Args:
        first_ratio: share of magnitudes that the first stage keeps, in (0, 1).
        tolerance: relative error of the mean count up to which the number of stages stays, in (0, 1).
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
    """:class:`SIDCoE` with a generalised Pareto distribution in all stages.

    By moments: with mean mu and variance v, shape ``A = (1 - mu^2 / v) / 2`` and scale ``B = mu (mu^2 / v + 1) / 2``;
    the quantile for a share r is ``B / A (r^-A - 1)``, or ``mu ln(1/r)`` if A is 0. Moments always give ``A < 1/2``,
    so that very heavy tails are taken for lighter ones; more stages help. Stages, variants and corrected errors are
    those of :class:`SIDCoE`. (A footnote of the paper swaps the names of P and GP; its appendix and its code do not.)

    Formula:
        ``S_i = {j : |acc_i[j]| >= threshold_i}``; a stage that keeps a share r adds ``B / A (r^-A - 1)``; ``update =
        (1/n) sum_i scatter(S_i, acc_i[S_i])``

    Args:
        first_ratio: share of magnitudes that the first stage keeps, in (0, 1).
        tolerance: relative error of the mean count up to which the number of stages stays, in (0, 1).
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
