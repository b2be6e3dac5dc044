"""The union of all picks in about half the bytes: 16-bit indices, and 16-bit integers for values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.core import Agreement, Context, Selection, Update
from lightning_sparse.density import count
from lightning_sparse.exchanges.base import EXCHANGES, Exchange, Picks, same_length
from lightning_sparse.exchanges.reduce_union import union_of
from lightning_sparse.kernels import static_shapes
from lightning_sparse.messages import AllGather, AllReduce, Steps

BLOCK = 1 << 16
"""Coordinates that a 16-bit offset can tell apart."""
LANE = (1 << 15) - 1
"""Largest magnitude of a sum in half of a 32-bit word."""
FEWEST_LEVELS = 64
"""With so many ranks that each has fewer levels than this, values travel unrounded."""
CLASSES, CLASS_BITS = 8, 3
"""Classes of magnitude of a rank's picks, each 2**3 times smaller than the one before."""
LOWEST = -1100
"""A *level* is the exponent of a step, counted from here, below that of any number."""
SILENT, TROUBLE = 0, (1 << 20) - 1
"""Levels of a rank that has picked nothing but zeros, and of one with a value that is not finite."""


@EXCHANGES.register
@dataclass(frozen=True)
class PackedUnion(Exchange):
    """What :class:`ReduceUnion` does, with a bit more than half the bytes for indices and half of those for values.

    ``update[U_j] = (1/n) s_j sum_i q_ij``: at coordinate j all ranks round their values to multiples ``q_ij`` of one
    step ``s_j``, with ``|q_ij| <= floor(32767 / n)``, and keep what rounding took away (``acc_i - q_i s``) in their
    residuals, so that nothing is lost. Two such integers share a 32-bit word: n of them add up without overflow,
    exactly and in any order, so that the result is equal on all ranks.

    Picks of one step differ by orders of magnitude, and one step for all would round the small ones to zero for as long
    as the large one is there. Therefore each rank tells, next to the coordinate, how large its pick is in one of eight
    classes: class c reaches up to ``8**-c`` times its largest pick. The step ``s_j`` is a power of two, that of the
    largest class that any rank has told for j. So that ranks with larger gradients can send what they have there
    without having picked it, steps are raised towards the smallest class that all picks of some rank reach, by as much
    as leaves each pick at least two levels. A rank's largest pick has more than half of the levels. A value beyond the
    last level is sent as the last level; the rest follows later. Where a value is rounded to zero, that rank has sent
    nothing. Sums are exact, and so is what stays behind, but for values beyond the last level.

    Indices travel as 16-bit offsets in blocks of 65 536 coordinates and one count for each block, where that is
    shorter, and as 32 bits where it is not; with 4 bits each for class and :attr:`spare
    <lightning_sparse.core.Selection.spare>`. Together ``2.5 (n - 1) m`` bytes of indices for the longest selection m
    and ``4 (n - 1) / n |U|`` of values, plus a few words.

    At density 1, with a single rank, and from 512 ranks on (too few levels), values travel unrounded.

    References:
        Ours. Rounding with error feedback: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient
        Compression Schemes, ICML 2019, arXiv 1901.09847.
    """

    accepts: ClassVar[frozenset[Agreement]] = frozenset({Agreement.INDEPENDENT, Agreement.SHARED, Agreement.DISJOINT})

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
        """One group; see :class:`~lightning_sparse.exchanges.Exchange`."""
        numel, n = acc.numel() - 1, ctx.world_size
        most = max(1, LANE // n)
        picks, levels, lowest, trouble = yield from _gather(acc, selection, most, n)
        union = union_of(picks, selection, numel, ctx, levels)
        indices, named = union.indices, union.named
        if n == 1 or count(ctx.density, numel) == numel or most < FEWEST_LEVELS:
            total = yield AllReduce(acc[indices])
            return Update(indices, total / n, indices, None, picks.counts, union.size, named)
        unit = _step_of(_raised(union.levels, lowest, most), acc.dtype)
        whole = (acc[indices] / unit).round().clamp(-most, most).nan_to_num(nan=0.0)
        total = unpack((yield AllReduce(pack(whole.int()))), indices.numel())
        values = (total * unit / n).masked_fill(trouble, float("nan"))
        given, rounded = whole != 0, whole * unit
        if static_shapes(acc.device):
            sent = torch.where(given, indices, numel)
        else:
            sent, rounded = indices[given], rounded[given]
        return Update(indices, values, sent, rounded, picks.counts, union.size, named)


def _gather(acc: Tensor, selection: Selection, most: int, n: int) -> Steps[tuple[Picks, Tensor, Tensor, Tensor]]:
    """Everybody's picks and what is told of them.

    Returns:
        The picks; their levels, in rank order; () the lowest level that all picks of some rank reach, for
        :func:`_raised`; and () whether any of them is not finite.
    """
    padding = acc.numel() - 1
    selection, _ = yield from same_length(selection, None, padding)
    indices, slots = selection.indices, selection.indices.numel()
    magnitudes = acc[indices].abs()
    largest = magnitudes.max() if slots else acc.new_zeros(())
    classes = _classes(magnitudes, largest)
    if selection.spare is not None:
        classes = classes | selection.spare.to(torch.uint8) << 3
    head = torch.stack([selection.count.int(), _level_of(largest / most)])
    blocks = -(-padding // BLOCK)
    short = blocks + (slots + 1) // 2 < slots
    body = _shorten(indices, blocks) if short else indices.int()
    rows = yield AllGather(torch.cat([head, body, _pack_nibbles(classes)]))
    end = 2 + body.numel()
    counts, tops, told = rows[:, 0].long(), rows[:, 1:2].long(), _unpack_nibbles(rows[:, end:], slots)
    trouble = tops.max() == TROUBLE
    levels = (tops - told % CLASSES * CLASS_BITS).clamp(min=SILENT)
    within = torch.arange(slots, device=acc.device) < counts[:, None]
    lowest = torch.cat([tops, torch.where(within, levels, tops)], dim=1).amin(1).max()
    places = _lengthen(rows[:, 2:end], slots, blocks, padding) if short else rows[:, 2:end].long()
    spare = told >= CLASSES
    parts = [places, spare, levels]
    ends = [slots] * n if static_shapes(acc.device) else counts.tolist()
    everyone, spares, each = ([row[:end] for row, end in zip(part, ends, strict=True)] for part in parts)
    return Picks(everyone, None, counts, None if selection.spare is None else spares), torch.cat(each), lowest, trouble


def _shorten(indices: Tensor, blocks: int) -> Tensor:
    """Ascending coordinates to int32 words: how many lie in each block, then two offsets a word."""
    bounds = torch.arange(1, blocks + 1, device=indices.device) * BLOCK
    # Of padding, which is last, the last block may take up some: its slots are beyond the count.
    ends = torch.searchsorted(indices, bounds)
    return torch.cat([ends.int(), pack(_signed(indices % BLOCK))])


def _lengthen(words: Tensor, slots: int, blocks: int, padding: int) -> Tensor:
    """Undo :func:`_shorten` for (..., words) of one or more ranks; slots without a pick come back as padding."""
    ends, offsets = words[..., :blocks].long(), unpack(words[..., blocks:], slots).long() % BLOCK
    places = torch.arange(slots, device=words.device).expand(*words.shape[:-1], slots)
    passed = torch.searchsorted(ends.contiguous(), places.contiguous(), right=True)
    return (passed * BLOCK + offsets).clamp(max=padding)


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
    """The first ``count`` integers of (..., words)."""
    low = ((words + (1 << 15)) & (BLOCK - 1)) - (1 << 15)
    return torch.stack([low, (words - low) >> 16], dim=-1).flatten(-2)[..., :count]


def _pack_nibbles(nibbles: Tensor) -> Tensor:
    """Eight integers of 4 bits, uint8, in each int32 word."""
    padded = torch.nn.functional.pad(nibbles, (0, -nibbles.numel() % 8))
    return (padded[0::2] | padded[1::2] << 4).view(torch.int32)


def _unpack_nibbles(words: Tensor, count: int) -> Tensor:
    """Undo :func:`_pack_nibbles` for (n, words): (n, count) int64."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)[:, :count].long()


def _classes(magnitudes: Tensor, largest: Tensor) -> Tensor:
    """The class of each magnitude: the largest c below 8 with ``magnitude <= 8**-c largest``, exactly; uint8."""
    mantissa, exponent = torch.frexp(magnitudes)
    top = torch.frexp(largest)
    halvings = top.exponent - exponent - (mantissa > top.mantissa).int()
    halvings = torch.where(magnitudes > 0, halvings, (largest > 0) * (CLASSES * CLASS_BITS))
    return (halvings // CLASS_BITS).clamp(0, CLASSES - 1).to(torch.uint8)


def _raised(levels: Tensor, lowest: Tensor, most: int) -> Tensor:
    """The levels of a union, raised towards () the lowest one that all picks of some rank reach.

    What a rank has left out is hardly larger than its smallest pick, and may be much larger than a pick of another
    rank: with that one's step it could send only a part. Picks keep at least two of their ``most`` levels. Where only
    ranks that have nothing but zeros have picked, nothing has to be kept.
    """
    raise_by = max(0, most.bit_length() - 7)
    return torch.maximum(levels, torch.minimum(levels.masked_fill(levels == SILENT, TROUBLE) + raise_by, lowest))


def _level_of(step: Tensor) -> Tensor:
    """() int32: level of the smallest power of two that is not below a () number, see :data:`LOWEST`."""
    mantissa, exponent = torch.frexp(step)  # the mantissa is in [0.5, 1)
    level = torch.where(step > 0, exponent - (mantissa == 0.5).int() - LOWEST, SILENT)
    return torch.where(step.isfinite(), level, TROUBLE).int()


def _step_of(levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Powers of two in float32 or float64, none of them subnormal; from their bits, which is exact everywhere.

    Example:
        >>> _step_of(_level_of(torch.tensor(0.3)).view(1), torch.float32)
        tensor([0.5000])
    """
    integer, digits, bias = (torch.int32, 23, 127) if dtype == torch.float32 else (torch.int64, 52, 1023)
    biased = (levels + (LOWEST + bias)).clamp(1, 2 * bias)
    return (biased << digits).to(integer).view(dtype)
