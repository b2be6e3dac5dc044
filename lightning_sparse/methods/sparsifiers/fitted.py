"""Thresholds of SIDCo: the magnitude that a number of coordinates reach, by distributions fitted in stages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_sparse.methods.laws import gamma_shape, pareto_moments
from lightning_sparse.methods.scalars import Flag, Number, divisor, either, functions, greater, known, lesser, tensor
from lightning_sparse.ops import summed, tail

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

    Returns:
        The threshold, () float64, above 0: the least positive number of x's precision selects all but zeros. And the
        number of coordinates that are not zero, () float64.
    """
    wanted, later = known(aim), known(stages.double() - 1)
    found, nonzero, last, settled = 0 * wanted, wanted, 0.0, 1.0
    going: Flag = True
    left = x
    for stage in range(most):
        going = going & (stage <= last)
        if going is False:
            break
        fit = fits[min(stage, 1)]
        if stage:
            left = tail(left, found)
        number, total, squares, logarithms = summed(left, found, fit == "gamma")
        some = divisor(number)
        ratio = wanted / some
        if stage == 0:
            nonzero, last = number, either(ratio < first_ratio, later, 0.0)
            settled = (ratio / first_ratio) ** (1 / greater(last, 1.0))
            ratio = either(last > 0, first_ratio, ratio)
        elif recount:
            ratio = either(last > stage, greater(functions(ratio).sqrt(ratio), first_ratio), ratio)
        else:
            ratio = settled
        mean = total / some
        variance = squares / some - mean * mean
        going = going & (ratio < 1) & (number >= 2) & (variance > CONSTANT * mean * mean)
        if going is False:
            break
        if fit == "exponential":
            increment = mean * -functions(ratio).log(ratio)
        elif fit == "pareto":
            increment = pareto_quantile(mean, variance, ratio)
        else:
            increment = gamma_quantile(mean, logarithms / some, ratio)
        found = either(going, lesser(found + increment, torch.finfo(x.dtype).max), found)
    return tensor(greater(found, torch.finfo(x.dtype).tiny)), tensor(nonzero)


def pareto_quantile(mean: Number, variance: Number, ratio: Number) -> Number:
    """Return the value that a share of a generalised Pareto distribution exceeds, by moments; all float64."""
    shape, scale = pareto_moments(mean, variance)
    depth = -functions(ratio).log(ratio)
    exponent = shape * depth
    exponent = either(abs(exponent) < 1e-9, 1e-300, exponent)  # (r^-A - 1) / A has the limit ln(1/r) for A = 0
    return scale * depth * (functions(exponent).expm1(exponent) / exponent)


def gamma_quantile(mean: Number, mean_log: Number, ratio: Number) -> Number:
    """Return the value that a share of a gamma distribution exceeds, by mean and mean log; all float64.

    The survival function is inverted by cutting a bracket into 31 parts, six times. In units of the scale, ``x^A /
    Gamma(A + 1)`` bounds the distribution function, and ``A + sqrt(2 A L) + L`` with ``L = ln(1/r)`` the quantile.
    """
    of = functions(mean)
    gap = greater(of.log(mean) - mean_log, CONSTANT)
    shape = gamma_shape(gap)
    depth = -functions(ratio).log(ratio)
    low = (functions(ratio).log1p(-ratio) + of.lgamma(shape + 1)) / shape
    high = of.log(shape + of.sqrt(2 * shape * depth) + depth)
    exact = tensor(shape)
    part = torch.linspace(0, 1, 32, dtype=torch.float64, device=exact.device)
    for _ in range(6):
        beyond = torch.special.gammaincc(exact, torch.exp(low + (high - low) * part)) > ratio  # descends
        place = known(beyond.sum().clamp(1, 31))
        step = (high - low) / 31
        low = low + step * (place - 1)
        high = low + step
    return mean / shape * of.exp((low + high) / 2)
