"""The functions of dense.c, sums.c and choose.c, compiled, for numpy arrays; those on picks are in ``native_picks``.

Which are used, and whether: :mod:`~lightning_sparse.ops.c.library`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.core.candidates import SUMMED, Summed, Sums
from lightning_sparse.ops.c.library import choose
from lightning_sparse.ops.c.native_buffers import SLACK, address, at, declare, space
from lightning_sparse.ops.c.native_picks import NativePicks

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Of gradients."""

Found = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Ascending coordinates and their magnitudes."""
Collected = tuple[Found | None, bool, Sums | None]
"""What reaches a bound, if there was room; whether all is finite; and sums, if any were asked for."""


class Native:
    """The functions of the library on vectors; what they compute is said in the files ``host_*``.

    Args:
        library: as :func:`~lightning_sparse.ops.c.library.load` gives it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        declare(library)
        self.picks = NativePicks(library)
        """The functions on picks."""

    def accumulate(
        self,
        acc: Tensor,
        residual: Tensor,
        runs: Sequence[Tensor],
        bound: float,
        room: int,
        summed: Summed | None,
    ) -> Collected:
        """``acc = residual + grad`` and ``grad = 0``; what reaches a bound, whether all is finite, and sums."""
        return _collect(self._library.ls_accumulate, (at(acc), at(residual)), runs, (), bound, room, summed)

    def weigh(
        self,
        residual: Tensor,
        runs: Sequence[Tensor],
        now: Tensor,
        out: Sequence[Tensor],
        clear: bool,
        weights: Sequence[float],
        bound: float,
        room: int,
        summed: Summed | None,
    ) -> Collected:
        """See :func:`~lightning_sparse.ops.host_dense.weigh`."""
        about = at(now), *map(at, out), int(clear), (ctypes.c_float * 4)(*weights)
        return _collect(self._library.ls_weigh, (at(residual),), runs, about, bound, room, summed)

    def above(self, matrix: NDArray[np.float32], bound: float) -> Found:
        """What of the rows of a matrix reaches a bound, by place in their sequence."""
        room = matrix.size // 8 + 64
        indices, magnitudes = _scratch(room)
        count = self._above(matrix, bound, indices, magnitudes)
        if count <= room:
            return indices[:count].copy(), magnitudes[:count].copy()
        indices, magnitudes = np.empty(count + SLACK, np.int32), np.empty(count + SLACK, np.float32)
        self._above(matrix, bound, indices, magnitudes)
        return indices[:count], magnitudes[:count]

    def tail(self, values: NDArray[np.float32], bound: float) -> NDArray[np.float32]:
        """The magnitudes that reach a bound, in a buffer of this thread."""
        buffer = space("tail", values.size + SLACK, np.float32)
        found: NDArray[np.float32] = buffer[: self._above(values[None], bound, None, buffer)]
        return found

    def _above(
        self,
        matrix: NDArray[np.float32],
        bound: float,
        indices: NDArray[np.int32] | None,
        magnitudes: NDArray[np.float32],
    ) -> int:
        rows, columns = matrix.shape
        count: int = self._library.ls_above(
            at(matrix), rows, columns, matrix.strides[0] // 4, bound, 0,
            None if indices is None else at(indices), at(magnitudes), magnitudes.size - SLACK,
        )  # fmt: skip
        return count

    def all_finite(self, values: NDArray[np.float32]) -> bool:
        """No NaN and no infinity."""
        return bool(self._library.ls_all_finite(at(values), values.size))

    def sums(self, values: NDArray[np.float32], summed: Summed, level: float, bound: float) -> Sums:
        """Sums; magnitudes are counted that reach a bound above 0."""
        out = (ctypes.c_double * 6)()
        self._library.ls_sums(at(values), values.size, SUMMED.index(summed) + 1, level, bound, out)
        return Sums(*out)

    def largest(
        self, found: Found, share: int, spare: int, turn: int, n: int, more: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], float] | None:
        """See :func:`~lightning_sparse.ops.top_k_and_stripe`; and a magnitude that at least ``more`` reach.

        Args:
            found: at least share and more.
            share: see there, as the others.
            spare: see there.
            turn: see there.
            n: see there.
            more: at least 1; not many more than these reach the magnitude.

        Returns:
            None: too few of the stripe.
        """
        size, reached = found[0].size, ctypes.c_float()
        places, marks = np.empty(share + spare + SLACK, np.int64), np.empty(share + spare + SLACK, np.bool_)
        count = self._library.ls_largest(
            at(found[0]), at(found[1]), size, share, spare, turn, n, more,
            at(places), at(marks), address("chosen", 2 * size + 2 * SLACK, np.uint32), ctypes.byref(reached),
        )  # fmt: skip
        return (places[:count], marks[:count], reached.value) if count else None

    def reaching(self, found: Found, bound: float) -> NDArray[np.int64]:
        """The coordinates whose magnitudes reach a bound."""
        size = found[0].size
        places = np.empty(size + SLACK, np.int64)
        count = self._library.ls_reaching(
            at(found[0]), at(found[1]), size, bound, at(places), address("marks", size + SLACK, np.uint8)
        )
        return places[:count]

    def reached(self, magnitudes: NDArray[np.float32], bound: float) -> int:
        """How many magnitudes reach a bound."""
        count: int = self._library.ls_reached(at(magnitudes), magnitudes.size, bound)
        return count

    def reached_by(self, magnitudes: NDArray[np.float32], k: int) -> float:
        """A magnitude that at least k reach, and not many more."""
        found: float = self._library.ls_reached_by(at(magnitudes), magnitudes.size, k)
        return found


def _collect(
    function: Any,
    before: tuple[Any, ...],
    runs: Sequence[Tensor],
    after: tuple[Any, ...],
    bound: float,
    room: int,
    summed: Summed | None,
) -> Collected:
    """Call a pass over the runs of a gradient.

    Args:
        function: of the library.
        before: its arguments before those of the runs.
        runs: at least one.
        after: its arguments between those of the runs and the bound.
        bound: magnitude.
        room: for so many that reach it.
        summed: what is summed up, if anything.
    """
    indices, magnitudes = _scratch(room)
    finite, out = ctypes.c_int32(), (ctypes.c_double * 6)()
    starts = (ctypes.c_void_p * len(runs))(*map(at, runs))
    ends = (ctypes.c_int64 * len(runs))(*accumulate(run.numel() for run in runs))
    count = function(
        *before, starts, ends, len(runs), KINDS[runs[0].dtype], *after, bound,
        at(indices), at(magnitudes), room, ctypes.byref(finite), SUMMED.index(summed) + 1 if summed else 0, out,
    )  # fmt: skip
    found = None if count > room else (indices[:count].copy(), magnitudes[:count].copy())
    return found, bool(finite.value), Sums(*out) if summed else None


def _scratch(room: int) -> Found:
    """Buffers of this thread for coordinates and magnitudes."""
    size = room + SLACK
    return space("indices", size, np.int32)[:size], space("magnitudes", size, np.float32)[:size]


_chosen, description = choose()
library = None if _chosen is None else Native(_chosen)
"""What the files ``host_*`` use, None for numpy alone; :data:`description` says it in words."""
