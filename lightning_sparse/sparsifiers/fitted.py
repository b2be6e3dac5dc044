"""The magnitude that a number of coordinates reach, by distributions fitted in stages: what SIDCo decides by."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lightning_sparse.candidates import Candidates
from lightning_sparse.kernels import excess, log_sum, static_shapes, tail
from lightning_sparse.laws import gamma_shape, pareto_moments

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
    """The magnitude that about ``aim`` coordinates reach, by fits in stages.

    Args:
        x: (numel,) finite values.
        aim: () float64 number of coordinates wanted, above 0.
        stages: () int64 number of fits, from 1 to ``most``.
        fits: distributions of the first stage and of all others.
        most: stages that are computed where the host does not know ``stages``.
        first_ratio: share that the first of several stages keeps. Where no less is wanted, it is the only one.
        recount: True: a later stage aims from the survivors it sees; False: its share is settled beforehand.
        candidates: of the group, where x is its accumulator: they may save a pass.

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
    """The same where sizes are known: from the third stage on, only what is left is looked at."""
    found, settled, nonzero, last = 0.0, 1.0, 0.0, 0
    left = x
    for stage in range(most):
        level = _scalar(found)
        if stage == 2:
            left = tail(x, level, candidates)
        elif stage > 2:
            left = tail(left, level)
        number, total, squares = (float(part) for part in excess(left, level))
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
        if stage > last or ratio >= 1 or number < 2:
            break
        mean = total / number
        variance = squares / number - mean * mean
        if not variance > CONSTANT * mean * mean:
            break
        fit = fits[min(stage, 1)]
        if fit == "exponential":
            increment = mean * -math.log(ratio)
        elif fit == "pareto":
            increment = float(pareto_quantile(_scalar(mean), _scalar(variance), _scalar(ratio)))
        else:
            increment = float(gamma_quantile(_scalar(mean), log_sum(left) / number, _scalar(ratio)))
        found = min(found + increment, torch.finfo(x.dtype).max)
    return max(found, torch.finfo(x.dtype).tiny), nonzero


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def pareto_quantile(mean: Tensor, variance: Tensor, ratio: Tensor) -> Tensor:
    """What a share of a generalised Pareto distribution exceeds, by the method of moments; all () float64."""
    shape, scale = pareto_moments(mean, variance)
    exponent = -shape * ratio.log()
    # (r^-A - 1) / A, which goes to ln(1/r) where A goes to 0.
    growth = torch.where(exponent.abs() < 1e-9, 1.0, torch.expm1(exponent) / exponent)
    return scale * -ratio.log() * growth


def gamma_quantile(mean: Tensor, mean_log: Tensor, ratio: Tensor) -> Tensor:
    """What a share of a gamma distribution exceeds, from the mean and the mean logarithm; all () float64.

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
