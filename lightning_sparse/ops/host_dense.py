"""What is formed of a whole gradient, on the CPU: one pass that reads and writes each coordinate, in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates, Found, Summed, Sums
from lightning_sparse.ops.c.native_buffers import written
from lightning_sparse.ops.host_arrays import CHUNK, compiled_on
from lightning_sparse.ops.host_reach import Hits
from lightning_sparse.ops.host_sums import all_finite


def accumulate(
    acc: Tensor, runs: Sequence[Tensor], bound: float, summed: Summed | None = None
) -> tuple[Found | None, bool, Sums | None]:
    """``acc = acc + grad`` and ``grad = 0``, in one pass; a coordinate whose sum is not finite is left as it is.

    Args:
        acc: (numel,) float32 or float64.
        runs: in which the gradient lies, numel coordinates in order, of the same dtype, or bfloat16 or float16; set to
            zero.
        bound: magnitude.
        summed: what compiled code adds up of acc.

    Returns:
        What of acc reaches the bound, None if that is more than an eighth; whether all sums were finite; and what was
        added up, None if nothing was. If a sum was not finite, nothing is known of the other two.
    """
    room = acc.numel() // Candidates.ROOM
    if compiled := compiled_on(acc, *runs):
        written(acc, *runs)
        return compiled.accumulate(acc, runs, bound, room, summed)
    finite, hits = True, Hits(acc, bound, room)
    for start, piece in _chunks(runs):
        kept = acc[start : start + len(piece)]
        formed = torch.add(kept, piece)
        piece.zero_()
        finite &= _replace_(formed, (kept, formed))
        hits.add(formed, start)
    return hits.found() if finite else None, finite, None


def add_(acc: Tensor, runs: Sequence[Tensor], decay: float) -> bool:
    """``acc = decay * acc + grad``; a coordinate where that is not finite is left as it is. Whether all was."""
    finite = True
    for start, piece in _chunks(runs):
        kept = acc[start : start + len(piece)]
        # Each rounded by itself, as kernels do; alpha= may round once.
        finite &= _replace_(formed := torch.mul(kept, decay).add_(piece), (kept, formed))
    return finite


def _replace_(formed: Tensor, *pairs: tuple[Tensor, Tensor]) -> bool:
    """Replace vectors, the first of each pair, by the second where ``formed`` is finite. Whether all of it is."""
    finite = all_finite(formed)
    for kept, new in pairs:
        kept.copy_(new if finite else torch.where(formed.isfinite(), new, kept))
    return finite


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
    runs: Sequence[Tensor],
    by: Weights,
    bound: float,
    summed: Summed | None = None,
) -> tuple[Found | None, bool, Sums | None]:
    """What :class:`~lightning_sparse.SecondMoment` forms of a gradient g, in one pass.

    ``acc = acc + g``, ``second = keep second + add g^2``, at most the largest number, and
    ``score = acc / sqrt(sqrt(second + (damping acc)^2) + least)``, of a sum up to the largest number. Where the new acc
    would not be finite, acc and second are left as they are, and the score is not defined.

    Args:
        acc: (numel,) float32 or float64.
        second: the same.
        score: the same, overwritten; may be the only run of the gradient. If it is not, the gradient is set to zero.
        runs: in which the gradient lies, numel coordinates in order, of the same dtype, or bfloat16 or float16.
        by: numbers.
        bound: magnitude.
        summed: what compiled code adds up of the score.

    Returns:
        As :func:`accumulate`, but of the score: what of it reaches the bound; whether all of the new acc was finite;
        and what was added up of the score.
    """
    clear = score.data_ptr() != runs[0].data_ptr()
    room = score.numel() // Candidates.ROOM
    if compiled := compiled_on(acc, second, score, *runs):
        written(acc, second, score, *runs)
        return compiled.weigh((acc, second, score), runs, clear, by, bound, room, summed)
    most, finite, hits = torch.finfo(acc.dtype).max, True, Hits(score, bound, room)
    for start, piece in _chunks(runs):
        span = slice(start, start + len(piece))
        g = piece.to(acc.dtype, copy=not clear)
        a, v = acc[span] + g, second[span] * by.keep
        v.add_((g * by.add).mul_(g)).clamp_(max=most)  # each operation rounded by itself, as in C
        finite &= _replace_(a, (acc[span], a), (second[span], v))
        within = a.abs().mul_(by.damping).square_().add_(v).clamp_(max=most)
        if clear:
            piece.zero_()
        torch.div(a, sqrt_(sqrt_(within).add_(by.least)), out=score[span])
        hits.add(score[span], start)
    return hits.found() if finite else None, finite, None


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
