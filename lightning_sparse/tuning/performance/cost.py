"""Cost of a group and of a step: seconds to select and to exchange, by coordinates, and when a step of groups ends.

Messages cost a straight line, ``alpha + beta * amount``: a price per message and a price per byte.

One processor computes backward layer by layer, and selects in a group after the group's last gradient, so that a
selection delays all layers after it. One network carries one exchange after the other, while the processor continues::

    ready = done = 0
    for group in groups:
        ready = ready + backward_seconds(group) + select_seconds(group)
        done  = max(ready, done) + exchange_seconds(group)

This is the model of OMGS-SGD. If messages travel together, the exchange of a group is only its own work, and one
exchange for all comes at the end: it pays once for each collective, and for the bytes of all groups. Time counts from
the start of backward: the time before it is the same for all groups.

References:
    Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs
    (OMGS-SGD), INFOCOM 2020.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from lightning_sparse.core.checks import Settings, check_number, expect

Timeline = tuple[Sequence[int], Sequence[float]]
"""Coordinates of each group, and the seconds of backward from one group to the next, in the order of backward."""


@dataclass(frozen=True)
class Line(Settings):
    """Seconds as a straight line: ``alpha + beta * amount``, and 0 for an amount of 0.

    Args:
        alpha: seconds for any amount above 0, at least 0.
        beta: seconds for each unit of the amount (a byte, a coordinate), at least 0.

    Raises:
        ValueError: if a coefficient is negative or not finite.

    Example:
        >>> gigabit = Line(alpha=50e-6, beta=8e-9)
        >>> gigabit(0), gigabit(1_000_000)
        (0.0, 0.00805)
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        check_number(self.alpha, "alpha", "a finite number of seconds of at least 0")
        check_number(self.beta, "beta", "a finite number of seconds per unit of at least 0")

    def __call__(self, amount: float) -> float:
        """Return the seconds for an amount.

        Raises:
            ValueError: if the amount is negative.
        """
        if amount <= 0:
            check_number(amount, "amount")
            return 0.0
        return self.alpha + self.beta * amount

    def __add__(self, other: Line) -> Line:
        """Return the sum of both, for the same amount."""
        if not isinstance(other, Line):
            return NotImplemented
        return Line(self.alpha + other.alpha, self.beta + other.beta)

    def line(self) -> Line:
        """Return this line."""
        return self

    def per(self, units: float) -> Line:
        """Return the line by another amount, of so many units each.

        Example:
            >>> Line(50e-6, 8e-9).per(4)  # by values of 4 bytes instead of by bytes
            Line(alpha=5e-05, beta=3.2e-08)
        """
        return Line(self.alpha, self.beta * units)

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Fit a line to any measurements, see :meth:`fit`: zeros are left out, and a single amount makes a constant."""
        positive = [(amount, taken) for amount, taken in points if taken > 0]
        if len({amount for amount, _ in positive}) < 2:
            return cls(median(taken for _, taken in positive), 0.0) if positive else NOTHING
        return cls.fit(*zip(*positive, strict=True))

    @classmethod
    def fit(cls, amounts: Sequence[float], seconds: Sequence[float]) -> Line:
        """Fit a line to measurements, robust against outliers, with both coefficients at least 0.

        Of measurements of the same amount only the median counts. The line then minimises
        ``sum |alpha + beta x - y| / y`` over these points: relative deviations, so that small messages decide alpha and
        large ones beta; absolute ones, so that one bad point is ignored. The minimum is exact: it lies on two points,
        or on one point and a coefficient of 0, and all such lines are tried, which is cubic in the number of different
        amounts (meant for dozens).

        Args:
            amounts: of bytes or coordinates, above 0, of at least two different sizes; best in powers of 2 or 4.
            seconds: that each took, above 0.

        Raises:
            ValueError: if lengths differ, numbers are not positive and finite, or all amounts are equal.

        Example:
            >>> sizes = [1_000, 1_000, 1_000, 1_000_000, 1_000_000, 1_000_000]
            >>> Line.fit(sizes, [60e-6, 58e-6, 9e-3, 8.1e-3, 8.05e-3, 20e-3])
            Line(alpha=5.19...e-05, beta=8.04...e-09)
        """
        if len(amounts) != len(seconds):
            counts = f"{len(amounts)} amounts and {len(seconds)} times"
            raise ValueError(f"Expected one time for each amount, but got {counts}.")
        repeated: dict[float, list[float]] = defaultdict(list)
        for amount, taken in zip(amounts, seconds, strict=True):
            fine = 0 < amount < math.inf and 0 < taken < math.inf
            expect(fine, "amounts and seconds", "positive and finite", (amount, taken))
            repeated[amount].append(taken)
        if len(repeated) < 2:
            raise ValueError(f"Expected measurements of at least 2 different amounts, but got {len(repeated)}.")
        x = np.array(sorted(repeated), dtype=np.float64)
        y = np.array([median(repeated[amount]) for amount in sorted(repeated)])
        left, right = np.triu_indices(len(x), 1)
        slopes = (y[right] - y[left]) / (x[right] - x[left])
        nothing = np.zeros_like(x)
        alphas = np.concatenate([y[left] - slopes * x[left], y, nothing])
        betas = np.concatenate([slopes, nothing, y / x])
        allowed = (alphas >= 0) & (betas >= 0)
        alphas, betas = alphas[allowed], betas[allowed]
        deviations = np.abs((alphas[:, None] + betas[:, None] * x) / y - 1).sum(1)
        best = deviations.argmin()
        return cls(float(alphas[best]), float(betas[best]))


NOTHING = Line(0.0, 0.0)
"""A line of no time."""


@dataclass(frozen=True)
class Curve(Settings):
    """Seconds as measured at some amounts, straight in between, and 0 for an amount of 0.

    Computation is not a straight line: data that fits into a cache takes less time per coordinate. Below the smallest
    amount, seconds are constant; above the largest one, they grow in proportion.

    Args:
        amounts: at least one, positive, ascending.
        seconds: at these, at least 0.

    Raises:
        ValueError: if lengths differ, amounts do not ascend, or a number is outside its range.

    Example:
        >>> curve = Curve((1_000, 1_000_000), (1e-4, 2e-3))
        >>> [round(curve(amount), 6) for amount in (0, 10, 500_500, 2_000_000)]
        [0.0, 0.0001, 0.00105, 0.004]
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "amounts", tuple(self.amounts))
        object.__setattr__(self, "seconds", tuple(self.seconds))
        ascending = all(a < b for a, b in pairwise((0.0, *self.amounts)))
        if not self.amounts or len(self.amounts) != len(self.seconds) or not ascending:
            raise ValueError(
                f"Expected ascending positive amounts and as many seconds, but got {self.amounts} and {self.seconds}."
            )
        for value in self.seconds:
            check_number(value, "seconds")

    def __call__(self, amount: float) -> float:
        """Return the seconds for an amount.

        Raises:
            ValueError: if the amount is negative.
        """
        if amount <= 0:
            check_number(amount, "amount")
            return 0.0
        if amount > self.amounts[-1]:
            return self.seconds[-1] * amount / self.amounts[-1]
        return float(np.interp(amount, self.amounts, self.seconds))

    def __add__(self, other: Curve | Line) -> Curve:
        """Return the sum of both, for the same amount; exact at the amounts of both."""
        amounts = sorted({*self.amounts, *(other.amounts if isinstance(other, Curve) else ())})
        return Curve(tuple(amounts), tuple(self(amount) + other(amount) for amount in amounts))

    __radd__ = __add__

    def line(self) -> Line:
        """Return the nearest straight line, see :meth:`Line.fit`."""
        return Line.through(list(zip(self.amounts, self.seconds, strict=True)))


@dataclass(frozen=True)
class CostModel:
    """Seconds that a group of x coordinates takes, apart from its backward pass.

    Selection runs on the processor that also computes backward; the exchange, ``alpha + beta x``, occupies the network
    while backward continues. An empty group takes no time.

    If selection does not block backward, because it runs on its own stream or thread in line with the exchange, it
    belongs to the exchange: ``CostModel(selection + exchange)``. If backward waits for the exchange, too, nothing
    overlaps, and the exchange belongs to the selection: ``CostModel(Line(0, 0), selection + exchange)``.

    Args:
        exchange: seconds by coordinates.
        selection: seconds by coordinates, for all work of a rank before it sends; zero for dense training. It need not
            be a straight line.

    Raises:
        ValueError: if the exchange is no line, or the selection neither a line nor a curve.

    Example:
        >>> cost = CostModel(exchange=Line(140e-6, 45e-12), selection=Line(30e-6, 2e-9))
        >>> cost.select_seconds(1_000_000), round(cost.exchange_seconds(1_000_000), 6)
        (0.00203, 0.000185)

    References:
        Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs
        (OMGS-SGD), INFOCOM 2020: equations 10 and 11, with the sizes of sent messages.
    """

    exchange: Line
    selection: Line | Curve = NOTHING

    def __post_init__(self) -> None:
        expect(isinstance(self.exchange, Line), "exchange", "a Line", self.exchange)
        expect(isinstance(self.selection, (Line, Curve)), "selection", "a Line or a Curve", self.selection)

    def select_seconds(self, numel: int) -> float:
        """Return the seconds to select in a group of ``numel`` coordinates."""
        return self.selection(numel)

    def exchange_seconds(self, numel: int) -> float:
        """Return the seconds to exchange the selection of a group of ``numel`` coordinates."""
        return self.exchange(numel)


class Progress(NamedTuple):
    """Progress of a step, in seconds from the start of backward."""

    ready: float = 0.0
    """End of the latest group's selection."""
    done: float = 0.0
    """End of its exchange."""

    def after(self, numel: int, backward_seconds: float, cost: CostModel) -> Progress:
        """Return the progress after one more group."""
        ready = self.ready + backward_seconds + cost.select_seconds(numel)
        return Progress(ready, max(ready, self.done) + cost.exchange_seconds(numel))


def end_seconds(timeline: Timeline, costs: Iterable[CostModel], joined: Sequence[Line] = ()) -> float:
    """Return the end of the last exchange, in seconds.

    Args:
        timeline: numbers of each group.
        costs: of each group; with joined messages, of its own work.
        joined: messages of each group, by its coordinates, that are sent together when all groups are ready; empty if
            each group sends its own.
    """
    progress = Progress()
    for numel, backward_seconds, cost in zip(*timeline, costs, strict=True):
        progress = progress.after(numel, backward_seconds, cost)
    once = max((line.alpha for line in joined), default=0.0)
    return progress.done + once + sum(line.beta * numel for line, numel in zip(joined, timeline[0], strict=False))
