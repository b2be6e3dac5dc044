"""Expected growth of residuals while they fill, and detection of more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

FILLING = 3
"""A residual counts as filled after this many times ``1 / density`` steps."""
POWER = 6
"""Power of the growth that is allowed for filled residuals: a limit of 10 there is one of a million here. Gradients of
deep networks become up to 20 thousand times as long when training leaves its first plateau, in calm trainings, too; in
trainings that diverged, residuals became ten million times as long and more."""
FIRST = 8
"""The step before which residuals are checked for the first time."""


def looks(every: int) -> frozenset[int]:
    """Return steps before which residuals are measured between checks, each 1.5 times the last, up to twice ``every``.

    Example:
        >>> sorted(looks(100))
        [8, 12, 18, 27, 40, 60, 90, 135]
    """
    found, step = set(), FIRST
    while step < 2 * every:
        found.add(step)
        step += step // 2
    return frozenset(found)


class Part(NamedTuple):
    """A group in a measurement."""

    name: str
    density: float
    norm: float
    """Norm of its residual, mean over ranks."""


class Filling:
    """Checks the growth of the residuals of all groups together, from the first steps on.

    While residuals fill, for about ``1 / density`` steps, their norm grows: with the root of the number of steps if
    gradients are independent, and with this number itself if all are equal. That much is expected. The reference is the
    largest norm so far by this measure, so that gradients may also grow slowly. Groups are not checked one by one:
    gradients of layers below weights that start at zero grow for hundreds of steps, by many orders of magnitude, but
    are negligible beside the residuals of all groups. A norm that falls again is no alarm.
    """

    def __init__(self) -> None:
        self.norm = self.reference = 0.0
        self.reference_step = self.grown = 0
        """``grown``: measurements in a row with a norm above the expected one."""
        self.explained = 1.0
        """Factor of growth since the reference that filling can explain."""
        self._densities: list[tuple[str, float]] = []
        self._since = 0
        self._reference_age = 0.0

    def judge(self, parts: Sequence[Part], step: int, growth: float) -> None:
        """Evaluate a measurement.

        Args:
            parts: all groups with residuals; other groups or densities than before reset the reference.
            step: number of the step that begins.
            growth: factor by which filled residuals may grow; its :data:`POWER` is allowed here.
        """
        densities = [(part.name, part.density) for part in parts]
        if densities != self._densities:
            self._densities, self._since = densities, step
            self.reference, self.grown = 0.0, 0
        before, self.norm = self.norm, math.hypot(*(part.norm for part in parts))
        if not parts or not self.norm or step == self._since:
            return
        age = min(float(step - self._since), FILLING / min(part.density for part in parts))
        if self.reference:
            self.explained = age / self._reference_age
        expected = self.explained * self.reference
        grown = self.reference > 0 and self.norm > growth**POWER * expected
        self.grown = self.grown + 1 if grown and self.norm > before else 0
        if not grown and self.norm > expected:
            self.reference, self.reference_step, self._reference_age, self.explained = self.norm, step, age, 1.0
