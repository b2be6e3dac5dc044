"""The union of all picks in half the bytes: 16-bit indices, and 16-bit integers for values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.collective import Collective
from lightning_sparse.density import count
from lightning_sparse.exchanges.base import EXCHANGES, Exchange, Picks, same_length
from lightning_sparse.exchanges.reduce_union import union_of
from lightning_sparse.kernels import static_shapes
from lightning_sparse.types import Agreement, Context, Selection, Update

BLOCK = 1 << 16
"""Coordinates that a 16-bit offset can tell apart."""
LANE = (1 << 15) - 1
"""Largest magnitude of a sum in half of a 32-bit word."""
FEWEST_LEVELS = 64
"""With so many ranks that each has fewer levels than this, values travel unrounded."""
TROUBLE = 1 << 20
"""Stands for the exponent of a value that is not finite."""


@EXCHANGES.register
@dataclass(frozen=True)
class PackedUnion(Exchange):
    """What :class:`ReduceUnion` does, with half the bytes for indices and for values.

    ``update[U] = (1/n) sum_i q_i s`` with ``q_i = round(acc_i[U] / s)``: all ranks round their values to multiples
    of one step s, and keep what rounding took away (``acc_i[U] - q_i s``) in their residuals, so that nothing is
    lost. s is a power of two, chosen in each step so that the largest value that any rank picked has at least
    ``2**12 / n`` of the ``32767 / n`` levels on either side of zero that each rank may use. Two such integers share
    a 32-bit word: n of them add up without overflow, exactly and in any order, so that the result is equal on all
    ranks. A value beyond the last level, which is possible where a rank has more at a coordinate than any rank has
    at its own picks, is sent as the last level; the rest follows later.

    Indices travel as 16-bit offsets in blocks of 65 536 coordinates and one count for each block, where that is
    shorter. Together ``2 (n - 1) m`` bytes of indices and ``4 (n - 1) / n |U|`` of values, plus a few words.

    At density 1, and from 512 ranks on (too few levels), values travel unrounded.

    References:
        Ours. Rounding with error feedback: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes, ICML 2019, arXiv 1901.09847.
    """

    accepts: ClassVar[frozenset[Agreement]] = frozenset({Agreement.INDEPENDENT, Agreement.SHARED, Agreement.DISJOINT})

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context, comm: Collective) -> Update:
        """One group; see :class:`~lightning_sparse.exchanges.Exchange`."""
        numel, n = acc.numel() - 1, comm.world_size
        picks, exponent = _gather(acc, selection, comm)
        union, size = union_of(picks, selection, numel)
        levels = LANE // n
        if count(ctx.density, numel) == numel or levels < FEWEST_LEVELS:
            values = comm.all_reduce(acc[union]) / n
            return Update(union, values, union, None, picks.counts, size)
        bits = levels.bit_length() - 1
        smallest = torch.frexp(torch.full((), torch.finfo(acc.dtype).tiny, dtype=acc.dtype, device=acc.device)).exponent
        unit = torch.ldexp(torch.ones_like(acc[:1]), torch.maximum(exponent - bits, smallest))
        whole = (acc[union] / unit).round().clamp(-levels, levels)
        total = unpack(comm.all_reduce(pack(whole.nan_to_num(nan=0.0).int())), union.numel())
        values = (total * unit / n).masked_fill(exponent == TROUBLE, float("nan"))
        return Update(union, values, union, whole * unit, picks.counts, size)


def _gather(acc: Tensor, selection: Selection, comm: Collective) -> tuple[Picks, Tensor]:
    """Everybody's picks, and the exponent of the largest magnitude that anybody picked, () int32."""
    padding = acc.numel() - 1
    indices, _ = same_length(selection, None, padding, comm)
    slots = indices.numel()
    largest = acc[indices].abs().max() if slots else acc.new_zeros(())
    # A rank with nothing but zeros has no say: the exponent of zero is 0, larger than that of small gradients.
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent, -TROUBLE)
    exponent = torch.where(largest.isfinite(), exponent, TROUBLE)
    head = torch.stack([selection.count.int(), exponent.int()])
    blocks = -(-padding // BLOCK)
    short = blocks + (slots + 1) // 2 < slots
    body = _shorten(indices, blocks) if short else indices.int()
    rows = comm.all_gather(torch.cat([head, body]))
    counts = rows[:, 0].long()
    everyone = [_lengthen(row[2:], slots, blocks, padding) if short else row[2:].long() for row in rows]
    if not static_shapes(acc.device):
        everyone = [places[:end] for places, end in zip(everyone, counts.tolist(), strict=True)]
    return Picks(everyone, None, counts), rows[:, 1].max()


def _shorten(indices: Tensor, blocks: int) -> Tensor:
    """Ascending coordinates to int32 words: how many lie in each block, then two offsets a word."""
    bounds = torch.arange(1, blocks + 1, device=indices.device) * BLOCK
    # Of padding, which is last, the last block may take up some: its slots are beyond the count.
    ends = torch.searchsorted(indices, bounds)
    return torch.cat([ends.int(), pack(_signed(indices % BLOCK))])


def _lengthen(words: Tensor, slots: int, blocks: int, padding: int) -> Tensor:
    """Undo :func:`_shorten`; slots without a pick come back as padding."""
    ends, offsets = words[:blocks].long(), unpack(words[blocks:], slots).long() % BLOCK
    places = torch.arange(slots, device=words.device)
    return (torch.searchsorted(ends, places, right=True) * BLOCK + offsets).clamp(max=padding)


def _signed(offsets: Tensor) -> Tensor:
    """0 .. 65535 to the 16-bit integers of equal bits."""
    return ((offsets + (1 << 15)) % BLOCK - (1 << 15)).int()


def pack(lanes: Tensor) -> Tensor:
    """Pair 16-bit integers in int32 words; sums of words are pairs of sums while these stay within 16 bits.

    Example:
        >>> words = pack(torch.tensor([1, -2, 30_000], dtype=torch.int32))
        >>> unpack(words + words.new_tensor([5, -7]), 3)
        tensor([    6,    -2, 29993], dtype=torch.int32)
    """
    padded = torch.nn.functional.pad(lanes, (0, lanes.numel() % 2))
    return padded[0::2] + padded[1::2] * BLOCK


def unpack(words: Tensor, count: int) -> Tensor:
    """The first ``count`` integers of packed words."""
    low = ((words + (1 << 15)) & (BLOCK - 1)) - (1 << 15)
    return torch.stack([low, (words - low) >> 16], dim=1).view(-1)[:count]
