"""The functions of picks.c and unite.c: telling picks, reading what is told, uniting, rounding values."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.ops.c.native_buffers import SLACK, address, at, zeros
from lightning_sparse.ops.form import Form, Met, Rounded


class NativePicks:
    """The library's functions on picks.

    For the form of messages see :mod:`~lightning_sparse.methods.exchanges.packed_union`.

    Args:
        library: as :func:`~lightning_sparse.ops.c.library.load` gives it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def take(self, values: Tensor, indices: Tensor) -> Tensor:
        """``values[indices]``, of float32 and int64."""
        out = torch.empty(indices.numel(), dtype=torch.float32, device="cpu")
        outside = self._library.ls_take(at(values), values.numel(), at(indices), indices.numel(), at(out))
        _refuse_outside(outside, values)
        return out

    def put(self, values: Tensor, indices: Tensor, new: Tensor) -> None:
        """``values[indices] = new``, of float32 and int64."""
        outside = self._library.ls_put(at(values), values.numel(), at(indices), indices.numel(), at(new))
        _refuse_outside(outside, values)

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
            at(acc), at(second), form.numel, at(indices), at(spare), form.slots, count, most, form.bits,
            at(words), address("of picks", form.slots, torch.float32),
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
        lengths, named = _lengths(places), ctypes.c_int64()
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
            at(rows), n, rows.stride(0), form.numel, form.slots, form.bits, spares, _limit(limit), phase,
            self._table(), address("readers", n * self._library.ls_reader(), torch.uint8), at(union), said, at(tops),
            at(levels), numbers,
        )  # fmt: skip
        if size < 0:
            return int(-1 - size)
        tops = None if tops is None else tops[:size]
        different, named = torch.tensor([size, numbers[0]], device="cpu").unbind()
        return Met(
            union[:size], levels[:size], numbers[1], tops, bool(numbers[2]), rows[:, 0].long(), different, named
        )  # fmt: skip

    def add_up(self, parts: Sequence[tuple[Tensor, Tensor]], padding: int) -> tuple[Tensor, Tensor] | None:
        """Sums of sparse vectors; None where one does not ascend."""
        parts = [(places.contiguous(), values.contiguous()) for places, values in parts]
        starts = [places.data_ptr() for places, _ in parts], [values.data_ptr() for _, values in parts]
        return self._add_up(*starts, [len(values) for _, values in parts], True, padding, 1)

    def average_pairs(self, rows: Tensor, slots: int, padding: int) -> tuple[Tensor, Tensor] | None:
        """The mean of sparse vectors over ranks, summed from zero in their order; None where one does not ascend.

        Args:
            rows: (n, 1 + 2 * slots) int32, contiguous in words: a count, coordinates, bits of values.
            slots: see there.
            padding: coordinates from here on do not count.
        """
        n, counts = len(rows), rows[:, 0].tolist()
        if not all(0 <= count <= slots for count in counts):
            return None
        places = [rows.data_ptr() + 4 * (rank * rows.stride(0) + 1) for rank in range(n)]
        return self._add_up(places, [place + 4 * slots for place in places], counts, False, padding, n)

    def _add_up(
        self, places: Sequence[int], values: Sequence[int], lengths: Sequence[int], wide: bool, padding: int, by: int
    ) -> tuple[Tensor, Tensor] | None:
        """Call the function for vectors at addresses."""
        n, room = len(lengths), sum(lengths) + 1
        union = torch.empty(room, dtype=torch.int64, device="cpu")
        totals = torch.empty(room, dtype=torch.float32, device="cpu")
        found = self._library.ls_add_up(
            (ctypes.c_void_p * n)(*places), wide, (ctypes.c_void_p * n)(*values), (ctypes.c_int64 * n)(*lengths), n,
            padding, by, self._table(), address("at", n, torch.int64), at(union), at(totals),
        )  # fmt: skip
        return None if found < 0 else (union[:found], totals[:found])

    def _table(self) -> int:
        return zeros("table", self._library.ls_table())

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

    def average(
        self, words: Tensor, units: Tensor, tops: Tensor | None, n: int, low: int, wide: bool, parts: int
    ) -> tuple[Tensor, Tensor | None]:
        """Means over n ranks of values and of second values, from the sums of the words of :meth:`round`."""
        values, second = torch.empty_like(units), None if tops is None else torch.empty_like(units)
        self._library.ls_average(
            at(words), at(units), at(tops), units.numel(), n, low, wide, parts, at(values), at(second)
        )
        return values, second


def _refuse_outside(outside: bool, x: Tensor) -> None:
    """Raise if an index was outside of a vector."""
    if outside:
        raise IndexError(f"an index is outside of a vector of {x.numel()}")


def _lengths(parts: Sequence[Tensor]) -> Tensor:
    return torch.tensor([len(part) for part in parts], device="cpu")


def _limit(limit: int | None) -> int:
    return 1 << 62 if limit is None else limit


def _space_for_union(total: int) -> tuple[Tensor, Tensor, int]:
    """For coordinates and levels of at most so many picks, and where to write what is said of them."""
    size = total + SLACK
    union = torch.empty(size, dtype=torch.int64, device="cpu")
    return union, torch.empty(size, dtype=torch.int32, device="cpu"), address("said", size, torch.uint16)
