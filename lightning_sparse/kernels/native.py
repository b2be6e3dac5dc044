"""The functions of host.c, choose.c, picks.c and unite.c, compiled, for numpy arrays and tensors.

Which are used, and whether: :mod:`~lightning_sparse.kernels.library`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.kernels.library import choose

KINDS = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}
"""Of gradients; bfloat16 comes as its bits."""

SLACK = 16
"""Slots behind what is found that the library may write to."""

Found = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Ascending coordinates and their magnitudes."""

_buffers = threading.local()


class Heard(NamedTuple):
    """Messages of all ranks, read."""

    picks: list[Tensor]
    """(c,) int64 coordinates of each rank, ascending."""
    spares: list[Tensor]
    """(c,) bool: which of them are spare."""
    levels: Tensor
    """int64 levels of all of them, one rank after another."""
    lowest: int
    """The largest of all ranks' lowest levels; -1 - r where the message of rank r cannot be."""


class Met(NamedTuple):
    """The union of what all ranks have told."""

    indices: Tensor
    """(u,) int64 coordinates, ascending."""
    levels: Tensor
    """(u,) int32: the largest level that a rank gave each."""
    named: int
    """Different coordinates before the limit."""
    lowest: int
    """The largest of all ranks' lowest levels."""
    trouble: bool
    """Whether a rank has a value that is not finite."""


class Rounded(NamedTuple):
    """Values in steps of powers of two."""

    words: Tensor
    """int32, two integers in each."""
    units: Tensor
    """(u,) the steps."""
    sent: Tensor
    """(s,) int64 coordinates of those that are not rounded to zero."""
    values: Tensor
    """(s,) what of them travels."""
    left: Tensor
    """(s,) what of them does not."""


class Native:
    """The functions of the library; what they compute is said in :mod:`~lightning_sparse.kernels.host`.

    Args:
        library: as :func:`~lightning_sparse.kernels.library.load` gives it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("ls_accumulate", "ls_weigh", "ls_above", "ls_largest", "ls_round"):
            getattr(library, name).restype = ctypes.c_int64
        library.ls_reached_by.restype = ctypes.c_float
        for name in ("ls_unite", "ls_meet", "ls_add_up", "ls_average_pairs", "ls_reaching", "ls_reached", "ls_table"):
            getattr(library, name).restype = ctypes.c_int64

    def accumulate(
        self,
        acc: NDArray[np.float32],
        residual: NDArray[np.float32],
        runs: Sequence[NDArray[Any]],
        bound: float,
        room: int,
    ) -> tuple[Found | None, bool]:
        """``acc = residual + grad`` and ``grad = 0``; what reaches a bound, and whether all is finite."""
        return _collect(self._library.ls_accumulate, (_at(acc), _at(residual)), runs, (), bound, room)

    def weigh(
        self,
        residual: NDArray[np.float32],
        runs: Sequence[NDArray[Any]],
        now: NDArray[np.float32],
        out: Sequence[NDArray[np.float32]],
        clear: bool,
        weights: Sequence[float],
        bound: float,
        room: int,
    ) -> tuple[Found | None, bool]:
        """See :func:`~lightning_sparse.kernels.host.weigh`."""
        about = _at(now), *map(_at, out), int(clear), (ctypes.c_float * 4)(*weights)
        return _collect(self._library.ls_weigh, (_at(residual),), runs, about, bound, room)

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
        buffer = _room("tail", values.size + SLACK, np.float32)
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
            _at(matrix), _long(rows), _long(columns), _long(matrix.strides[0] // 4), ctypes.c_float(bound), _long(0),
            None if indices is None else _at(indices), _at(magnitudes), _long(magnitudes.size - SLACK),
        )  # fmt: skip
        return count

    def all_finite(self, values: NDArray[np.float32]) -> bool:
        """No NaN and no infinity."""
        return bool(self._library.ls_all_finite(_at(values), _long(values.size)))

    def excess(self, values: NDArray[np.float32], level: float, bound: float) -> tuple[float, float, float]:
        """Number of magnitudes that reach the bound; sum and sum of squares of what they have beyond the level."""
        out = (ctypes.c_double * 3)()
        self._library.ls_excess(_at(values), _long(values.size), ctypes.c_double(level), ctypes.c_float(bound), out)
        return out[0], out[1], out[2]

    def moments(self, values: NDArray[np.float32]) -> tuple[float, float]:
        """Sum and sum of squares."""
        out = (ctypes.c_double * 2)()
        self._library.ls_moments(_at(values), _long(values.size), out)
        return out[0], out[1]

    def sum_and_maximum(self, values: NDArray[np.float32]) -> tuple[float, float]:
        """Of magnitudes."""
        out = (ctypes.c_double * 2)()
        self._library.ls_sum_and_maximum(_at(values), _long(values.size), out)
        return out[0], out[1]

    def take(self, values: NDArray[np.float32], indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """``values[indices]``."""
        out = np.empty(indices.size, np.float32)
        if self._library.ls_take(_at(values), _long(values.size), _at(indices), _long(indices.size), _at(out)):
            raise IndexError(f"an index is outside of a vector of {values.size}")
        return out

    def put(self, values: NDArray[np.float32], indices: NDArray[np.int64], new: NDArray[np.float32]) -> None:
        """``values[indices] = new``."""
        if self._library.ls_put(_at(values), _long(values.size), _at(indices), _long(indices.size), _at(new)):
            raise IndexError(f"an index is outside of a vector of {values.size}")

    def largest(
        self, found: Found, share: int, spare: int, turn: int, n: int, more: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], float] | None:
        """See :func:`~lightning_sparse.kernels.top_k_and_stripe`; and a magnitude that at least ``more`` reach.

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
            _at(found[0]), _at(found[1]), _long(size), _long(share), _long(spare), _long(turn), _long(n), _long(more),
            _at(places), _at(marks), _at(_room("chosen", 2 * size + 2 * SLACK, np.uint32)), ctypes.byref(reached),
        )  # fmt: skip
        return (places[:count], marks[:count], reached.value) if count else None

    def reaching(self, found: Found, bound: float) -> NDArray[np.int64]:
        """The coordinates whose magnitudes reach a bound."""
        size = found[0].size
        places, marks = np.empty(size + SLACK, np.int64), _room("marks", size + SLACK, np.uint8)
        count = self._library.ls_reaching(
            _at(found[0]), _at(found[1]), _long(size), ctypes.c_float(bound), _at(places), _at(marks)
        )
        return places[:count]

    def reached(self, magnitudes: NDArray[np.float32], bound: float) -> int:
        """How many magnitudes reach a bound."""
        count: int = self._library.ls_reached(_at(magnitudes), _long(magnitudes.size), ctypes.c_float(bound))
        return count

    def reached_by(self, magnitudes: NDArray[np.float32], k: int) -> float:
        """A magnitude that at least k reach, and not many more."""
        found: float = self._library.ls_reached_by(_at(magnitudes), _long(magnitudes.size), _long(k))
        return found

    def tell(self, acc: Tensor, indices: Tensor, spare: Tensor | None, count: int, most: int, blocks: int) -> Tensor:
        """The message of one rank, see :mod:`~lightning_sparse.exchanges.packed_union`; int32 words.

        Args:
            acc: (numel + 1,) values.
            indices: (c,) integers, ascending, up to numel.
            spare: (c,) bool.
            count: how many of the indices are picks.
            most: steps of the largest value.
            blocks: of 65 536 coordinates, if offsets in these are told; 0: whole coordinates.
        """
        indices, spare = indices.long().contiguous(), None if spare is None else spare.contiguous()
        slots = indices.numel()
        words = torch.zeros(2 + _body(slots, blocks) + (slots + 7) // 8, dtype=torch.int32, device="cpu")
        magnitudes = np.empty(slots, np.float32)
        if self._library.ls_tell(
            _at(acc), _long(acc.numel()), _at(indices), None if spare is None else _at(spare), _long(slots),
            ctypes.c_int32(count), ctypes.c_float(most), _long(blocks), _at(words), _at(magnitudes),
        ):  # fmt: skip
            raise IndexError(f"an index is outside of a vector of {acc.numel()}")
        return words

    def hear(self, rows: Tensor, ends: list[int], slots: int, blocks: int, padding: int) -> Heard:
        """Read what :meth:`tell` has written.

        Args:
            rows: (n, words) int32, contiguous in words.
            ends: how many indices of each rank are picks, from 0 to ``slots``.
            slots: indices of each rank.
            blocks: see :meth:`tell`.
            padding: what coordinates are limited to.
        """
        places = torch.empty(sum(ends), dtype=torch.int64, device="cpu")
        levels, spare = torch.empty_like(places), torch.empty(sum(ends), dtype=torch.bool, device="cpu")
        lengths = np.array(ends, np.int64)
        lowest: int = self._library.ls_hear(
            _at(rows), _long(len(ends)), _long(rows.stride(0)), _long(slots), _at(lengths),
            _long(blocks), _long(padding), _at(places), _at(levels), _at(spare),
        )  # fmt: skip
        return Heard(list(torch.split(places, ends)), list(torch.split(spare, ends)), levels, lowest)

    def unite(
        self,
        places: Sequence[Tensor],
        levels: Tensor | None,
        spare: Sequence[Tensor] | None,
        padding: int,
        limit: int | None,
        phase: int,
    ) -> tuple[Tensor, Tensor, int] | None:
        """The union of ascending lists below the padding index, thinned to a limit; its levels; its size before that.

        None where one does not ascend. See :func:`~lightning_sparse.exchanges.reduce_union.union_of`.
        """
        joined = torch.cat(list(places))
        flags = None if spare is None else torch.cat(list(spare))
        lengths, named = np.array([len(part) for part in places], np.int64), ctypes.c_int64()
        union, largest, said = _space_for_union(len(joined))
        size = self._library.ls_unite(
            _at(joined), None if levels is None else _at(levels), None if flags is None else _at(flags), _at(lengths),
            _long(len(places)), _long(padding), _long(_limit(limit)), _long(phase),
            _at(self._table()), _at(_room("at", 2 * len(places), np.int64)), _at(union), _at(said), _at(largest),
            ctypes.byref(named),
        )  # fmt: skip
        return None if size < 0 else (union[:size], largest[:size], named.value)

    def meet(
        self, rows: Tensor, slots: int, blocks: int, padding: int, limit: int | None, phase: int
    ) -> Met | int | None:
        """:meth:`hear` and :meth:`unite` in one; None where a list does not ascend, a rank whose message cannot be.

        Args:
            rows: (n, words) int32, contiguous in words.
            slots: indices of each rank.
            blocks: see :meth:`tell`.
            padding: coordinates from here on do not count.
            limit: see :meth:`unite`, as the phase.
            phase: see there.
        """
        n, numbers = len(rows), (ctypes.c_int64 * 3)()
        union, levels, said = _space_for_union(n * slots)
        size = self._library.ls_meet(
            _at(rows), _long(n), _long(rows.stride(0)), _long(slots), _long(blocks), _long(padding),
            _long(_limit(limit)), _long(phase), _at(self._table()), _at(_room("at", 6 * n, np.int64)), _at(union),
            _at(said), _at(levels), numbers,
        )  # fmt: skip
        if size < 0:
            return None if size == -1 - n else -1 - size
        return Met(union[:size], levels[:size], numbers[0], numbers[1], bool(numbers[2]))

    def add_up(
        self, coordinates: NDArray[np.int64], values: NDArray[np.float32], lengths: NDArray[np.int64], padding: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Sums of sparse vectors; None where one does not ascend."""
        union, totals = np.empty(coordinates.size + 1, np.int64), np.empty(coordinates.size + 1, np.float32)
        at = np.empty(2 * lengths.size, np.int64)
        found = self._library.ls_add_up(
            _at(coordinates), _at(values), _at(lengths), _long(lengths.size), _long(padding), _at(self._table()),
            _at(at), _at(union), _at(totals),
        )  # fmt: skip
        return None if found < 0 else (union[:found], totals[:found])

    def average_pairs(self, rows: Tensor, slots: int, padding: int) -> tuple[Tensor, Tensor] | None:
        """The mean of sparse vectors over ranks, summed from zero in their order; None where one does not ascend.

        Args:
            rows: (n, 1 + 2 * slots) int32, contiguous in words: a count, coordinates, bits of values.
            slots: see there.
            padding: coordinates from here on do not count.
        """
        n = len(rows)
        union, means = np.empty(n * slots + 1, np.int64), np.empty(n * slots + 1, np.float32)
        found = self._library.ls_average_pairs(
            _at(rows), _long(n), _long(rows.stride(0)), _long(slots), _long(padding), _at(self._table()),
            _at(_room("at", 2 * n, np.int64)), _at(union), _at(means),
        )  # fmt: skip
        return None if found < 0 else (torch.from_numpy(union[:found]), torch.from_numpy(means[:found]))

    def _table(self) -> NDArray[np.uint8]:
        """Of this thread, zero whenever nobody works with it."""
        table: NDArray[np.uint8] | None = _buffers.__dict__.get("table")
        if table is None:
            table = _buffers.__dict__["table"] = np.zeros(self._library.ls_table(), np.uint8)
        return table

    def round(self, acc: Tensor, union: Tensor, levels: Tensor, lowest: int, raise_by: int, most: int) -> Rounded:
        """Values at a union in steps of powers of two.

        Args:
            acc: (numel + 1,) values.
            union: (u,) int64 coordinates.
            levels: (u,) integers, of which the steps follow.
            lowest: level towards which they are raised, by at most ``raise_by``.
            raise_by: see there.
            most: largest number of steps.
        """
        size, levels = union.numel(), levels.int()
        words = torch.empty((size + 1) // 2, dtype=torch.int32, device="cpu")
        sent = torch.empty_like(union)
        units, rounded, left = (torch.empty(size, dtype=torch.float32, device="cpu") for _ in range(3))
        found = self._library.ls_round(
            _at(acc), _long(acc.numel()), _at(union), _at(levels), _long(size), _long(lowest), _long(raise_by),
            ctypes.c_float(most), _at(words), _at(units), _at(sent), _at(rounded), _at(left),
        )  # fmt: skip
        if found < 0:
            raise IndexError(f"an index is outside of a vector of {acc.numel()}")
        return Rounded(words, units, sent[:found], rounded[:found], left[:found])

    def average(self, words: Tensor, units: Tensor, n: int) -> Tensor:
        """Means over n ranks from the sums of their words."""
        values = torch.empty_like(units)
        self._library.ls_average(_at(words), _at(units), _long(units.numel()), ctypes.c_float(n), _at(values))
        return values


def _body(slots: int, blocks: int) -> int:
    """Words that coordinates take."""
    return blocks + (slots + 1) // 2 if blocks else slots


def _limit(limit: int | None) -> int:
    return 1 << 62 if limit is None else limit


def _space_for_union(total: int) -> tuple[Tensor, Tensor, NDArray[np.uint16]]:
    """For coordinates and levels of at most so many picks, and what is said of them."""
    union = torch.empty(total + 1, dtype=torch.int64, device="cpu")
    return union, torch.empty(total + 1, dtype=torch.int32, device="cpu"), _room("said", total + 1, np.uint16)


def _room(use: str, size: int, dtype: type[np.generic]) -> NDArray[Any]:
    """A buffer of this thread, at least as long; touched as far as it is used."""
    buffer: NDArray[Any] | None = _buffers.__dict__.get(use)
    if buffer is None or buffer.size < size:
        buffer = _buffers.__dict__[use] = np.empty(size, dtype)
    return buffer


def _collect(
    function: Any,
    before: tuple[Any, ...],
    runs: Sequence[NDArray[Any]],
    after: tuple[Any, ...],
    bound: float,
    room: int,
) -> tuple[Found | None, bool]:
    """Call a pass over the runs of a gradient: what reaches the bound, if there is room, and whether all is finite.

    Args:
        function: of the library.
        before: its arguments before those of the runs.
        runs: at least one.
        after: its arguments between those of the runs and the bound.
        bound: magnitude.
        room: for so many that reach it.
    """
    indices, magnitudes = _scratch(room)
    finite = ctypes.c_int32()
    starts = (ctypes.c_void_p * len(runs))(*(_at(run).value for run in runs))
    ends = np.cumsum([run.size for run in runs], dtype=np.int64)
    count = function(
        *before, starts, _at(ends), _long(len(runs)), KINDS[runs[0].dtype], *after, ctypes.c_float(bound),
        _at(indices), _at(magnitudes), _long(room), ctypes.byref(finite),
    )  # fmt: skip
    found = None if count > room else (indices[:count].copy(), magnitudes[:count].copy())
    return found, bool(finite.value)


def _scratch(room: int) -> Found:
    """Buffers of this thread for coordinates and magnitudes."""
    found: Found | None = _buffers.__dict__.get("found")
    size = room + SLACK
    if found is None or found[0].size < size:
        found = _buffers.__dict__["found"] = np.empty(size, np.int32), np.empty(size, np.float32)
    return found[0][:size], found[1][:size]


def _at(x: NDArray[Any] | Tensor) -> ctypes.c_void_p:
    """Where it lies; the caller keeps it."""
    address = x.data_ptr() if isinstance(x, Tensor) else x.__array_interface__["data"][0]
    return ctypes.c_void_p(address)


_long = ctypes.c_int64

_chosen, description = choose()
library = None if _chosen is None else Native(_chosen)
"""What :mod:`~lightning_sparse.kernels.host` uses, None for numpy alone; :data:`description` says it in words."""
