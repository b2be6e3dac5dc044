"""Calls of the compiled functions: which vectors they take, how they get them, and what they return.

Which library is used, and whether one is: :mod:`~lightning_sparse.ops.c.library`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.step import Found
from lightning_sparse.ops.c.library import choose
from lightning_sparse.ops.form import Form, Met, Rounded

SLACK = 16
"""Slots behind what is found that the library may write to."""

ARGUMENTS = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
}
FUNCTIONS = {
    "ls_form": "l: ppp ppl i ip f pp l p",
    "ls_above": "l: pl f pp l",
    "ls_part": "l: pppp pp l i f pp l p",
    "ls_fingerprint": "l: pl pl",
    "ls_largest": "l: ppl ll ll l pppp",
    "ls_tell": "i: pppp i f p pp",
    "ls_round": "l: ppl pppl ll fiii f pppp",
    "ls_unite": "l: pppp l ll l pppp pp",
    "ls_meet": "l: p ll p i ll ppppppp",
    "ls_reader": "l:",
    "ls_add_pairs": "l: plp ll f pppp",
    "ls_table": "l:",
    "ls_sketch": "i: pppl pl pl p",
}
"""Result and arguments of each function of the library, as letters of :data:`ARGUMENTS`; ``i`` for no result."""

_buffers = threading.local()
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Of gradients."""
Collected = tuple[Found | None, bool]
"""Coordinates reaching a bound, if there was room; and whether all sums were finite, else the others are unknown."""


def declare(library: ctypes.CDLL) -> None:
    """Let ctypes make arguments of plain numbers and addresses, several times faster than Python does."""
    for name, letters in FUNCTIONS.items():
        returned, taken = letters.split(":")
        function = getattr(library, name)
        function.restype = ARGUMENTS[returned]
        function.argtypes = [ARGUMENTS[letter] for letter in taken.replace(" ", "")]


def at(x: Tensor | None) -> int | None:
    """Where it lies; the caller keeps it."""
    return None if x is None else x.data_ptr()


def written(*tensors: Tensor) -> None:
    """Let torch count that these were written to, past it."""
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def space(use: str, size: int, dtype: torch.dtype) -> Tensor:
    """A buffer of this thread, at least as long; touched as far as it is used, and zero before that."""
    buffer: Tensor | None = _buffers.__dict__.get(use)
    if buffer is None or len(buffer) < size:
        # In large pages, untouched; of at least one element, because an empty vector cannot be viewed.
        buffer = torch.from_numpy(np.zeros(max(1, size) * dtype.itemsize, np.uint8)).view(dtype)
        _buffers.__dict__[use] = buffer
    return buffer


def address(use: str, size: int, dtype: torch.dtype) -> int:
    """Where such a buffer lies."""
    return space(use, size, dtype).data_ptr()


class Native:
    """The functions of the library: on vectors, as :mod:`~lightning_sparse.ops.host` says it, and on picks.

    For the form of messages see :mod:`~lightning_sparse.methods.exchanges.packed_union`.

    Args:
        library: as :func:`~lightning_sparse.ops.c.library.load` gives it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        declare(library)

    def tell(
        self,
        acc: Tensor,
        indices: Tensor,
        spare: Tensor | None,
        count: int,
        most: int,
        form: Form,
        second: Tensor | None = None,
    ) -> Tensor | None:
        """See :func:`~lightning_sparse.methods.exchanges.packed_union._tell`."""
        indices, spare = indices.long().contiguous(), None if spare is None else spare.contiguous()
        words = torch.zeros(form.width, dtype=torch.int32, device="cpu")
        failed = self._library.ls_tell(
            at(acc), at(second), at(indices), at(spare), count, most, _layout(form), at(words),
            address("of picks", form.slots, torch.float32),
        )  # fmt: skip
        _refuse_outside(failed == 1, acc)
        return None if failed else words

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

        None where one does not ascend. See :func:`~lightning_sparse.methods.exchanges.reduce_union.union_of`.
        """
        joined = torch.cat(list(places))
        flags = None if spare is None else torch.cat(list(spare))
        lengths, named = torch.tensor([len(part) for part in places], device="cpu"), ctypes.c_int64()
        union, largest, said = _space_for_union(len(joined))
        size = self._library.ls_unite(
            at(joined), at(levels), at(flags), at(lengths),
            len(places), padding, _limit(limit), phase,
            self._table(), address("at", 2 * len(places), torch.int64), at(union), said, at(largest),
            ctypes.byref(named),
        )  # fmt: skip
        return None if size < 0 else (union[:size], largest[:size], named.value)

    def meet(self, rows: Tensor, form: Form, spares: bool, limit: int | None, phase: int) -> Met | int:
        """Read the messages of all ranks, and unite what they name; the rank whose message cannot be, if any.

        Args:
            rows: (n, words) int32, contiguous in words.
            form: of the messages.
            spares: whether picks may be spare ones.
            limit: see :meth:`unite`, as the phase.
            phase: see there.
        """
        n, numbers = rows.shape[0], (ctypes.c_int64 * 3)()
        union, levels, said = _space_for_union(n * form.slots)
        tops = torch.empty(n * form.slots + SLACK, dtype=torch.uint8, device="cpu") if form.codes else None
        size = self._library.ls_meet(
            at(rows), n, rows.stride(0), _layout(form), spares, _limit(limit), phase,
            self._table(), address("readers", n * self._library.ls_reader(), torch.uint8), at(union), said, at(tops),
            at(levels), numbers,
        )  # fmt: skip
        if size < 0:
            return int(-1 - size)
        tops = None if tops is None else tops[:size]
        different, named, trouble = torch.tensor([size, numbers[0], numbers[2]], device="cpu").unbind()
        return Met(
            union[:size], levels[:size], numbers[1], tops, trouble != 0, rows[:, 0].long(), different, named
        )  # fmt: skip

    def add_pairs(self, rows: Tensor, slots: int, padding: int, divisor: int) -> tuple[Tensor, Tensor] | None:
        """The sum of sparse vectors from zero in their order, divided by a number; None where one does not ascend.

        Args:
            rows: (n, 1 + 2 * slots) int32, contiguous in words: a count, coordinates, bits of values.
            slots: see there.
            padding: coordinates from here on do not count.
            divisor: see there.
        """
        n, counts = len(rows), rows[:, 0].tolist()
        if not all(0 <= count <= slots for count in counts):
            return None
        places = [rows.data_ptr() + 4 * (rank * rows.stride(0) + 1) for rank in range(n)]
        room = sum(counts) + 1
        union = torch.empty(room, dtype=torch.int64, device="cpu")
        sums = torch.empty(room, dtype=torch.float32, device="cpu")
        found = self._library.ls_add_pairs(
            (ctypes.c_void_p * n)(*places), slots, (ctypes.c_int64 * n)(*counts), n, padding, divisor,
            self._table(), address("at", n, torch.int64), at(union), at(sums),
        )  # fmt: skip
        return None if found < 0 else (union[:found], sums[:found])

    def _table(self) -> int:
        """Where a table lies: zero whenever nobody works with it."""
        return address("table", self._library.ls_table(), torch.uint8)

    def round(
        self,
        acc: Tensor,
        second: Tensor | None,
        union: Tensor,
        levels: Tensor,
        tops: Tensor | None,
        lowest: int,
        raise_by: int,
        most: int,
        low: int,
        wide: bool,
        parts: int,
        offset: float,
    ) -> Rounded:
        """Values at a union in steps of powers of two, and second values in the same words, if there are any.

        Args:
            acc: (numel + 1,) values.
            second: (numel + 1,) second values.
            union: (u,) int64 coordinates, different ones.
            levels: (u,) integers, of which the steps follow.
            tops: (u,) uint8, see :class:`.form.Met`; for second values, as the last four.
            lowest: level towards which levels are raised, by at most ``raise_by``.
            raise_by: see there.
            most: largest number of steps.
            low: bits of a word for second values.
            wide: whether a coordinate has a word of its own, and not half of one.
            parts: largest second value, in parts of the largest one that was told.
            offset: added to parts of second values before they are rounded down, in [0, 1).
        """
        size, levels = union.numel(), levels.int()
        words = torch.empty(size if wide else (size + 1) // 2, dtype=torch.int32, device="cpu")
        sent = torch.empty_like(union)
        units, rounded = (torch.empty(size, dtype=torch.float32, device="cpu") for _ in range(2))
        found = self._library.ls_round(
            at(acc), at(second), acc.numel(), at(union), at(levels), at(tops), size, lowest, raise_by,
            most, low, wide, parts, offset, at(words), at(units), at(sent), at(rounded),
        )  # fmt: skip
        _refuse_outside(found < 0, acc)
        return Rounded(words, units, sent[:found], rounded[:found])

    def form(
        self,
        formed: Sequence[Tensor | None],
        runs: Sequence[Tensor],
        clear: bool,
        weights: Sequence[float],
        bound: float,
        room: int,
    ) -> Collected:
        """Form what :mod:`~lightning_sparse.ops.host` says of the runs of a gradient.

        Args:
            formed: acc, second moment and score; acc alone where the others are None. Without a score alone, it takes
                the place of the gradient, of float32.
            runs: at least one.
            clear: whether to set the gradient to zero.
            weights: of the second moment.
            bound: magnitude.
            room: for so many that reach it.
        """
        indices, magnitudes = _scratch(room)
        finite = ctypes.c_int32()
        starts, ends = _lie(runs)
        count = self._library.ls_form(
            *map(at, formed), starts, ends, len(runs), KINDS[runs[0].dtype], clear, (ctypes.c_float * 4)(*weights),
            bound, at(indices), at(magnitudes), room, ctypes.byref(finite),
        )  # fmt: skip
        return _collected(count, room) if finite.value else None, bool(finite.value)

    def part(
        self,
        away: Tensor,
        score: Tensor | None,
        agreed: Tensor,
        pushed: Tensor | None,
        runs: Sequence[Tensor],
        bound: float,
        room: int,
    ) -> Collected:
        """Form what :func:`~lightning_sparse.ops.part_` says, and collect what reaches a bound, as :meth:`form` does.

        Args:
            away: see there, as the next three.
            score: see there.
            agreed: see there.
            pushed: see there.
            runs: at least one.
            bound: magnitude of the score, or of the drift where there is none.
            room: for so many that reach it.
        """
        indices, magnitudes = _scratch(room)
        finite = ctypes.c_int32()
        starts, ends = _lie(runs)
        count = self._library.ls_part(
            at(away), at(score), at(agreed), at(pushed), starts, ends, len(runs), KINDS[runs[0].dtype],
            bound, at(indices), at(magnitudes), room, ctypes.byref(finite),
        )  # fmt: skip
        return _collected(count, room) if finite.value else None, bool(finite.value)

    def fingerprint(self, x: Tensor, factors: Tensor) -> int:
        """Return a number that is another one where a contiguous vector has other bits.

        Args:
            x: of any dtype.
            factors: int32 numbers that are not 0; the number of them is best a prime.
        """
        found: int = self._library.ls_fingerprint(at(x), x.nbytes, at(factors), len(factors))
        return found

    def above(self, x: Tensor, bound: float) -> Found:
        """Return the coordinates of a vector that reach a bound."""
        room = x.numel() // 8 + 64
        indices, magnitudes = _scratch(room)
        count = self._library.ls_above(at(x), x.numel(), bound, at(indices), at(magnitudes), room)
        if count > room:
            indices = torch.empty(count + SLACK, dtype=torch.int32, device="cpu")
            magnitudes = torch.empty(count + SLACK, dtype=torch.float32, device="cpu")
            self._library.ls_above(at(x), x.numel(), bound, at(indices), at(magnitudes), count)
        return indices[:count].clone(), magnitudes[:count].clone()

    def sketch_(self, out: Tensor, pieces: Sequence[Tensor], shared: Tensor, own: Tensor) -> None:
        """Add a gradient's rows to zeros, each coordinate with two signs; see :mod:`~lightning_sparse.ops.sketch`.

        Args:
            out: (width,) float32.
            pieces: contiguous tensors.
            shared: (width + shifts - 1,) int32 signs that rows share: 0, or the sign bit of a float32.
            own: (rows,) the same, one for each row.
        """
        count, width = len(pieces), out.numel()
        starts, ends = _lie(pieces)
        kinds = (ctypes.c_int32 * count)(*(KINDS[piece.dtype] for piece in pieces))
        shifts = shared.numel() - width + 1
        self._library.ls_sketch(starts, ends, kinds, count, at(shared), shifts, at(own), width, at(out))

    def largest(
        self, found: Found, share: int, spare: int, turn: int, n: int, more: int
    ) -> tuple[Tensor, Tensor, float] | None:
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
        size, reached = found[0].numel(), ctypes.c_float()
        places = torch.empty(share + spare + SLACK, dtype=torch.int64, device="cpu")
        marks = torch.empty(share + spare + SLACK, dtype=torch.bool, device="cpu")
        chosen = torch.empty(2 * size + 2 * SLACK, dtype=torch.int32, device="cpu")  # not kept: some steps find many
        count = self._library.ls_largest(
            at(found[0]), at(found[1]), size, share, spare, turn, n, more,
            at(places), at(marks), at(chosen), ctypes.byref(reached),
        )  # fmt: skip
        return (places[:count], marks[:count], reached.value) if count else None


def _refuse_outside(outside: bool, x: Tensor) -> None:
    """Raise if an index was outside of a vector."""
    if outside:
        raise IndexError(f"an index is outside of a vector of {x.numel()}")


def _layout(form: Form) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(form.offsets))(*form.offsets)


def _lie(runs: Sequence[Tensor]) -> tuple[Any, Any]:
    """Return where runs of a vector lie, and where each ends in it."""
    starts = (ctypes.c_void_p * len(runs))(*map(at, runs))
    return starts, (ctypes.c_int64 * len(runs))(*accumulate(run.numel() for run in runs))


def _limit(limit: int | None) -> int:
    return 1 << 62 if limit is None else limit


def _space_for_union(total: int) -> tuple[Tensor, Tensor, int]:
    """For coordinates and levels of at most so many picks, and where to write what is said of them."""
    size = total + SLACK
    union = torch.empty(size, dtype=torch.int64, device="cpu")
    return union, torch.empty(size, dtype=torch.int32, device="cpu"), address("said", size, torch.uint16)


def _scratch(room: int) -> Found:
    """Buffers of this thread for coordinates and magnitudes."""
    size = room + SLACK
    return space("indices", size, torch.int32)[:size], space("magnitudes", size, torch.float32)[:size]


def _collected(count: int, room: int) -> Found | None:
    """Return a copy of what a pass has put into the buffers; None if there was more than there was room for."""
    indices, magnitudes = _scratch(room)
    return None if count > room else (indices[:count].clone(), magnitudes[:count].clone())


_chosen, description = choose()
library = None if _chosen is None else Native(_chosen)
"""The library that is used, None for operations of torch; :data:`description` says it in words."""


def compiled_on(first: Tensor, *others: Tensor) -> Native | None:
    """The compiled kernels, where there are some for a vector of float32 and others of dtypes that gradients have."""
    if library is None or first.dtype != torch.float32 or not first.is_contiguous():
        return None
    for x in others:
        if x.dtype not in KINDS or not x.is_contiguous():
            return None
    return library
