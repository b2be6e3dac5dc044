"""What a step leaves for the next one, so that selecting costs no pass of its own over the group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

Found = tuple[Tensor, Tensor]
"""Ascending int32 coordinates and their magnitudes."""
Summed = Literal["values", "magnitudes", "logarithms", "beyond"]
"""What is added up of a vector, with its squares: values; magnitudes; these, and their logarithms, too; or what
magnitudes have beyond a level."""
SUMMED: tuple[Summed, ...] = get_args(Summed)


class Sums(NamedTuple):
    """What is added up of a vector, in float64."""

    number: float
    """Of magnitudes that reach a bound, the smallest normal number unless there is another; not of values."""
    total: float
    squares: float
    """Sum of squares."""
    largest: float
    """Magnitude; not of values."""
    mantissa: float
    """Of the product of the magnitudes that are counted; of logarithms only."""
    exponent: float
    """The product is ``mantissa * 2 ** exponent``."""

    @property
    def logarithms(self) -> float:
        """Sum of the logarithms of the magnitudes that are counted."""
        return math.log(self.mantissa) + self.exponent * math.log(2)


class Candidates:
    """The coordinates of a group's accumulator that will probably be picked, found while it is formed (CPU).

    A group keeps one of these from step to step. What selects leaves a bound here that the picks of the next step will
    probably reach (:meth:`expect`); the pass that forms the next accumulator collects what reaches it (:meth:`note`);
    and what selects there begins with these (:meth:`reaching`). A wrong bound costs one more pass and never changes a
    result. So this is no part of the state that counts, and steps write to it as they like. What selects by sums over
    the accumulator asks for them in the same way (:meth:`sums`).

    What was noted holds for one vector with the content that it had then: any later operation of torch that writes to
    it ends that.
    """

    ROOM = 8
    """Candidates are given up where more than this part of the group reaches the bound."""

    def __init__(self) -> None:
        self.bound = math.inf
        """Magnitude from which on the next pass collects."""
        self.summed: Summed | None = None
        """What the next pass adds up."""
        self.on_device: Any = None
        """What kernels on a device keep for the next step, see :mod:`~lightning_sparse.engine.fused`."""
        self._expected = math.inf
        self._vector: Any = None
        self._cleared: Any = None
        self._finite = True
        self._reached = math.inf
        self._found: Found | None = None
        self._sums: tuple[Summed | None, Sums | None] = None, None

    def __eq__(self, other: object) -> bool:
        """All are equal: none holds anything that counts."""
        return isinstance(other, Candidates)

    __hash__ = None  # type: ignore[assignment]

    def note(
        self,
        x: Tensor,
        runs: Sequence[Tensor],
        found: Found | None,
        finite: bool,
        sums: Sums | None = None,
    ) -> None:
        """Keep what a pass has found with :attr:`bound` and :attr:`summed`.

        Args:
            x: (numel,) the vector that it has formed, and that is selected by.
            runs: what it has set to zero.
            found: ascending coordinates and their magnitudes; None: too many.
            finite: whether all of the gradient counts.
            sums: of x.
        """
        self._vector, self._cleared = _state_of(x), list(map(_state_of, runs))
        self._found, self._finite, self._reached, self._expected = found, finite, self.bound, math.inf
        self._sums = self.summed, sums

    def expect(self, bound: float) -> None:
        """Let the next pass collect from this magnitude on; of several bounds in a step, from the lowest."""
        if self._finite:  # else the step is void, and what is selected tells nothing about the next one
            self._expected = min(self._expected, bound)
            self.bound = self._expected

    def reaching(self, x: Tensor, bound: float) -> Found | None:
        """Ascending coordinates of x and their magnitudes, with all that reach a bound among them; None: unknown."""
        return self._found if bound >= self._reached and self._holds_for(x) else None

    def sums(self, x: Tensor, summed: Summed) -> Sums | None:
        """What the pass has added up of x, None: unknown; the next one adds up the same."""
        self.summed = summed
        return self._sums[1] if self._sums[0] == summed and self._holds_for(x) else None

    def cleared(self, runs: Sequence[Tensor]) -> bool:
        """Whether the pass has set these vectors to zero, and nobody has written to them since."""
        states = list(map(_state_of, runs))
        return None not in states and self._cleared == states

    def _holds_for(self, x: Tensor) -> bool:
        return self._vector is not None and self._vector == _state_of(x)


def _state_of(x: Tensor) -> tuple[int, int, int] | None:
    """Where a vector lies, and how often torch has written to it; None where torch does not count that."""
    return None if x.is_inference() else (x.data_ptr(), x.numel(), x._version)
