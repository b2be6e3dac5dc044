"""What is formed of a whole gradient, on the CPU: one pass that reads and writes each coordinate, in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates, Found, Summed, Sums
from lightning_sparse.ops.c.native_buffers import written
from lightning_sparse.ops.host_arrays import CHUNK, compiled_on
from lightning_sparse.ops.host_reach import Hits


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
    room = acc.numel() // Candidates.ROOM
    if compiled := compiled_on(acc, residual, *runs):
        written(acc, *runs)
        return compiled.accumulate(acc, residual, runs, bound, room, summed)
    hits = Hits(acc, bound, room)
    for start, piece in _chunks(runs):
        span = slice(start, start + len(piece))
        torch.add(residual[span], piece, out=acc[span])
        piece.zero_()
        hits.add(acc[span], start)
    return hits.found(), hits.finite, None


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
    room = score.numel() // Candidates.ROOM
    if compiled := compiled_on(acc, second, score, residual, now, *runs):
        written(acc, second, score, *runs)
        return compiled.weigh(residual, runs, now, (acc, second, score), clear, by, bound, room, summed)
    most, finite, hits = torch.finfo(acc.dtype).max, True, Hits(score, bound, room)
    for start, piece in _chunks(runs):
        span = slice(start, start + len(piece))
        g, v = piece.to(acc.dtype, copy=not clear), torch.mul(now[span], by.keep, out=second[span])
        a = torch.add(residual[span], g, out=acc[span])
        v.add_((g * by.add).mul_(g)).clamp_(max=most)  # each operation rounded by itself, as in C
        waited = a.abs()
        finite = finite and bool(waited.amax() < math.inf)
        within = waited.mul_(by.damping).square_().add_(v).clamp_(max=most)
        if clear:
            piece.zero_()
        torch.div(a, sqrt_(sqrt_(within).add_(by.least)), out=score[span])
        hits.add(score[span], start)
    return hits.found(), finite, None


def _chunks(runs: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Pieces of runs that stay in cache, and the coordinates at which they begin."""
    start = 0
    for run in runs:
        for at in range(0, len(run), CHUNK):
            yield start + at, run[at : at + CHUNK]
        start += len(run)


def sqrt_(x: Tensor) -> Tensor:
    """Roots in place, rounded alike on all processors: those of torch on CPUs may differ in the last bit."""
    np.sqrt(x.numpy(), out=x.numpy())
    return x
