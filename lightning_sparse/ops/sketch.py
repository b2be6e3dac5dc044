"""A linear sketch of a gradient: few numbers, whose mean over ranks is about as long as the mean gradient.

Ranks that keep their gradients to themselves learn the norm of the mean from 16 KB. All coordinates, one piece after
another, are cut into rows of ``width``, coordinate i of row r is multiplied by two random signs ``s_r t_(i + r mod
4096)``, and rows are added up. The squared length of the sketch is that of the gradient on average over signs, and its
variance at most ``2 sum_i (sum_r g_ri^2)^2``: the norm is off by ``1 / sqrt(2 width)``, 1.1 %, where squares are spread
over columns. A prime width spreads those of a matrix of any width.

The signs t make rows independent of each other that are alike. With the s alone, these would add up or cancel as a
whole, such as those of a gradient that is the same everywhere. (Of rows that are a multiple of 4096 apart, they still
do.)

Charikar, Chen, Farach-Colton, Finding Frequent Items in Data Streams, ICALP 2002: sums with random signs. Their places
are random, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from lightning_sparse.core.hashing import GOLDEN, mix, outputs
from lightning_sparse.core.layout import flattened
from lightning_sparse.ops.c.native import compiled_on
from lightning_sparse.ops.reference import CHUNK, static_shapes

WIDTH = 4093
"""Of a sketch: a prime."""
NARROW = 251
"""Of one that is sent beside other messages, likewise: squared norms are off by 9 %."""
SHIFTS = 4096
"""Of the signs that rows share: row r begins with sign r modulo this."""
DEVICE_CHUNK = 1 << 22
"""Elements worked on at once on a device, a power of two: their copy is short enough for its cache."""


def sketch(pieces: Sequence[Tensor], seed: int, width: int = WIDTH) -> Tensor:
    """Return a linear sketch of a gradient; the host waits for nothing.

    The gradient is read once. Sketches with the same seed, of pieces of the same sizes in the same order, may be added
    and averaged. Cutting the pieces otherwise changes nothing. An element that is not finite makes the sketch so.

    Args:
        pieces: at least one tensor, on one device, of any floating dtypes; each in the order of memory.
        seed: decides the signs, any integer: the number of the step. The same on all ranks.
        width: numbers of the sketch; a prime.

    Returns:
        (width,) float32; float64 if a piece is.

    Example:
        >>> ranks = torch.randn(4, 100_000, generator=torch.Generator().manual_seed(0))
        >>> sketches = torch.stack([sketch([rank[:70_000], rank[70_000:]], seed=1) for rank in ranks])
        >>> tuple(round(float(each.mean(0).norm()), 1) for each in (ranks, sketches))
        (157.6, 158.4)
    """
    pieces = [piece if piece.is_contiguous() else flattened(piece) for piece in pieces]  # a view takes 2 us
    device, numel = pieces[0].device, sum(piece.numel() for piece in pieces)
    dtype = reduce(torch.promote_types, {piece.dtype for piece in pieces}, torch.float32)
    out = torch.zeros(width, dtype=dtype, device=device)
    lengths = [width + SHIFTS - 1, -(-numel // width)]
    words = outputs(mix(seed + GOLDEN), torch.arange(1, sum(lengths) + 1, device=device))
    if not static_shapes(device) and (compiled := compiled_on(out, *pieces)):
        compiled.sketch_(out, pieces, *torch.split((words >> 63 << 31).int(), lengths))
    else:
        _add_rows_(out, [flattened(piece) for piece in pieces], *torch.split(1 - 2 * (words < 0).to(dtype), lengths))
    return out


def narrow_sketch(pieces: Sequence[Tensor], seed: int) -> Tensor:
    """Return a sketch of at most 251 numbers: that of a wide one, which is formed faster than from many short rows.

    Args:
        pieces: see :func:`sketch`.
        seed: likewise.

    Returns:
        (min(251, number of elements),) in the dtype of :func:`sketch`.
    """
    numel = sum(piece.numel() for piece in pieces)
    wide = [sketch(pieces, seed)] if numel > WIDTH else pieces
    return sketch(wide, ~seed, min(NARROW, numel))


def _add_rows_(out: Tensor, vectors: Sequence[Tensor], shared: Tensor, own: Tensor) -> None:
    """Add rows to zeros, many at once, in a buffer that they are gathered in."""
    width, most = out.numel(), DEVICE_CHUNK if static_shapes(out.device) else CHUNK
    many = 1 << max(0, min(most // width, SHIFTS).bit_length() - 1)  # a power of two: signs go on within each chunk
    room = out.new_empty(min(many, own.numel()) * width)
    windows = shared.unfold(0, width, 1)
    for chunk, parts in enumerate(_cut(vectors, many * width)):
        first, filled = many * chunk, sum(part.numel() for part in parts)
        signs = own[first : first + many]
        torch.cat(parts, out=room[:filled])
        rows = room[: signs.numel() * width]
        rows[filled:].zero_()
        rows = rows.view(-1, width).mul_(windows[first % SHIFTS :][: signs.numel()]).mul_(signs.view(-1, 1))
        out.add_(rows.sum(0))  # not a product, whose precision a script may have lowered


def _cut(vectors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Iterate over parts that have so many elements together, the last ones maybe fewer."""
    parts: list[Tensor] = []
    room = size
    for vector in vectors:
        while vector.numel():
            parts.append(vector[:room])
            vector, room = vector[room:], room - parts[-1].numel()
            if not room:
                yield parts
                parts, room = [], size
    if parts:
        yield parts
