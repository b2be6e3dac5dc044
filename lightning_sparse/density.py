"""How much to send: schedules over steps, and the only place where densities become counts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass


def check_density(density: float, name: str = "density") -> float:
    """Return ``density`` if it lies in (0, 1], else raise.

    Raises:
        ValueError: if it is no real number in (0, 1].
    """
    if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0 < density <= 1:
        raise ValueError(
            f"Expected {name} to be a number in (0, 1], the share of coordinates that is sent, but got {density!r}."
        )
    return float(density)


def count(density: float, numel: int) -> int:
    """Number of coordinates k that a density stands for in a group: ``max(1, floor(density * numel))``.

    k is what *each rank* picks in independent methods (Top-k, hard-threshold) and what *all ranks together* pick in
    exclusive ones (MiCRO, ExDyna), as in the papers. A product that misses an integer by rounding alone is taken as
    that integer.

    Example:
        >>> count(0.01, 12_345), count(0.001, 10), count(1.0, 7), count(0.29, 100)
        (123, 1, 7, 29)
    """
    return max(1, min(numel, math.floor(density * numel * (1 + 1e-12))))


class DensitySchedule(ABC):
    """Target density as a function of the step; a frozen dataclass of its settings."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Density in (0, 1] for a step, counted in synchronised backward passes from 0."""


@dataclass(frozen=True)
class Constant(DensitySchedule):
    """The same density at every step.

    Args:
        density: share of coordinates that is sent, in (0, 1].

    Raises:
        ValueError: if the density is outside (0, 1].

    Example:
        >>> Constant(0.01)(1000)
        0.01
    """

    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    def __call__(self, step: int) -> float:
        """Density at ``step``."""
        return float(self.density)


@dataclass(frozen=True)
class Warmup(DensitySchedule):
    """Go from one density to another geometrically, then stay there.

    ``density(t) = start * (end / start) ** (t / steps)`` for ``t < steps``, ``end`` afterwards. Early gradients change
    fast, and a residual of early steps is stale when it is sent; DGC therefore starts dense and lowers the density
    exponentially over the first epochs (there in five stairs, 0.25, 0.0625, ...; here without stairs).

    Args:
        start: density at step 0, in (0, 1].
        end: density from step ``steps`` on, in (0, 1].
        steps: length of the warm-up in synchronised backward passes, at least 1.

    Raises:
        ValueError: if a density is outside (0, 1] or ``steps`` is no positive integer.

    Example:
        >>> schedule = Warmup(0.25, 0.01, steps=500)
        >>> [round(schedule(t), 4) for t in (0, 250, 500, 1000)]
        [0.25, 0.05, 0.01, 0.01]

    References:
        Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3.3 (warm-up training).
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_density(self.start, "start")
        check_density(self.end, "end")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"Expected steps to be a positive integer but got {self.steps!r}.")

    def __call__(self, step: int) -> float:
        """Density at ``step``."""
        if step >= self.steps:
            return float(self.end)
        return float(self.start * (self.end / self.start) ** (step / self.steps))


def as_schedule(density: float | DensitySchedule) -> DensitySchedule:
    """Turn a number into a :class:`Constant`; leave schedules as they are.

    Raises:
        ValueError: if it is neither a number in (0, 1] nor a :class:`DensitySchedule`.
    """
    return density if isinstance(density, DensitySchedule) else Constant(check_density(density))
