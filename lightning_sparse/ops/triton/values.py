"""The values of ``packed_union`` as 16-bit integers, with what is sent beside them.

What the numbers mean is said in :mod:`~lightning_sparse.methods.exchanges.packed_union`, and of second values in
:class:`~lightning_sparse.SecondMoment`. Their tensor operations give the same words and the same averages, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.lanes import LEVELS_END, LOWEST, SILENT, TROUBLE, _join, _part
from lightning_sparse.ops.triton.launch import launch
from lightning_sparse.ops.triton.second import MOST
from lightning_sparse.ops.triton.union import PICKS

MOST_RANKS = 512
"""Ranks that a program adds up at once."""


@triton.jit
def _power_of_two(level):
    """The step that a level stands for, none of them subnormal."""
    return (tl.minimum(tl.maximum(level + (LOWEST + 127), 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _top(code):
    """Twice the power of two that a code stands for, not subnormal."""
    return (tl.minimum(tl.maximum(code, 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["slots", "most", "raise_by", "n", "most_parts"])
def _round(
    acc, second, indices, levels, lowest, words, lanes, units, slots, most, raise_by, n, most_parts, offset,
    LOW: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    """Values, with LOW > 0 above as many bits of second values, in words of one (WIDE) or two coordinates."""
    rank = tl.arange(0, RANKS)
    reach = tl.max(tl.where(rank < n, LEVELS_END - tl.load(lowest + rank, mask=rank < n, other=0), 0))
    word = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    limit = most.to(tl.float32)
    first = tl.zeros((PICKS,), tl.int32)
    other = first
    EACH: tl.constexpr = 1 if WIDE else 2
    for odd in tl.static_range(EACH):
        slot = EACH * word + odd
        inside = slot < slots
        place = tl.load(indices + slot, mask=inside, other=0)
        level = tl.load(levels + slot, mask=inside, other=0)
        raised = tl.where(level == SILENT, TROUBLE, level) + raise_by
        unit = _power_of_two(tl.maximum(level, tl.minimum(raised, reach)))
        parts = tl.div_rn(tl.load(acc + place, mask=inside, other=0.0), unit)
        parts = tl.where(parts > limit, limit, tl.where(parts < -limit, -limit, parts))
        # To the nearest integer, of two the even one: behind the point of 1.5 * 2**23 there is nothing left.
        lane = tl.where(parts == parts, (parts + 12582912.0) - 12582912.0, 0.0).to(tl.int32)
        tl.store(lanes + slot, lane.to(tl.int16), mask=inside)
        tl.store(units + slot, unit, mask=inside)
        if LOW > 0:
            top = _top(tl.load(levels + slots + slot, mask=inside, other=0))
            share = tl.div_rn(tl.load(second + place, mask=inside, other=0.0), top)
            share = share * most_parts.to(tl.float32) + offset
            share = tl.where(share > 0, tl.minimum(share, most_parts.to(tl.float32)), 0.0)  # NaN becomes 0
            lane = (lane << LOW) + share.to(tl.int32)  # rounded down
        if odd == 0:
            first = lane
        else:
            other = tl.where(inside, lane, 0)
    tl.store(words + word, first if WIDE else _join(first, other), mask=EACH * word < slots)


@triton.jit
def _divisor(sum_of_parts, code, value, power, damping, n, most_parts, EPS: tl.constexpr):
    """What an average is divided by, from the mean of second values, see :meth:`.SecondMoment._divisor`."""
    top = _top(code)
    part = tl.div_rn(top, (n * most_parts).to(tl.float32))
    fewest = tl.div_rn(top, (4 * n).to(tl.float32))
    second = sum_of_parts.to(tl.float32) * part
    second = tl.where(second > fewest, second, fewest)
    correction = (1.0 - tl.load(power)).to(tl.float32)
    waited = tl.abs(value) * damping
    within = tl.div_rn(second, correction) + waited * waited
    root = tl.sqrt_rn(tl.where(within == within, tl.where(within > MOST, MOST, within), 1.0))
    return tl.where(waited > root, waited, root) + EPS


@triton.jit(do_not_specialize=["slots", "n", "numel", "most_parts"])
def _settle(
    acc, grad, indices, words, lanes, units, trouble, scale, values, void, codes, power, divisor,
    slots, n, numel, most_parts, damping, largest,
    LOW: tl.constexpr, WIDE: tl.constexpr, EPS: tl.constexpr, SCALED: tl.constexpr, NARROW: tl.constexpr,
    PICKS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    inside = slot < slots
    place = tl.load(indices + slot, mask=inside, other=0)
    unit = tl.load(units + slot, mask=inside, other=1.0)
    if WIDE:
        total = tl.load(words + slot, mask=inside, other=0)
    else:
        total = _part(tl.load(words + (slot >> 1), mask=inside, other=0), (slot & 1) != 0)
    below = total & ((1 << LOW) - 1)
    total = total >> LOW
    broken = tl.load(trouble) != 0
    value = tl.where(broken, float("nan"), tl.div_rn(total.to(tl.float32) * unit, n.to(tl.float32)))
    given = value
    if SCALED:
        given = value * tl.load(scale)
    if NARROW:
        given = tl.where(given > largest, largest, tl.where(given < -largest, -largest, given))
    given = given.to(grad.dtype.element_ty)
    live = inside & (place < numel)
    tl.store(grad + place, given, mask=live)
    tl.store(values + slot, value, mask=inside)
    if LOW > 0:
        code = tl.load(codes + slot, mask=inside, other=0)
        tl.store(divisor + place, _divisor(below, code, value, power, damping, n, most_parts, EPS), mask=live)
    lane = tl.load(lanes + slot, mask=inside, other=0).to(tl.float32)
    left = tl.load(acc + place, mask=live, other=0.0)
    left = tl.where(lane != 0, left - lane * unit, left)
    checked = given.to(tl.float32)
    if NARROW:
        sent = checked
        if SCALED:
            sent = tl.div_rn(checked, tl.load(scale))
        left = left + (value - sent)
        checked = value
    tl.store(acc + place, left, mask=live)
    if tl.sum((inside & ((tl.abs(checked) < float("inf")) == 0)).to(tl.int32)) > 0:
        tl.store(void, 1)


class Beside(NamedTuple):
    """What travels beside values, and what becomes of it."""

    second: Tensor
    """(numel + 1,) float32 second values of this rank."""
    low: int
    """Bits for them."""
    wide: bool
    """Whether each coordinate has a word of its own."""
    parts: int
    """Largest second value of a rank, in parts of the largest one that was told."""
    offset: float
    """Added before second values are rounded down, in [0, 1); each rank has its own."""
    power: Tensor
    """() float64 ``beta2^t``."""
    divisor: Tensor
    """(numel + 1,) float32, written to where averages arrive."""
    eps: float
    damping: float
    """What averages are multiplied by before their squares are added."""


class Rounded(NamedTuple):
    """A rank's values at the union."""

    words: Tensor
    """int32, ((u + 1) // 2,) pairs of integers or (u,) integers, to be added up over ranks."""
    lanes: Tensor
    """(u,) int16 the integers of values."""
    units: Tensor
    """(u,) float32 what they are multiples of."""


def round_to_lanes(
    acc: Tensor, indices: Tensor, levels: Tensor, lowest: Tensor, most: int, n: int, beside: Beside | None = None
) -> Rounded:
    """Values at coordinates as integers of a power of two each.

    Args:
        acc: (numel + 1,) float32.
        indices: (u,) int64 up to numel.
        levels: (u,) int32 largest level that was told; or (2, u), levels and codes.
        lowest: as :func:`hear` has left it.
        most: largest integer.
        n: number of ranks.
        beside: second values, where there are codes.
    """
    slots = indices.numel()
    low, wide, parts = (0, False, 0) if beside is None else (beside.low, beside.wide, beside.parts)
    words = levels.new_empty(slots if wide else (slots + 1) // 2)
    lanes, units = levels.new_empty(slots, dtype=torch.int16), acc.new_empty(slots)
    second, offset = (acc, 0.0) if beside is None else (beside.second, beside.offset)
    raise_by = max(0, most.bit_length() - 7)
    launch(
        _round, -(-words.numel() // PICKS), acc, second, indices, levels, lowest, words, lanes, units, slots, most,
        raise_by, n, parts, offset, LOW=low, WIDE=wide, RANKS=MOST_RANKS, PICKS=PICKS, warps=4,
    )  # fmt: skip
    return Rounded(words, lanes, units)


def settle_(
    acc: Tensor,
    grad: Tensor,
    indices: Tensor,
    total: Tensor,
    rounded: Rounded,
    trouble: Tensor,
    scale: Tensor | None,
    void: Tensor,
    n: int,
    codes: Tensor | None = None,
    beside: Beside | None = None,
) -> Tensor:
    """Put the average into the gradient, which is zero elsewhere, and leave in acc what did not travel.

    Args:
        acc: (numel + 1,) float32.
        grad: (numel,) or more, float32, bfloat16 or float16.
        indices: (u,) int64 different coordinates, and numel.
        total: sums of :attr:`Rounded.words` over ranks.
        rounded: of this rank.
        trouble: (1,) int32: 1 where some rank is in trouble; all averages are NaN then.
        scale: () float32 of the loss, or None.
        void: () uint8, set to 1 if an average is not finite.
        n: number of ranks.
        codes: (u,) int32 largest code that was told, where second values travel.
        beside: second values.

    Returns:
        (u,) float32 averages without the scale.
    """
    slots, values = indices.numel(), acc.new_empty(indices.numel())
    adam = (trouble, trouble, acc) if beside is None else (codes, beside.power, beside.divisor)
    low, wide, parts, eps, damping = (0, False, 0, 0.0, 1.0)
    if beside is not None:
        low, wide, parts, eps, damping = beside.low, beside.wide, beside.parts, beside.eps, beside.damping
    launch(
        _settle, -(-slots // PICKS), acc, grad, indices, total, rounded.lanes, rounded.units, trouble,
        trouble if scale is None else scale, values, void, *adam, slots, n, acc.numel() - 1, parts, damping,
        torch.finfo(grad.dtype).max, LOW=low, WIDE=wide, EPS=eps, SCALED=scale is not None,
        NARROW=grad.dtype != acc.dtype, PICKS=PICKS, warps=4,
    )  # fmt: skip
    return values
