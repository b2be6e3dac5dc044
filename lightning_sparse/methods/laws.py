"""Laws that magnitudes of gradients may follow, fitted as SIDCo fits them, and how well each one does.

References:
    Abdelmoniem et al., An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems
    (SIDCo), MLSys 2021, arXiv 2101.10761, corollaries 1.1 to 1.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.methods.scalars import Number, functions


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
