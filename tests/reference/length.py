"""By what SecondMoment multiplies gradients and what it remembers, where their length changes: in Python's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Length:
    """Follows the gradients of one rank and group."""

    def __init__(self) -> None:
        self.used: list[float] = []
        self.unit = 0.0

    def __call__(self, gradient: Iterable[float]) -> tuple[float, float]:
        """Factors of the gradient and of what is remembered."""
        squares = [float(x) ** 2 for x in gradient]
        square = sum(squares) / len(squares)
        if square == 0:
            return 1.0, 1.0
        take = 1.0
        if self.used and square > 4 * self._mean():
            take = math.sqrt(4 * self._mean() / square)
        self.used.append(take**2 * square)
        length, carry = math.sqrt(self._mean()), 1.0
        if not self.unit / 1.25 <= length <= self.unit * 1.25:
            carry = length / self.unit if self.unit else 1.0
            self.unit = length
        return take, carry

    def _mean(self) -> float:
        """Of squares, each of which counts 0.9 times as much as the next one."""
        weights = [0.9 ** (len(self.used) - 1 - i) for i in range(len(self.used))]
        return sum(w * x for w, x in zip(weights, self.used, strict=True)) / sum(weights)
