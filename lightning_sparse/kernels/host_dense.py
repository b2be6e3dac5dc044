"""What is formed of a whole gradient, on the CPU: one pass that reads and writes each coordinate, in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.candidates import Candidates, Summed, Sums
from lightning_sparse.kernels.host_arrays import (
    Found,
    bits_of,
    buffer,
    chunks,
    compiled_on,
    joined,
    magnitudes_of,
    written,
)


@np.errstate(over="ignore", invalid="ignore", under="ignore")  # sums may leave the range, as torch's do
def accumulate(
    acc: Tensor, residual: Tensor, runs: Sequence[Tensor], bound: float, summed: Summed | None = None
) -> tuple[Found | None, bool, Sums | None]:
    """``acc = residual + grad`` and ``grad = 0``, in one pass.

    Args:
        acc: (numel,) float32 or float64, overwritten.
        residual: the same, not written to.
        runs: in which the gradient lies, numel coordinates in order, of the same dtype, or bfloat16 or float16; set to
            zero.
        bound: magnitude.
        summed: what compiled code adds up of acc.

    Returns:
        What of acc reaches the bound, None if that is more than an eighth; whether all of acc is finite; and sums, None
        if there are none.
    """
    written(acc, *runs)
    room = acc.numel() // Candidates.ROOM
    if compiled := compiled_on(acc, residual, *runs):
        return compiled.accumulate(acc, residual, runs, bound, room, summed)
    target, kept, zeroed = acc.numpy(), residual.numpy(), [bits_of(run) for run in runs]
    level = target.dtype.type(bound)
    widened = np.empty(0, dtype=np.uint32)
    if runs[0].dtype == torch.bfloat16:
        widened = buffer("widened", np.dtype(np.uint32))
    hits = Hits(room)
    finite = True
    for span, piece in chunks(zeroed):
        size, chunk = piece.size, target[span]
        if widened.size:
            np.left_shift(piece, 16, out=widened[:size], dtype=np.uint32)
            np.add(kept[span], widened[:size].view(np.float32), out=chunk)
        else:
            np.add(kept[span], piece, out=chunk)
        piece.fill(0)
        largest = hits.add(chunk, level, span.start)
        finite = finite and bool(largest < np.inf)
    return hits.found(target.dtype), finite, None


class Hits:
    """What of the chunks of a vector reaches a bound.

    Args:
        room: for so many.
    """

    def __init__(self, room: int) -> None:
        self._room, self._total = room, 0
        self._indices: list[NDArray[np.int32]] = []
        self._magnitudes: list[NDArray[np.floating]] = []

    def add(self, chunk: NDArray[np.floating], bound: np.floating, start: int) -> np.floating:
        """A chunk that begins at a coordinate; its largest magnitude."""
        magnitudes, mask = magnitudes_of(chunk)
        np.greater_equal(magnitudes, bound, out=mask)
        hits = np.flatnonzero(mask)
        self._total += hits.size
        if hits.size and self._total <= self._room:
            self._magnitudes.append(magnitudes.take(hits))
            hits += start
            self._indices.append(hits.astype(np.int32))
        largest: np.floating = magnitudes.max()
        return largest

    def found(self, dtype: np.dtype[Any]) -> Found | None:
        """All of them; None: there was no room."""
        if self._total > self._room:
            return None
        return joined(self._indices, np.dtype(np.int32)), joined(self._magnitudes, dtype)


class Weights(NamedTuple):
    """How :func:`weigh` forms second moments and scores."""

    keep: float
    """Of the second moment."""
    add: float
    """Of a squared gradient."""
    least: float
    """Added to roots."""
    quickest: float
    """What a magnitude is multiplied by, to be the least root that it is divided by."""


@np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore")
def weigh(
    acc: Tensor,
    second: Tensor,
    score: Tensor,
    residual: Tensor,
    now: Tensor,
    runs: Sequence[Tensor],
    by: Weights,
    bound: float,
    summed: Summed | None = None,
) -> tuple[Found | None, bool, Sums | None]:
    """What :class:`~lightning_sparse.SecondMoment` forms of a gradient g, in one pass.

    ``acc = residual + g``, ``second = keep now + add g^2``, at most the largest number, and
    ``score = acc / sqrt(max(sqrt(second) + least, quickest |acc|))``.

    Args:
        acc: (numel,) float32 or float64, overwritten.
        second: the same.
        score: the same; may be the only run of the gradient. If it is not, the gradient is set to zero.
        residual: the same, not written to.
        now: the same.
        runs: in which the gradient lies, numel coordinates in order, of the same dtype, or bfloat16 or float16.
        by: numbers.
        bound: magnitude.
        summed: what compiled code adds up of the score.

    Returns:
        What of the score reaches the bound, None if that is more than an eighth; whether all of acc is finite; and
        sums, None if there are none.
    """
    clear = score.data_ptr() != runs[0].data_ptr()
    written(acc, second, score, *runs)
    room = score.numel() // Candidates.ROOM
    if compiled := compiled_on(acc, second, score, residual, now, *runs):
        return compiled.weigh(residual, runs, now, (acc, second, score), clear, by, bound, room, summed)
    out, kept, before = [x.numpy() for x in (acc, second, score)], residual.numpy(), now.numpy()
    given = [bits_of(run) for run in runs]
    one = out[0].dtype.type
    keep, add, least, quickest = map(one, by)
    most, level = np.finfo(one).max, one(bound)
    wide, root, quick = (buffer(use, out[0].dtype) for use in ("wide", "root", "magnitudes"))
    hits = Hits(room)
    finite = True
    for span, piece in chunks(given):
        size = piece.size
        a, v, x = (vector[span] for vector in out)
        g, r, q = wide[:size], root[:size], quick[:size]
        if runs[0].dtype == torch.bfloat16:
            np.left_shift(piece, 16, out=g.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(g, piece)
        if clear:
            piece.fill(0)
        np.add(kept[span], g, out=a)
        np.multiply(before[span], keep, out=v)
        np.multiply(g, add, out=r)
        np.multiply(r, g, out=r)
        np.add(v, r, out=v)
        np.minimum(v, most, out=v)
        np.sqrt(v, out=r)
        np.add(r, least, out=r)
        np.abs(a, out=q)
        finite = finite and bool(q.max() < np.inf)
        np.multiply(q, quickest, out=q)
        np.maximum(r, q, out=r)
        np.sqrt(r, out=r)
        np.divide(a, r, out=x)
        hits.add(x, level, span.start)
    return hits.found(out[0].dtype), finite, None
