"""Sums formed of a whole gradient, on the CPU: one pass in C that reads and writes each coordinate, or torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates, Found
from lightning_sparse.ops import reference
from lightning_sparse.ops.c.native_buffers import written
from lightning_sparse.ops.host_arrays import CHUNK, compiled_on
from lightning_sparse.ops.host_reach import Hits
from lightning_sparse.ops.reference import Weights


def accumulate(acc: Tensor, runs: Sequence[Tensor], bound: float) -> tuple[Found | None, bool]:
    """``acc = acc + grad`` and ``grad = 0``, in one pass; a coordinate whose sum is not finite is left as it is.

    Args:
        acc: (numel,) float32 or float64.
        runs: in which the gradient lies, numel coordinates in order, of the same dtype, or bfloat16 or float16; set to
            zero.
        bound: magnitude.

    Returns:
        What of acc reaches the bound, None if that is more than an eighth or a sum was not finite; and whether all sums
        were finite.
    """
    if compiled := compiled_on(acc, *runs):
        written(acc, *runs)
        return compiled.form((acc, None, None), runs, True, (), bound, acc.numel() // Candidates.ROOM)
    return _in_chunks(_add_, [acc], runs, True, bound)


def weigh(
    acc: Tensor,
    second: Tensor,
    score: Tensor,
    runs: Sequence[Tensor],
    by: Weights,
    bound: float,
) -> tuple[Found | None, bool]:
    """Form the sums of :class:`~lightning_sparse.SecondMoment` of a gradient g, in one pass.

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

    Returns:
        As :func:`accumulate`, but what of the score reaches the bound; and whether all of the new acc was finite.
    """
    clear = score.data_ptr() != runs[0].data_ptr()
    if compiled := compiled_on(acc, second, score, *runs):
        written(acc, second, score, *runs)
        room = score.numel() // Candidates.ROOM
        return compiled.form((acc, second, score), runs, clear, by, bound, room)
    form = partial(reference.weigh_, room=acc.new_empty(3, min(CHUNK, acc.numel())), by=by)
    return _in_chunks(form, [acc, second, score], runs, clear, bound)


def _add_(acc: Tensor, piece: Tensor) -> Tensor:
    """Add a piece of a gradient, which is written to; () whether all is finite, see :func:`accumulate`."""
    formed = piece.add_(acc) if piece.dtype == acc.dtype else torch.add(piece, acc)
    return reference.replace_(formed, (acc, formed))


def _in_chunks(
    form: Callable[..., Tensor], formed: Sequence[Tensor], runs: Sequence[Tensor], clear: bool, bound: float
) -> tuple[Found | None, bool]:
    """Call a pass in torch for pieces that stay in cache, and collect what reaches a bound while they are there.

    Args:
        form: takes pieces of the vectors that are formed, and of the gradient, and returns whether all is finite.
        formed: the vectors, of which the last one is looked at.
        runs: of the gradient.
        clear: whether to set the gradient to zero.
        bound: magnitude.
    """
    start, finite, hits = 0, True, Hits(formed[-1], bound, formed[-1].numel() // Candidates.ROOM)
    for run in runs:
        for piece in torch.split(run, CHUNK):
            here = [x[start : start + len(piece)] for x in formed]
            finite &= bool(form(*here, piece))
            if clear:
                piece.zero_()
            hits.add(here[-1], start)
            start += len(piece)
    return hits.found() if finite else None, finite
