"""What is formed of a whole gradient, on the CPU: one pass that reads and writes each coordinate, in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates, Summed, Sums
from lightning_sparse.ops.c.native_buffers import written
from lightning_sparse.ops.host_arrays import Found, bits_of, buffer, chunks, compiled_on
from lightning_sparse.ops.host_reach import Hits


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
    target, kept = acc.numpy(), residual.numpy()
    widened = buffer("widened", np.dtype(np.uint32))
    hits = Hits(target.dtype, bound, room)
    for span, piece in chunks([bits_of(run) for run in runs]):
        given, chunk = piece, target[span]
        if runs[0].dtype == torch.bfloat16:
            given = np.left_shift(piece, 16, out=widened[: piece.size], dtype=np.uint32).view(np.float32)
        np.add(kept[span], given, out=chunk)
        piece.view(np.uint8).fill(0)  # of wider numbers, numpy fills one after another
        hits.add(chunk, span.start)
    return *hits.found(), None


class Weights(NamedTuple):
    """How :func:`weigh` forms second moments and scores."""

    keep: float
    """Of the second moment."""
    add: float
    """Of a squared gradient."""
    least: float
    """Added to roots."""
    damping: float
    """What a magnitude is multiplied by, before its square is added to the second moment."""


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
    ``score = acc / sqrt(sqrt(second + (damping acc)^2) + least)``, of a sum up to the largest number.

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
    keep, add, least, damping = map(one, by)
    most = np.finfo(one).max
    wide, root, quick = (buffer(use, out[0].dtype) for use in ("wide", "root", "magnitudes"))
    hits = Hits(out[0].dtype, bound, room)
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
            piece.view(np.uint8).fill(0)
        np.add(kept[span], g, out=a)
        np.multiply(before[span], keep, out=v)
        np.multiply(g, add, out=r)
        np.multiply(r, g, out=r)
        np.add(v, r, out=v)
        np.minimum(v, most, out=v)
        np.abs(a, out=q)
        finite = finite and bool(q.max() < np.inf)
        np.multiply(q, damping, out=q)
        np.multiply(q, q, out=q)
        np.add(v, q, out=r)
        np.minimum(r, most, out=r)
        np.sqrt(r, out=r)
        np.add(r, least, out=r)
        np.sqrt(r, out=r)
        np.divide(a, r, out=x)
        hits.add(x, span.start)
    return hits.found()[0], finite, None
