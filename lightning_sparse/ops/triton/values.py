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
    acc, second, indices, levels, lowest, words, taken, units, slots, most, raise_by, n, most_parts, offset,
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
        tl.store(taken + slot, lane.to(tl.float32) * unit, mask=inside)
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
    """Return the divisor of an average, from the mean of second values, see :meth:`.SecondMoment._divisor`."""
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
def _average(
    grad, indices, words, units, trouble, scale, values, rounding, void, codes, power, divisor,
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
    tl.store(grad + place, given, mask=inside & (place < numel))
    handed = given.to(tl.float32)
    checked = handed
    if SCALED:
        handed = tl.div_rn(handed, tl.load(scale))
    tl.store(values + slot, handed, mask=inside)
    if NARROW:
        tl.store(rounding + slot, value - handed, mask=inside)
        checked = value
    if LOW > 0:
        code = tl.load(codes + slot, mask=inside, other=0)
        tl.store(divisor + slot, _divisor(below, code, value, power, damping, n, most_parts, EPS), mask=inside)
    if tl.sum((inside & ((tl.abs(checked) < float("inf")) == 0)).to(tl.int32)) > 0:
        tl.store(void, 1)


@triton.jit(do_not_specialize=["slots", "numel"])
def _subtract_at(
    x, indices, values, skipped, slots, numel,
    EMPTY: tl.constexpr, DECIDED: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    live = slot < slots
    if not DECIDED:
        live &= tl.load(skipped) == 0
    place = tl.load(indices + slot, mask=live, other=0)
    live &= place < numel
    if EMPTY:
        tl.store(x + place, tl.zeros((PICKS,), x.dtype.element_ty), mask=live)
    else:
        before = tl.load(indices + slot - 1, mask=live & (slot > 0), other=-1)
        value = tl.load(values + slot, mask=live, other=0.0)
        live &= (place != before) & (value != 0)
        left = tl.load(x + place, mask=live, other=0.0)
        tl.store(x + place, left - value, mask=live)


class Beside(NamedTuple):
    """The second values that travel beside values, and their use."""

    second: Tensor
    """(numel + 1,) float32 second values of this rank."""
    low: int
    """Bits for them."""
    wide: bool
    """True if each coordinate has a word of its own."""
    parts: int
    """Largest second value of a rank, in parts of the largest one that was told."""
    offset: float
    """Added before second values are rounded down, in [0, 1); each rank has its own."""
    power: Tensor
    """() float64 ``beta2^t``."""
    eps: float
    damping: float
    """The factor of averages before their squares are added."""


class Rounded(NamedTuple):
    """A rank's values at the union."""

    words: Tensor
    """int32, ((u + 1) // 2,) pairs of integers or (u,) integers, to be added up over ranks."""
    taken: Tensor
    """(u,) float32 what of the values they stand for."""
    units: Tensor
    """(u,) float32 what that is a multiple of."""


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
    taken, units = acc.new_empty(slots), acc.new_empty(slots)
    second, offset = (acc, 0.0) if beside is None else (beside.second, beside.offset)
    raise_by = max(0, most.bit_length() - 7)
    launch(
        _round, -(-words.numel() // PICKS), acc, second, indices, levels, lowest, words, taken, units, slots, most,
        raise_by, n, parts, offset, LOW=low, WIDE=wide, RANKS=MOST_RANKS, PICKS=PICKS, warps=4,
    )  # fmt: skip
    return Rounded(words, taken, units)


class Average(NamedTuple):
    """Averages at the union, which are in the gradient, too."""

    values: Tensor
    """(u,) float32 what the gradient got, without the scale."""
    rounding: Tensor | None
    """(u,) float32 what the gradient's dtype has lost; None: nothing."""
    divisor: Tensor | None
    """(u,) float32 what averages are divided by, where second values travel."""


def average_(
    grad: Tensor,
    indices: Tensor,
    total: Tensor,
    rounded: Rounded,
    trouble: Tensor,
    scale: Tensor | None,
    void: Tensor,
    n: int,
    numel: int,
    codes: Tensor | None = None,
    beside: Beside | None = None,
) -> Average:
    """Put the average into the gradient, which is zero elsewhere.

    Args:
        grad: (numel,) or more, float32, bfloat16 or float16.
        indices: (u,) int64 different coordinates, and numel.
        total: sums of :attr:`Rounded.words` over ranks.
        rounded: of this rank.
        trouble: (1,) int32: 1 where some rank is in trouble; all averages are NaN then.
        scale: () float32 of the loss, or None.
        void: () uint8, set to 1 if an average is not finite.
        n: number of ranks.
        numel: length of the group.
        codes: (u,) int32 largest code that was told, where second values travel.
        beside: second values.
    """
    units, narrow = rounded.units, grad.dtype != torch.float32
    slots, values = indices.numel(), torch.empty_like(units)
    rounding = torch.empty_like(units) if narrow else None
    divisor = None if beside is None else torch.empty_like(units)
    adam = (trouble, trouble, units) if beside is None else (codes, beside.power, divisor)
    low, wide, parts, eps, damping = (0, False, 0, 0.0, 1.0)
    if beside is not None:
        low, wide, parts, eps, damping = beside.low, beside.wide, beside.parts, beside.eps, beside.damping
    launch(
        _average, -(-slots // PICKS), grad, indices, total, units, trouble, trouble if scale is None else scale,
        values, values if rounding is None else rounding, void, *adam, slots, n, numel, parts, damping,
        torch.finfo(grad.dtype).max, LOW=low, WIDE=wide, EPS=eps, SCALED=scale is not None, NARROW=narrow,
        PICKS=PICKS, warps=4,
    )  # fmt: skip
    return Average(values, rounding, divisor)


def subtract_at_(x: Tensor, indices: Tensor, values: Tensor | None, skipped: Tensor | None) -> None:
    """Do the work of :func:`.on_device.subtract_at_`, which says it in words."""
    slots = indices.numel()
    launch(
        _subtract_at, -(-slots // PICKS), x, indices, x if values is None else values,
        x if skipped is None else skipped, slots, x.numel() - 1, EMPTY=values is None, DECIDED=skipped is None,
        PICKS=PICKS, warps=4,
    )  # fmt: skip
