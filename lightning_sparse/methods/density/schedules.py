"""Schedules of the density over steps, and the only place where densities become counts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real

from lightning_sparse.core.checks import Settings, check_integer, expect, is_number


def check_density(density: float, name: str = "density") -> float:
    """Return ``density`` if it lies in (0, 1], else raise.

    Raises:
        ValueError: unless it is a real number in (0, 1].
    """
    what = "a number in (0, 1], the share of coordinates that is sent"
    meant = _share_in(density)
    hint = "" if meant is None else f" Did you mean {meant:g}?"
    expect(is_number(density) and 0 < density <= 1, name, what, density, hint)
    return float(density)


def _share_in(given: object) -> float | None:
    """Return the share that a text such as "0.01" or "1 %" means, or None."""
    if not isinstance(given, str):
        return None
    number, percent, rest = given.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        return None
    return share if 0 < share <= 1 and not rest else None


def count(density: float, numel: int) -> int:
    """Return the number of coordinates k of a density in a group: ``max(1, floor(density * numel))``.

    k counts the selected indices of *each rank* in independent methods (Top-k, hard-threshold) and those of *all ranks
    together* in exclusive ones (MiCRO, ExDyna), as in the papers. A product that misses an integer by rounding alone
    is taken as that integer.

    Raises:
        ValueError: unless the density, which a schedule may have given, is in (0, 1].

    Example:
        >>> count(0.01, 12_345), count(0.001, 10), count(1.0, 7), count(0.29, 100)
        (123, 1, 7, 29)
    """
    if not (isinstance(density, Real) and 0 < density <= 1):
        check_density(density, "the density of a step")
    return max(1, min(numel, math.floor(density * numel * (1 + 1e-12))))


class DensitySchedule(Settings, ABC):
    """Target density as a function of the step; a frozen dataclass of its settings."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the density in (0, 1] for a step, counted in synchronised backward passes from 0."""

    needs_profile = False
    """True if densities come from a profile of a step; a setting of training with ``overlap=True`` only."""


@dataclass(frozen=True)
class Constant(DensitySchedule):
    """Keep one density at every step.

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
        """Return the density at ``step``."""
        return float(self.density)


@dataclass(frozen=True)
class Warmup(DensitySchedule):
    """A density that goes geometrically from one value to another, then stays there.

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
        check_integer(self.steps, "steps")

    def __call__(self, step: int) -> float:
        """Return the density at ``step``."""
        if step >= self.steps:
            return float(self.end)
        return float(self.start * (self.end / self.start) ** (step / self.steps))


def as_schedule(density: float | DensitySchedule, name: str = "density") -> DensitySchedule:
    """Turn a number into a :class:`Constant`; leave schedules as they are.

    Raises:
        ValueError: unless it is a number in (0, 1] or a :class:`DensitySchedule`.
    """
    return density if isinstance(density, DensitySchedule) else Constant(check_density(density, name))
