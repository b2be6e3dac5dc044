"""Thresholds of SIDCo: the magnitude that a number of coordinates reach, by distributions fitted in stages."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates
from lightning_sparse.methods.laws import gamma_shape, pareto_moments
from lightning_sparse.ops import excess, log_sum, static_shapes, sums, tail

Fit = Literal["exponential", "gamma", "pareto"]

CONSTANT = 1e-12
"""Magnitudes whose variance is below this multiple of their squared mean are taken as equal."""


def threshold(
    x: Tensor,
    aim: Tensor,
    stages: Tensor,
    fits: tuple[Fit, Fit],
    *,
    most: int,
    first_ratio: float = 0.25,
    recount: bool = True,
    candidates: Candidates | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the magnitude that about ``aim`` coordinates reach, by fits in stages.

    Args:
        x: (numel,) finite values.
        aim: () float64 number of coordinates wanted, above 0.
        stages: () int64 number of fits, from 1 to ``most``.
        fits: distributions of the first stage and of all others.
        most: stages that are computed if the host does not know ``stages``.
        first_ratio: share that the first of several stages keeps. If at least this share is wanted, it is the only
            stage.
        recount: True: a later stage aims from the number of survivors; False: its share is fixed beforehand.
        candidates: of the group, if x is its accumulator: they may save a pass.

    Returns:
        The threshold, () float64, above 0: the least positive number of x's precision selects all but zeros. And the
        number of coordinates that are not zero, () float64.
    """
    if not static_shapes(x.device):
        levels = _thresholds_on_host(x, float(aim), int(stages), fits, most, first_ratio, recount, candidates)
        decided, nonzero = torch.tensor(levels, dtype=torch.float64, device="cpu").unbind()
        return decided, nonzero
    found = torch.zeros_like(aim)
    for stage in range(most):
        number, total, squares = excess(x, found)
        if stage == 0:
            nonzero, share = number, aim / number
            last = torch.where(share < first_ratio, stages - 1, 0)
            settled = (share / first_ratio) ** (1 / last.clamp(min=1))
            ratio, going = torch.where(last > 0, first_ratio, share), share < 1
        elif recount:
            left = aim / number
            ratio = torch.where(last > stage, left.sqrt().clamp(min=first_ratio), left)
        else:
            ratio = settled
        mean = total / number
        variance = squares / number - mean.square()
        going = going & (stage <= last) & (ratio < 1) & (number >= 2) & (variance > CONSTANT * mean.square())
        fit = fits[min(stage, 1)]
        if fit == "exponential":
            increment = mean * -ratio.log()
        elif fit == "pareto":
            increment = pareto_quantile(mean, variance, ratio)
        else:
            increment = gamma_quantile(mean, log_sum(x) / number, ratio)
        found = torch.where(going, found + increment, found).clamp(max=torch.finfo(x.dtype).max)
    return found.clamp(min=torch.finfo(x.dtype).tiny), nonzero


def _thresholds_on_host(
    x: Tensor,
    aim: float,
    stages: int,
    fits: tuple[Fit, Fit],
    most: int,
    first_ratio: float,
    recount: bool,
    candidates: Candidates | None,
) -> tuple[float, float]:
    """Do the same as :func:`threshold` with known sizes: later stages read the survivors only."""
    found, settled, nonzero, last = 0.0, 1.0, 0.0, 0
    left, first = x, sums(x, "logarithms" if "gamma" in fits else "magnitudes", candidates)
    number, total, squares = first[:3]
    for stage in range(most):
        if stage > last:
            break
        if stage:
            left = tail(left, found)
            number, total, squares = sums(left, "beyond", level=found)[:3]
        ratio = aim / number if number else math.inf
        if stage == 0:
            nonzero = number
            if ratio < first_ratio and stages > 1:
                last = stages - 1
                settled, ratio = (ratio / first_ratio) ** (1 / last), first_ratio
        elif not recount:
            ratio = settled
        elif last > stage:
            ratio = max(math.sqrt(ratio), first_ratio)
        if ratio >= 1 or number < 2:
            break
        mean = total / number
        variance = squares / number - mean * mean
        if not variance > CONSTANT * mean * mean:
            break
        fit = fits[min(stage, 1)]
        if fit == "exponential":
            increment = mean * -math.log(ratio)
        elif fit == "pareto":
            increment = pareto_quantile_on_host(mean, variance, ratio)
        else:
            increment = gamma_quantile_on_host(mean, first.logarithms / number, ratio)
        found = min(found + increment, torch.finfo(x.dtype).max)
    return max(found, torch.finfo(x.dtype).tiny), nonzero


def pareto_quantile(mean: Tensor, variance: Tensor, ratio: Tensor) -> Tensor:
    """Return the value that a share of a generalised Pareto distribution exceeds, by moments; all () float64."""
    shape, scale = pareto_moments(mean, variance)
    exponent = -shape * ratio.log()
    # (r^-A - 1) / A, with the limit ln(1/r) for A = 0.
    growth = torch.where(exponent.abs() < 1e-9, 1.0, torch.expm1(exponent) / exponent)
    return scale * -ratio.log() * growth


def pareto_quantile_on_host(mean: float, variance: float, ratio: float) -> float:
    """Compute :func:`pareto_quantile` for numbers, in a tenth of its time."""
    odds, depth = mean * mean / variance, -math.log(ratio)
    exponent = (1 - odds) / 2 * depth
    growth = 1.0 if abs(exponent) < 1e-9 else math.expm1(exponent) / exponent
    return mean * (odds + 1) / 2 * depth * growth


def gamma_quantile(mean: Tensor, mean_log: Tensor, ratio: Tensor) -> Tensor:
    """Return the value that a share of a gamma distribution exceeds, by mean and mean log; all () float64.

    The survival function is inverted by cutting a bracket into 31 parts, six times. In units of the scale, ``x^A /
    Gamma(A + 1)`` bounds the distribution function, and ``A + sqrt(2 A L) + L`` with ``L = ln(1/r)`` the quantile.
    """
    gap = (mean.log() - mean_log).clamp(min=CONSTANT)
    shape = gamma_shape(gap)
    depth = -ratio.log()
    low = (torch.log1p(-ratio) + torch.lgamma(shape + 1)) / shape
    high = (shape + (2 * shape * depth).sqrt() + depth).log()
    part = torch.linspace(0, 1, 32, dtype=torch.float64, device=mean.device)
    for _ in range(6):
        points = low + (high - low) * part
        beyond = torch.special.gammaincc(shape, points.exp()) > ratio  # descends along the points
        place = beyond.sum().clamp(1, 31)
        step = (high - low) / 31
        low = low + step * (place - 1)
        high = low + step
    return mean / shape * ((low + high) / 2).exp()


def gamma_quantile_on_host(mean: float, mean_log: float, ratio: float) -> float:
    """Compute :func:`gamma_quantile` for numbers, in half of its time."""
    gap, depth = max(math.log(mean) - mean_log, CONSTANT), -math.log(ratio)
    shape = (3 - gap + math.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
    low = (math.log1p(-ratio) + math.lgamma(shape + 1)) / shape
    high = math.log(shape + math.sqrt(2 * shape * depth) + depth)
    part, of = np.linspace(0, 1, 32), torch.tensor(shape, dtype=torch.float64, device="cpu")
    for _ in range(6):
        beyond = torch.special.gammaincc(of, torch.from_numpy(np.exp(low + (high - low) * part))).numpy() > ratio
        step = (high - low) / 31
        low += step * (min(max(int(np.count_nonzero(beyond)), 1), 31) - 1)
        high = low + step
    return mean / shape * math.exp((low + high) / 2)
