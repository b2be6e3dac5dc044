"""The functions of dense.c, sums.c and choose.c, compiled; those on picks are in ``native_picks``.

Which are used, and whether: :mod:`~lightning_sparse.ops.c.library`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_sparse.core.candidates import Found
from lightning_sparse.ops.c.library import choose
from lightning_sparse.ops.c.native_buffers import SLACK, address, at, declare, space
from lightning_sparse.ops.c.native_picks import NativePicks

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Of gradients."""

Collected = tuple[Found | None, bool]
"""Coordinates reaching a bound, if there was room; and whether all sums were finite, else the others are unknown."""


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

    def form(
        self,
        formed: Sequence[Tensor | None],
        runs: Sequence[Tensor],
        clear: bool,
        weights: Sequence[float],
        bound: float,
        room: int,
    ) -> Collected:
        """Form what :mod:`~lightning_sparse.ops.host_dense` says of the runs of a gradient.

        Args:
            formed: acc, second moment and score; acc alone where the others are None.
            runs: at least one.
            clear: whether to set the gradient to zero.
            weights: of the second moment.
            bound: magnitude.
            room: for so many that reach it.
        """
        indices, magnitudes = _scratch(room)
        finite = ctypes.c_int32()
        starts = (ctypes.c_void_p * len(runs))(*map(at, runs))
        ends = (ctypes.c_int64 * len(runs))(*accumulate(run.numel() for run in runs))
        count = self._library.ls_form(
            *map(at, formed), starts, ends, len(runs), KINDS[runs[0].dtype], clear, (ctypes.c_float * 4)(*weights),
            bound, at(indices), at(magnitudes), room, ctypes.byref(finite),
        )  # fmt: skip
        if not finite.value:
            return None, False
        return None if count > room else (indices[:count].clone(), magnitudes[:count].clone()), True

    def above(self, x: Tensor, bound: float) -> Found:
        """Return the coordinates of a vector that reach a bound."""
        room = x.numel() // 8 + 64
        indices, magnitudes = _scratch(room)
        count = self._above(x, bound, indices, magnitudes)
        if count > room:
            indices = torch.empty(count + SLACK, dtype=torch.int32, device="cpu")
            magnitudes = torch.empty(count + SLACK, dtype=torch.float32, device="cpu")
            self._above(x, bound, indices, magnitudes)
        return indices[:count].clone(), magnitudes[:count].clone()

    def tail(self, x: Tensor, bound: float) -> Tensor:
        """The magnitudes that reach a bound, in a buffer of this thread."""
        buffer = space("tail", x.numel() + SLACK, torch.float32)
        return buffer[: self._above(x, bound, None, buffer)]

    def _above(self, x: Tensor, bound: float, indices: Tensor | None, magnitudes: Tensor) -> int:
        count: int = self._library.ls_above(
            at(x), x.numel(), bound, at(indices), at(magnitudes), len(magnitudes) - SLACK
        )
        return count

    def sums(self, x: Tensor, kind: int, level: float, bound: float) -> Iterable[float]:
        """See :class:`~lightning_sparse.ops.host_sums.Sums`; magnitudes are counted that reach a bound above 0."""
        out = (ctypes.c_double * 6)()
        self._library.ls_sums(at(x), x.numel(), kind, level, bound, out)
        return out

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
        count = self._library.ls_largest(
            at(found[0]), at(found[1]), size, share, spare, turn, n, more,
            at(places), at(marks), address("chosen", 2 * size + 2 * SLACK, torch.uint32), ctypes.byref(reached),
        )  # fmt: skip
        return (places[:count], marks[:count], reached.value) if count else None


def _scratch(room: int) -> Found:
    """Buffers of this thread for coordinates and magnitudes."""
    size = room + SLACK
    return space("indices", size, torch.int32)[:size], space("magnitudes", size, torch.float32)[:size]


_chosen, description = choose()
library = None if _chosen is None else Native(_chosen)
"""The library that the files ``host_*`` use, None for operations of torch; :data:`description` says it in words."""
