"""Residuals that still fill: by how much they may grow, and whether they grow by more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

FILLING = 3
"""A residual counts as filled after this many times ``1 / density`` steps."""
POWER = 6
"""Power of the growth that is allowed for filled residuals: 10 times there are a million times here. Gradients of deep
networks become up to 20 thousand times as long when training leaves its first plateau, in calm trainings, too; where
trainings diverged, residuals were ten million times as long and more."""
FIRST = 8
"""The step before which residuals are looked at for the first time."""


def looks(every: int) -> frozenset[int]:
    """Steps before which residuals are looked at beside the checks, each half as late again, until checks are as dense.

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
    """A group at a look."""

    name: str
    density: float
    norm: float
    """Of its residual, mean over ranks."""


class Filling:
    """Judges the residuals of all groups together, from the first steps on.

    While they fill, for about ``1 / density`` steps, their norm grows by itself: with the root of the number of steps
    where gradients are independent, and with this number itself where all are alike. That much is expected. The
    reference is the largest norm so far by this measure, so that gradients may also become longer little by little.
    Groups are not judged for themselves: what lies below weights that start at zero has gradients that grow for
    hundreds of steps, by many orders of magnitude, and beside the residuals of all groups these are nothing. A norm
    that falls again is no alarm.
    """

    def __init__(self) -> None:
        self.norm = self.reference = 0.0
        self.reference_step = self.grown = 0
        """``grown``: looks in a row with a norm beyond what is expected."""
        self.explained = 1.0
        """Times that the norm may have grown since the reference because residuals fill."""
        self._densities: list[tuple[str, float]] = []
        self._since = 0
        self._reference_age = 0.0

    def judge(self, parts: Sequence[Part], step: int, growth: float) -> None:
        """Take in a look.

        Args:
            parts: all groups with residuals; where groups or densities are others than before, it begins anew.
            step: number of the step that begins.
            growth: times that residuals may grow once they have filled; its :data:`POWER` is allowed here.
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
