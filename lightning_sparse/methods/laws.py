"""Laws that magnitudes of gradients may follow, fitted as SIDCo fits them: how well each does, and its thresholds.

References:
    Abdelmoniem et al., An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems
    (SIDCo), MLSys 2021, arXiv 2101.10761, corollaries 1.1 to 1.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.ops import Flag, Number, divisor, either, functions, greater, known, lesser, summed, tail, tensor

Fit = Literal["exponential", "gamma", "pareto"]
CONSTANT = 1e-12
"""Magnitudes whose variance is below this multiple of their squared mean are taken as equal."""


class Law(NamedTuple):
    """A fitted distribution of positive numbers."""

    name: str
    parameters: dict[str, float]
    survival: Callable[[Tensor], Tensor]
    """Share that exceeds x."""
    density: Callable[[Tensor], Tensor]
    """Probability density."""

    def distance(self, x: Tensor) -> float:
        """Return the Kolmogorov-Smirnov distance to a sample, in [0, 1]: the largest difference of the two shares.

        Args:
            x: (m,) positive and ascending.
        """
        beyond, count = self.survival(x), x.numel()
        reached = torch.arange(count, dtype=x.dtype, device=x.device)
        over = (beyond - (1 - reached / count)).abs().max()
        under = (beyond - (1 - (reached + 1) / count)).abs().max()
        return float(torch.maximum(over, under))


def fit_laws(x: Tensor) -> list[Law]:
    """Fit exponential, gamma and generalised Pareto laws to a sample.

    Exponential and gamma by (nearly) maximum likelihood, generalised Pareto by moments, so that its shape is below 1/2.

    Args:
        x: (m,) float64, positive, at least two different numbers.

    Example:
        >>> x = torch.empty(100_000, dtype=torch.float64).exponential_(2.0, generator=torch.Generator().manual_seed(0))
        >>> for law in fit_laws(x):
        ...     fitted = [round(abs(value), 1) for value in law.parameters.values()]
        ...     print(law.name, fitted, law.distance(x.sort().values) < 0.01)
        exponential [0.5] True
        gamma [1.0, 0.5] True
        pareto [0.0, 0.5] True
    """
    return [_exponential(x), _gamma(x), _pareto(x)]


def gamma_shape(gap: Number) -> Number:
    """Return the shape of a gamma law by ``ln mean - mean ln``, above 0: nearly the one of maximum likelihood."""
    return (3 - gap + functions(gap).sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)


def pareto_moments(mean: Number, variance: Number) -> tuple[Number, Number]:
    """Return the shape, below 1/2, and the scale of a generalised Pareto law of these moments."""
    odds = mean * mean / variance
    return (1 - odds) / 2, mean * (odds + 1) / 2


def _exponential(x: Tensor) -> Law:
    mean = float(x.mean())
    return Law("exponential", {"scale": mean}, lambda t: torch.exp(-t / mean), lambda t: torch.exp(-t / mean) / mean)


def _gamma(x: Tensor) -> Law:
    mean = x.mean()
    gap = (mean.log() - x.log().mean()).clamp(min=1e-12)
    shape = gamma_shape(gap)
    scale = mean / shape

    def density(t: Tensor) -> Tensor:
        return torch.exp((shape - 1) * t.log() - t / scale - torch.lgamma(shape) - shape * scale.log())

    def survival(t: Tensor) -> Tensor:
        beyond: Tensor = torch.special.gammaincc(shape, t / scale)
        return beyond

    return Law("gamma", {"shape": float(shape), "scale": float(scale)}, survival, density)


def _pareto(x: Tensor) -> Law:
    shape, scale = map(float, pareto_moments(x.mean(), x.var(correction=0)))
    if abs(shape) < 1e-9:  # is the exponential law
        return _exponential(x)._replace(name="pareto", parameters={"shape": 0.0, "scale": scale})

    def inside(t: Tensor) -> Tensor:  # with a negative shape, nothing is beyond -scale / shape
        return (1 + shape * t / scale).clamp(min=0)

    return Law(
        "pareto",
        {"shape": shape, "scale": scale},
        lambda t: inside(t) ** (-1 / shape),
        lambda t: inside(t) ** (-1 / shape - 1) / scale,
    )


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
