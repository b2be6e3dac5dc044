"""Expected growth of residuals while they fill, and detection of more."""

from __future__ import annotations

from collections.abc import Mapping

FILLING = 3
"""A residual counts as filled after this many times ``1 / density`` steps."""
POWER = 6
"""Power of the growth that is allowed for filled residuals: a limit of 10 there is one of a million here. Gradients of
deep networks become up to 20 thousand times as long when training leaves its first plateau, in calm trainings, too; in
trainings that diverged, residuals became ten million times as long and more."""


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
        self._densities: Mapping[str, float] = {}
        self._since = 0
        self._reference_age = 0.0

    def judge(self, densities: Mapping[str, float], norm: float, step: int, growth: float) -> None:
        """Evaluate a measurement.

        Args:
            densities: of all groups with residuals, by name; others than before reset the reference.
            norm: of all residuals together, mean over ranks.
            step: number of the step that begins.
            growth: factor by which filled residuals may grow; its :data:`POWER` is allowed here.
        """
        if densities != self._densities:
            self._densities, self._since = densities, step
            self.reference, self.grown = 0.0, 0
        before, self.norm = self.norm, norm
        if not norm or step == self._since:
            return
        age = min(float(step - self._since), FILLING / min(densities.values()))
        if self.reference:
            self.explained = age / self._reference_age
        expected = self.explained * self.reference
        grown = self.reference > 0 and norm > growth**POWER * expected
        self.grown = self.grown + 1 if grown and norm > before else 0
        if not grown and norm > expected:
            self.reference, self.reference_step, self._reference_age, self.explained = norm, step, age, 1.0
