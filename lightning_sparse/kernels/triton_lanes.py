"""The messages of ``packed_union``: what a rank tells of its picks, and its values as 16-bit integers.

What the numbers mean is said in :mod:`~lightning_sparse.exchanges.packed_union`, whose tensor operations give the same
messages and the same averages, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.kernels.triton_launch import Share, launch
from lightning_sparse.kernels.triton_union import PICKS, Bitmap, _set

LOWEST, TROUBLE = tl.constexpr(-1100), tl.constexpr((1 << 20) - 1)
LEVELS_END = tl.constexpr(1 << 20)
SILENT = tl.constexpr(0)
MOST_RANKS = 512
"""Ranks that a program adds up at once."""


@triton.jit
def _exponent(x):
    """Of x > 0: e with ``x = m 2**e`` and m in [0.5, 1); and the bits of m behind the first."""
    small = x < 1.1754943508222875e-38
    bits = tl.where(small, x * 16777216.0, x).to(tl.int32, bitcast=True)
    return (bits >> 23) - 126 - tl.where(small, 24, 0), bits & 0x7FFFFF


@triton.jit
def _power_of_two(level):
    """The step that a level stands for, none of them subnormal."""
    return (tl.minimum(tl.maximum(level + (LOWEST + 127), 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _join(low, high):
    """Two 16-bit integers in a word, which is ``low + 65536 high``."""
    return ((high - (low < 0).to(tl.int32)) << 16) | (low & 0xFFFF)


@triton.jit
def _part(word, odd):
    """The low or the high integer of a word."""
    low = ((word & 0xFFFF) ^ 0x8000) - 0x8000
    high = ((((word >> 16) + (low < 0).to(tl.int32)) & 0xFFFF) ^ 0x8000) - 0x8000
    return tl.where(odd, high, low)


@triton.jit
def _signed(offset):
    """16 bits as an integer with a sign."""
    return ((offset & 0xFFFF) ^ 0x8000) - 0x8000


@triton.jit(do_not_specialize=["parts", "slots", "blocks", "most", "numel"])
def _tell(
    acc, keys, number, largest, broken, message, parts, slots, blocks, most, numel,
    SHORT: tl.constexpr, PICKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    part = tl.arange(0, PARTS)
    top_bits = tl.max(tl.load(largest + part, mask=part < parts, other=0))
    top = top_bits.to(tl.float32, bitcast=True)
    top_exponent, top_mantissa = _exponent(top)
    body = (blocks + (slots + 1) // 2) if SHORT else slots
    if pid == 0:
        step = tl.div_rn(top, most.to(tl.float32))
        exponent, mantissa = _exponent(step)
        level = tl.where(step > 0, exponent - (mantissa == 0).to(tl.int32) - LOWEST, SILENT)
        trouble = (tl.load(broken) != 0) | (top_bits >= 0x7F800000)
        tl.store(message, tl.load(number).to(tl.int32))
        tl.store(message + 1, tl.where(trouble, TROUBLE, level))
    if SHORT:
        # Before which slot each block ends: the number of picks below the first coordinate of the next one.
        for start in range(pid * PICKS, blocks, tl.num_programs(0) * PICKS):
            block = start + tl.arange(0, PICKS)
            below = (block + 1) * 65536
            low = tl.zeros((PICKS,), tl.int32)
            high = low + slots
            width = slots
            while width > 0:
                middle = (low + high) >> 1
                open_ = (low < high) & (block < blocks)
                less = open_ & ((tl.load(keys + middle, mask=open_, other=0) >> 1) < below)
                high = tl.where(open_ & (less == 0), middle, high)
                low = tl.where(less, middle + 1, low)
                width = width >> 1
            tl.store(message + 2 + block, low, mask=block < blocks)
        pair = pid * (PICKS // 2) + tl.arange(0, PICKS // 2)
        first = tl.load(keys + 2 * pair, mask=2 * pair < slots, other=0) >> 1
        second = tl.load(keys + 2 * pair + 1, mask=2 * pair + 1 < slots, other=0) >> 1
        tl.store(message + 2 + blocks + pair, _join(_signed(first), _signed(second)), mask=2 * pair < slots)
    else:
        slot = pid * PICKS + tl.arange(0, PICKS)
        tl.store(message + 2 + slot, tl.load(keys + slot, mask=slot < slots, other=0) >> 1, mask=slot < slots)
    eight = tl.arange(0, 8)
    row = pid * (PICKS // 8) + tl.arange(0, PICKS // 8)
    slot = row[:, None] * 8 + eight[None, :]
    inside = slot < slots
    key = tl.load(keys + slot, mask=inside, other=0)
    magnitude = tl.abs(tl.load(acc + (key >> 1), mask=inside, other=0.0))
    exponent, mantissa = _exponent(magnitude)
    halvings = top_exponent - exponent - (mantissa > top_mantissa).to(tl.int32)
    halvings = tl.where(magnitude > 0, halvings, tl.where(top > 0, 24, 0))
    told = tl.minimum(tl.maximum(halvings, 0) // 3, 7) | ((key & 1) << 3)
    told = tl.where(inside, told, 0)
    tl.store(message + 2 + body + row, tl.sum(told << (4 * eight)[None, :], axis=1), mask=row * 8 < slots)


@triton.jit(do_not_specialize=["slots", "blocks", "width", "tiles", "block", "numel"])
def _hear(
    rows, words, counts, first_words, first_counts, lowest, trouble, places, levels, numbers,
    slots, blocks, width, tiles, block, numel,
    SHORT: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    own = rows + rank.to(tl.int64) * width
    number = tl.load(own)
    top = tl.load(own + 1)
    if tile == 0:
        tl.store(numbers + rank, number.to(tl.int64))
        if top == TROUBLE:
            tl.store(trouble, 1)
    slot = tile * PICKS + tl.arange(0, PICKS)
    inside = slot < slots
    body = (blocks + (slots + 1) // 2) if SHORT else slots
    if SHORT:
        low = tl.zeros((PICKS,), tl.int32)
        high = low + blocks
        span = blocks
        while span > 0:
            middle = (low + high) >> 1
            open_ = inside & (low < high)
            passed = open_ & (tl.load(own + 2 + middle, mask=open_, other=0) <= slot)
            high = tl.where(open_ & (passed == 0), middle, high)
            low = tl.where(passed, middle + 1, low)
            span = span >> 1
        word = tl.load(own + 2 + blocks + (slot >> 1), mask=inside, other=0)
        offset = _part(word, (slot & 1) != 0) & 0xFFFF
        place = tl.where(low >= blocks, numel, tl.minimum(low * 65536 + offset, numel))
    else:
        place = tl.load(own + 2 + slot, mask=inside, other=0)
    nibbles = tl.load(own + 2 + body + (slot >> 3), mask=inside, other=0)
    told = (nibbles >> (4 * (slot & 7))) & 15
    level = tl.maximum(top - (told & 7) * 3, SILENT)
    tl.store(places + rank * slots + slot, place, mask=inside)
    tl.store(levels + rank * slots + slot, level, mask=inside)
    reached = tl.min(tl.where(inside & (slot < number), level, top))
    tl.atomic_max(lowest + rank, LEVELS_END - reached)
    live = inside & (place < numel)
    _set(words, counts, place, live, block)
    _set(first_words, first_counts, place, live & (told < 8), block)


@triton.jit(do_not_specialize=["slots", "most", "raise_by", "n"])
def _round(
    acc, indices, levels, lowest, words, lanes, units, slots, most, raise_by, n,
    RANKS: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    rank = tl.arange(0, RANKS)
    reach = tl.max(tl.where(rank < n, LEVELS_END - tl.load(lowest + rank, mask=rank < n, other=0), 0))
    pair = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    limit = most.to(tl.float32)
    low = tl.zeros((PICKS,), tl.int32)
    high = low
    for odd in tl.static_range(2):
        slot = 2 * pair + odd
        inside = slot < slots
        level = tl.load(levels + slot, mask=inside, other=0)
        raised = tl.where(level == SILENT, TROUBLE, level) + raise_by
        unit = _power_of_two(tl.maximum(level, tl.minimum(raised, reach)))
        parts = tl.div_rn(tl.load(acc + tl.load(indices + slot, mask=inside, other=0), mask=inside, other=0.0), unit)
        parts = tl.where(parts > limit, limit, tl.where(parts < -limit, -limit, parts))
        # To the nearest integer, of two the even one: behind the point of 1.5 * 2**23 there is nothing left.
        lane = tl.where(parts == parts, (parts + 12582912.0) - 12582912.0, 0.0).to(tl.int32)
        tl.store(lanes + slot, lane.to(tl.int16), mask=inside)
        tl.store(units + slot, unit, mask=inside)
        if odd == 0:
            low = lane
        else:
            high = tl.where(inside, lane, 0)
    tl.store(words + pair, _join(low, high), mask=2 * pair < slots)


@triton.jit(do_not_specialize=["slots", "n", "numel"])
def _settle(
    acc, grad, indices, words, lanes, units, trouble, scale, values, void, slots, n, numel, largest,
    SCALED: tl.constexpr, NARROW: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    inside = slot < slots
    place = tl.load(indices + slot, mask=inside, other=0)
    unit = tl.load(units + slot, mask=inside, other=1.0)
    total = _part(tl.load(words + (slot >> 1), mask=inside, other=0), (slot & 1) != 0)
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


class Form(NamedTuple):
    """How long the parts of a rank's message are."""

    numel: int
    slots: int
    """Picks of a rank, or slots for them."""
    blocks: int
    """Blocks of 65 536 coordinates."""
    short: bool
    """Whether coordinates travel as 16-bit offsets in blocks."""

    @classmethod
    def of(cls, numel: int, slots: int) -> Form:
        """For a group."""
        blocks = -(-numel // 65536)
        return cls(numel, slots, blocks, blocks + (slots + 1) // 2 < slots)

    @property
    def width(self) -> int:
        """Words of a message."""
        body = self.blocks + (self.slots + 1) // 2 if self.short else self.slots
        return 2 + body + -(-self.slots // 8)


def tell(acc: Tensor, keys: Tensor, number: Tensor, largest: Tensor, broken: Tensor, form: Form, most: int) -> Tensor:
    """A rank's message: how many picks, how large the largest is, where they are and how large.

    Args:
        acc: (numel + 1,) float32.
        keys: (slots,) int32 picks, ``2 j`` or ``2 j + 1``, then ``2 numel``.
        number: () int64.
        largest: (p,) int32 bits of magnitudes, the largest of them that of the largest pick.
        broken: (1,) int32: 1 if the rank is in trouble.
        form: of the message.
        most: largest integer that a value becomes.

    Returns:
        (:attr:`Form.width`,) int32.
    """
    message = keys.new_empty(form.width)
    launch(
        _tell, max(1, -(-form.slots // PICKS)), acc, keys, number, largest, broken, message, largest.numel(),
        form.slots, form.blocks, most, form.numel, SHORT=form.short, PICKS=PICKS, PARTS=1024, warps=4,
    )  # fmt: skip
    return message


class Heard(NamedTuple):
    """What the messages of all ranks say."""

    places: Tensor
    """(n slots,) int32 coordinates, and numel."""
    levels: Tensor
    """(n slots,) int32 levels."""
    numbers: Tensor
    """(n,) int64 picks of each rank."""


def hear(rows: Tensor, form: Form, named: Bitmap, first: Bitmap, lowest: Tensor, trouble: Tensor) -> Heard:
    """Read the messages of all ranks, and mark what they name.

    Args:
        rows: (n, :attr:`Form.width`) int32.
        form: of the messages.
        named: bits are set for all picks.
        first: bits are set for those that are not spare.
        lowest: (n,) int32, 0 at the start: 2**20 less the lowest level of each rank.
        trouble: (1,) int32, set to 1 if a rank is in trouble.
    """
    n, tiles = len(rows), -(-form.slots // PICKS)
    places, levels = rows.new_empty((2, n * form.slots))
    numbers = rows.new_empty(n, dtype=torch.int64)
    launch(
        _hear, n * tiles, rows, named.words, named.counts, first.words, first.counts, lowest, trouble, places, levels,
        numbers, form.slots, form.blocks, form.width, tiles, Share.of(form.numel).block, form.numel,
        SHORT=form.short, PICKS=PICKS, warps=4,
    )  # fmt: skip
    return Heard(places, levels, numbers)


class Rounded(NamedTuple):
    """A rank's values at the union."""

    words: Tensor
    """((u + 1) // 2,) int32 pairs of integers, to be added up over ranks."""
    lanes: Tensor
    """(u,) int16 the same integers."""
    units: Tensor
    """(u,) float32 what they are multiples of."""


def round_to_lanes(acc: Tensor, indices: Tensor, levels: Tensor, lowest: Tensor, most: int, n: int) -> Rounded:
    """Values at coordinates as integers of a power of two each.

    Args:
        acc: (numel + 1,) float32.
        indices: (u,) int64 up to numel.
        levels: (u,) int32 largest level that was told.
        lowest: as :func:`hear` has left it.
        most: largest integer.
        n: number of ranks.
    """
    slots = indices.numel()
    words = levels.new_empty((slots + 1) // 2)
    lanes, units = levels.new_empty(slots, dtype=torch.int16), acc.new_empty(slots)
    raise_by = max(0, most.bit_length() - 7)
    launch(
        _round, -(-slots // (2 * PICKS)), acc, indices, levels, lowest, words, lanes, units, slots, most, raise_by, n,
        RANKS=MOST_RANKS, PICKS=PICKS, warps=4,
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

    Returns:
        (u,) float32 averages without the scale.
    """
    slots, values = indices.numel(), acc.new_empty(indices.numel())
    launch(
        _settle, -(-slots // PICKS), acc, grad, indices, total, rounded.lanes, rounded.units, trouble,
        trouble if scale is None else scale, values, void, slots, n, acc.numel() - 1, torch.finfo(grad.dtype).max,
        SCALED=scale is not None, NARROW=grad.dtype != acc.dtype, PICKS=PICKS, warps=4,
    )  # fmt: skip
    return values
