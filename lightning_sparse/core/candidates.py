"""Selection hints, collected while the accumulator is formed, so that selection needs no pass of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

Found = tuple[Tensor, Tensor]
"""Ascending int32 coordinates and their magnitudes."""


class Candidates:
    """Coordinates of a group's accumulator that will probably be selected, found while it is formed.

    A group keeps one instance from step to step. The selection of a step leaves a bound that the next selection will
    probably reach (:meth:`expect`). The pass that forms the next accumulator collects the coordinates that reach it
    (:meth:`note`), and the next selection starts from these (:meth:`reaching`). A wrong bound costs one more pass and
    never changes a result, so this is not part of a group's state.

    The hints are valid for one vector with its content at that time: any later operation of torch that writes to the
    vector invalidates them.
    """

    ROOM = 8
    """The pass collects at most ``numel / ROOM`` coordinates; if more reach the bound, it keeps none."""

    def __init__(self) -> None:
        self.bound = math.inf
        """Least magnitude that the next pass collects."""
        self.on_device: Any = None
        """Buffers that kernels on a device keep for the next step, see :mod:`~lightning_sparse.ops.on_device`."""
        self._expected = math.inf
        self._vector: Any = None
        self._cleared: Any = None
        self._finite = True
        self._reached = math.inf
        self._found: Any = None

    def __eq__(self, other: object) -> bool:
        """Return True for all instances: hints are not part of the state."""
        return isinstance(other, Candidates)

    __hash__ = None  # type: ignore[assignment]

    def note(self, x: Tensor, runs: Sequence[Tensor], found: Any, finite: bool = True) -> None:
        """Keep the results of a pass with :attr:`bound`.

        Args:
            x: (numel,) vector that the pass has formed and that is selected by.
            runs: vectors that it has set to zero.
            found: ascending coordinates and their magnitudes, on a device :attr:`on_device`; None: too many.
            finite: True if all of the gradient was finite, or only the device knows.
        """
        self._vector, self._cleared = _state_of(x), list(map(_state_of, runs))
        self._found, self._finite, self._reached, self._expected = found, finite, self.bound, math.inf

    def expect(self, bound: float) -> None:
        """Let the next pass collect magnitudes of at least this bound; the lowest of several bounds in a step."""
        if self._finite:  # else the step is skipped, and its selection says nothing about the next one
            self._expected = min(self._expected, bound)
            self.bound = self._expected

    def reaching(self, x: Tensor, bound: float = math.inf) -> Any:
        """Return what was found, if it is of x and has all coordinates that reach a bound; None if that is unknown."""
        return self._found if bound >= self._reached and self._holds_for(x) else None

    def cleared(self, runs: Sequence[Tensor]) -> bool:
        """Return True if the pass has set these vectors to zero and they have not been written to since."""
        if self._cleared is None:
            return False
        states = list(map(_state_of, runs))
        return None not in states and self._cleared == states

    def _holds_for(self, x: Tensor) -> bool:
        return self._vector is not None and self._vector == _state_of(x)


def _state_of(x: Tensor) -> tuple[int, int, int] | None:
    """Return a vector's address, length and version counter; None if torch keeps no version counter."""
    return None if x.is_inference() else (x.data_ptr(), x.numel(), x._version)
