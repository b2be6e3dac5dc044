"""The length of gradients: their norm, how it changes from step to step, and the factor of the rest where it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.layout import sum_dtype
from lightning_sparse.ops import on_device, static_shapes
from lightning_sparse.ops.on_cuda import on_cuda

CHUNK = 1 << 16
"""Elements of a partial norm: float32 sums of millions of squares are wrong in the fourth digit."""
LEAST = 1e-12
"""Norm of which float32 squares hold enough digits, however many elements it is made of."""


def norm(x: Tensor) -> Tensor:
    """Return the () float64 Euclidean norm of a vector; infinite or NaN if an element is."""
    if static_shapes(x.device):
        return on_device.norm([x])
    dtype = sum_dtype(x.dtype)
    whole = x.numel() // CHUNK * CHUNK
    rows = torch.linalg.vector_norm(x[:whole].view(-1, CHUNK), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(x[whole:], dtype=dtype)
    total: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]), dtype=torch.float64)
    if not LEAST < total < math.inf:  # squares of more than 1e19 are beyond float32, and those of less than 1e-19
        wide = [torch.linalg.vector_norm(chunk.double()) for chunk in torch.split(x, CHUNK)]
        total = torch.linalg.vector_norm(torch.stack(wide))
    return total


def joint_norm(pieces: Sequence[Tensor]) -> Tensor:
    """Return the () float64 Euclidean norm of the concatenation of vectors, at least one."""
    if len(pieces) == 1:
        return norm(pieces[0])
    if static_shapes(pieces[0].device):
        return on_device.norm(pieces)
    short = [piece for piece in pieces if piece.numel() <= CHUNK]
    norms = [norm(piece) for piece in pieces if piece.numel() > CHUNK]
    if short:  # at once: a norm of its own takes five calls
        dtype = sum_dtype(short[0].dtype)
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(short, dtype=dtype)), dtype=torch.float64)
        norms += [total] if LEAST < total < math.inf else [norm(piece) for piece in short]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


DECAY = 0.9
"""Of the running mean of squares: ten steps."""
LONG = 2.0
"""Times the running length that a gradient may have; longer ones are clipped to it."""
FAR = 1.25
"""Times that the running length may differ from the one by which what is remembered is measured."""


class LengthChanges(NamedTuple):
    """The number of times that gradients have changed their length, and something was done about it."""

    clipped: int
    """Steps in which a gradient was clipped to twice its usual length."""
    measured_anew: int
    """Steps in which what is remembered was measured anew."""


FOLLOWED = "mean_square", "mean_square_known", "unit", *LengthChanges._fields
"""Names of the numbers that are followed, see :func:`measure`; in states, too."""
SIZE = len(FOLLOWED)


def measure(lengths: Tensor, norm: Tensor, numel: int, beta2: float, acts: bool) -> Tensor:
    """Follow the length of gradients; the host waits for nothing.

    With m the mean square of the gradient's coordinates and r the running mean of earlier ones, corrected for its start
    at 0, the gradient is multiplied by ``take = min(1, 2 sqrt(r / m))``, and r goes on with ``take^2 m``. Where
    ``sqrt(r)`` is then more than 1.25 times as long, or as short, as the length u by which what is remembered is
    measured, that is multiplied by ``carry = sqrt(r) / u``, and u becomes ``sqrt(r)``. Second moments are multiplied by
    ``carry^2``. In trainings whose gradients keep their length, both factors are exactly 1.

    Args:
        lengths: (5,) float64: the running mean, how far it is corrected, u; steps in which a gradient was clipped, and
            in which what is remembered was measured anew. Changed in place.
        norm: () float64 of the gradient. If it is 0 or not finite, nothing follows from it; if it is not finite,
            ``take`` is NaN, so that nothing of the gradient is absorbed.
        numel: coordinates of the gradient.
        beta2: decay of the second moment.
        acts: False: both factors are 1, and lengths are followed all the same.

    Returns:
        (3,) ``take``, ``carry`` and ``beta2 carry^2``, float64.

    Example:
        >>> lengths = torch.zeros(SIZE, dtype=torch.float64)
        >>> for norm in (2.0, 2.0, 10.0, 1.0, 1.0):
        ...     units = measure(lengths, torch.tensor(norm, dtype=torch.float64), 1, 0.9, True)
        ...     print([round(x, 2) for x in units[:2].tolist()])
        [1.0, 1.0]
        [1.0, 1.0]
        [0.4, 1.45]
        [1.0, 1.0]
        [1.0, 0.77]
    """
    if on_cuda.takes(lengths):
        from lightning_sparse.ops.triton import numbers

        units = lengths.new_empty(3)
        numbers.measure(lengths, norm, units, numel, beta2, acts, DECAY, LONG, FAR)
        return units
    # Multiplied, because a GPU multiplies where a CPU divides by a number, and both are to round alike.
    square = norm.square() * (1 / numel)
    mean, known, unit = lengths[:3].unbind()
    counts = square.isfinite() & (square > 0)
    most = LONG**2 * (mean / known)
    clips = counts & (most > 0) & (square > most) & acts
    share = torch.where(clips, most / square, 1.0)
    goes_on = torch.stack([DECAY * mean + (1 - DECAY) * share * square, DECAY * known + (1 - DECAY)])
    goes_on = torch.where(counts, goes_on, lengths[:2])
    length = (goes_on[0] / goes_on[1]).sqrt()
    moved = counts & ((length > FAR * unit) | (FAR * length < unit))
    anew = moved & (unit > 0) & acts
    carry = torch.where(anew, length / unit, 1.0)
    acted = lengths[3:] + torch.stack([clips, anew])
    torch.cat([goes_on, torch.where(moved, length, unit).view(1), acted], out=lengths)
    take = share.sqrt().where(square.isfinite(), torch.nan)
    return torch.stack([take, carry, beta2 * carry.square()])
