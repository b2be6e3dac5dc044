"""The messages of ``packed_union``: what a rank tells of its picks, and its values as integers of 16 or 32 bits.

The meaning of the numbers is said in :mod:`~lightning_sparse.methods.exchanges.packed_union`, whose tensor operations
give the same messages and the same averages, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.core.step import Context, Selection
from lightning_sparse.ops import form as layout
from lightning_sparse.ops.form import Form, Lanes, Met, Rounded
from lightning_sparse.ops.triton.launch import PICKS, PROGRAMS, Share, bitmap_words, launch
from lightning_sparse.ops.triton.select import _ones
from lightning_sparse.ops.triton.union import Bitmap, _set, listed, raise_levels_

LOWEST, SILENT, TROUBLE = (tl.constexpr(level) for level in (layout.LOWEST, layout.SILENT, layout.TROUBLE))
LEVELS_END = tl.constexpr(layout.TROUBLE + 1)
MARKS, CODE_ZERO = tl.constexpr(layout.MARKS), tl.constexpr(layout.CODE_ZERO)
CLASSES, CLASS_BITS = tl.constexpr(layout.CLASSES), tl.constexpr(layout.CLASS_BITS)
OFFSETS = ["slots", "bits", "octets", "nibbles", "classes", "seconds"]
"""Arguments of kernels, of these names in :class:`.Form`."""
WORDS = 4096
"""Words of marks that a program goes through at once."""
MOST_RANKS = 512
"""Ranks that a program of :func:`_round` looks at, and more where there are more."""


@triton.jit
def _exponent(x):
    """Of x > 0: e with ``x = m 2**e`` and m in [0.5, 1); and the bits of m behind the first."""
    small = x < 1.1754943508222875e-38
    bits = tl.where(small, x * 16777216.0, x).to(tl.int32, bitcast=True)
    return (bits >> 23) - 126 - tl.where(small, 24, 0), bits & 0x7FFFFF


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
def _code(second):
    """Of the power of two above a second value."""
    exponent, _ = _exponent(second)
    return tl.minimum(tl.maximum(tl.where(second > 0, exponent + CODE_ZERO, 1), 1), 255)


@triton.jit
def _power_of_two(level):
    """The step that a level stands for, none of them subnormal."""
    return (tl.minimum(tl.maximum(level + (LOWEST + 127), 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _top(code):
    """Twice the power of two that a code stands for, not subnormal."""
    return (tl.minimum(tl.maximum(code, 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["slots"])
def _largest(acc, indices, largest, slots, PICKS: tl.constexpr):
    """Bits of the largest magnitude that each program finds among the picks."""
    pid = tl.program_id(0)
    most = tl.zeros((PICKS,), tl.int32)
    for start in range(pid * PICKS, slots, tl.num_programs(0) * PICKS):
        slot = start + tl.arange(0, PICKS)
        place = tl.load(indices + slot, mask=slot < slots, other=0)
        value = tl.load(acc + place, mask=slot < slots, other=0.0)
        most = tl.maximum(most, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(largest + pid, tl.max(most))


@triton.jit(do_not_specialize=["parts", *OFFSETS, "filled", "apart", "most", "numel"])
def _tell(
    acc, beside, indices, spares, number, largest, finite, message,
    parts, slots, bits, octets, nibbles, classes, seconds, filled, apart, most, numel,
    CODES: tl.constexpr, SPARES: tl.constexpr, PICKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    part = tl.arange(0, PARTS)
    top_bits = tl.max(tl.load(largest + part, mask=part < parts, other=0))
    top = top_bits.to(tl.float32, bitcast=True)
    top_exponent, top_mantissa = _exponent(top)
    if pid == 0:
        step = tl.div_rn(top, most.to(tl.float32))
        exponent, mantissa = _exponent(step)
        level = tl.where(step > 0, exponent - (mantissa == 0).to(tl.int32) - LOWEST, SILENT)
        trouble = (tl.load(finite) == 0) | (top_bits >= 0x7F800000)
        tl.store(message, tl.load(number).to(tl.int32))
        tl.store(message + 1, tl.where(trouble, TROUBLE, level))
        for word in range(filled, apart):
            tl.store(message + word, 0)
    # A mark is set where a pick's upper bits and its number add up to the place, which grows from pick to pick.
    lane = tl.arange(0, 32)
    for start in range(pid * (PICKS // 32), octets - MARKS, tl.num_programs(0) * (PICKS // 32)):
        row = start + tl.arange(0, PICKS // 32)
        mark = row[:, None] * 32 + lane[None, :]
        low = tl.zeros((PICKS // 32, 32), tl.int32)
        high = low + slots
        width = slots
        while width > 0:
            middle = (low + high) >> 1
            open_ = low < high
            less = open_ & ((tl.load(indices + middle, mask=open_, other=0).to(tl.int32) >> bits) + middle < mark)
            high = tl.where(open_ & (less == 0), middle, high)
            low = tl.where(less, middle + 1, low)
            width = width >> 1
        found = low < slots
        found &= (tl.load(indices + low, mask=found, other=0).to(tl.int32) >> bits) + low == mark
        tl.store(message + MARKS + row, tl.sum(found.to(tl.int32) << lane[None, :], axis=1), mask=row < octets - MARKS)
    four = tl.arange(0, 4)
    row = pid * (PICKS // 4) + tl.arange(0, PICKS // 4)
    slot = row[:, None] * 4 + four[None, :]
    octet = tl.load(indices + slot, mask=slot < slots, other=0).to(tl.int32) & 255
    tl.store(message + octets + row, tl.sum(octet << (8 * four)[None, :], axis=1), mask=row * 4 < slots)
    eight = tl.arange(0, 8)
    row = pid * (PICKS // 8) + tl.arange(0, PICKS // 8)
    slot = row[:, None] * 8 + eight[None, :]
    inside = slot < slots
    place = tl.load(indices + slot, mask=inside, other=0).to(tl.int32)
    plane = message + nibbles
    for shift in range(8, bits, 4):
        nibble = (place >> shift) & 15
        tl.store(plane + row, tl.sum(nibble << (4 * eight)[None, :], axis=1), mask=row * 8 < slots)
        plane += (slots + 7) // 8
    magnitude = tl.abs(tl.load(acc + place, mask=inside, other=0.0))
    exponent, mantissa = _exponent(magnitude)
    halvings = top_exponent - exponent - (mantissa > top_mantissa).to(tl.int32)
    halvings = tl.where(magnitude > 0, halvings, tl.where(top > 0, CLASSES * CLASS_BITS, 0))
    told = tl.minimum(tl.maximum(halvings, 0) // CLASS_BITS, CLASSES - 1)
    if SPARES:
        told |= (tl.load(spares + slot, mask=inside, other=0) != 0).to(tl.int32) * CLASSES
    told = tl.where(inside, told, 0)
    tl.store(message + classes + row, tl.sum(told << (4 * eight)[None, :], axis=1), mask=row * 8 < slots)
    if CODES:
        row = pid * (PICKS // 4) + tl.arange(0, PICKS // 4)
        slot = row[:, None] * 4 + four[None, :]
        place = tl.load(indices + slot, mask=slot < slots, other=0)
        code = _code(tl.load(beside + place, mask=slot < slots, other=0.0))
        code = tl.where(slot < slots, code, 0)
        tl.store(message + seconds + row, tl.sum(code << (8 * four)[None, :], axis=1), mask=row * 4 < slots)


@triton.jit(do_not_specialize=["octets", "apart"])
def _count_marks(rows, until, octets, apart, WORDS: tl.constexpr):
    """Count the marks before each word, by a program for each rank."""
    rank = tl.program_id(0)
    count = 0
    for start in range(0, octets - MARKS, WORDS):
        word = start + tl.arange(0, WORDS)
        inside = word < octets - MARKS
        ones = _ones(tl.load(rows + rank.to(tl.int64) * apart + MARKS + word, mask=inside, other=0))
        tl.store(until + rank.to(tl.int64) * (octets - MARKS) + word, count + tl.cumsum(ones) - ones, mask=inside)
        count += tl.sum(ones)


@triton.jit(do_not_specialize=[*OFFSETS, "apart", "tiles", "block", "numel"])
def _hear(
    rows, until, words, counts, first_words, first_counts, lowest, trouble, places, levels, numbers,
    slots, bits, octets, nibbles, classes, seconds, apart, tiles, block, numel,
    CODES: tl.constexpr, SPARES: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    own = rows + rank.to(tl.int64) * apart
    number = tl.load(own)
    top = tl.load(own + 1)
    if tile == 0:
        tl.store(numbers + rank, number.to(tl.int64))
        if top == TROUBLE:
            tl.store(trouble, 1)
    slot = tile * PICKS + tl.arange(0, PICKS)
    inside = slot < slots
    # The last word before which there are at most as many marks as slots before this one, and the mark within it.
    before = until + rank.to(tl.int64) * (octets - MARKS)
    low = tl.zeros((PICKS,), tl.int32)
    high = low + (octets - MARKS - 1)
    span = octets - MARKS
    while span > 0:
        middle = (low + high + 1) >> 1
        open_ = inside & (low < high)
        passed = open_ & (tl.load(before + middle, mask=open_, other=0) <= slot)
        high = tl.where(open_ & (passed == 0), middle - 1, high)
        low = tl.where(passed, middle, low)
        span = span >> 1
    word = tl.load(own + MARKS + low, mask=inside, other=0)
    left = slot - tl.load(before + low, mask=inside, other=0)
    bit = tl.zeros((PICKS,), tl.int32)
    for half in tl.static_range(5):
        here = _ones((word >> bit) & ((1 << (16 >> half)) - 1))
        beyond = left >= here
        left -= tl.where(beyond, here, 0)
        bit += tl.where(beyond, 16 >> half, 0)
    place = (low * 32 + bit - slot) << bits
    place |= (tl.load(own + octets + (slot >> 2), mask=inside, other=0) >> (8 * (slot & 3))) & 255
    plane = own + nibbles
    for shift in range(8, bits, 4):
        place |= ((tl.load(plane + (slot >> 3), mask=inside, other=0) >> (4 * (slot & 7))) & 15) << shift
        plane += (slots + 7) // 8
    place = tl.where((place < 0) | (place > numel), numel, place)
    told = (tl.load(own + classes + (slot >> 3), mask=inside, other=0) >> (4 * (slot & 7))) & 15
    level = tl.maximum(top - (told & (CLASSES - 1)) * CLASS_BITS, SILENT)
    tl.store(places + rank * slots + slot, place, mask=inside)
    said = level
    if CODES:
        codes = tl.load(own + seconds + (slot >> 2), mask=inside, other=0)
        said = (level << 8) | ((codes >> (8 * (slot & 3))) & 255)
    tl.store(levels + rank * slots + slot, said, mask=inside)
    reached = tl.min(tl.where(inside & (slot < number), level, top))
    tl.atomic_max(lowest + rank, -reached + LEVELS_END, sem="relaxed")
    live = inside & (place < numel)
    _set(words, counts, place, live, block)
    if SPARES:
        _set(first_words, first_counts, place, live & (told < CLASSES), block)


@triton.jit(do_not_specialize=["slots", "most", "raise_by", "n", "most_parts"])
def _round(
    acc, second, indices, levels, codes, lowest, words, taken, units, slots, most, raise_by, n, most_parts, offset,
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
            top = _top(tl.load(codes + slot, mask=inside, other=0))
            share = tl.div_rn(tl.load(second + place, mask=inside, other=0.0), top)
            share = share * most_parts.to(tl.float32) + offset
            share = tl.where(share > 0, tl.minimum(share, most_parts.to(tl.float32)), 0.0)  # NaN becomes 0
            lane = (lane << LOW) + share.to(tl.int32)  # rounded down
        if odd == 0:
            first = lane
        else:
            other = tl.where(inside, lane, 0)
    tl.store(words + word, first if WIDE else _join(first, other), mask=EACH * word < slots)


@triton.jit(do_not_specialize=["slots", "n", "most_parts"])
def _average(
    words, units, codes, trouble, values, second, slots, n, most_parts,
    LOW: tl.constexpr, WIDE: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    """Means of values, and with LOW > 0 of second values, from the sums of words."""
    slot = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    inside = slot < slots
    unit = tl.load(units + slot, mask=inside, other=1.0)
    if WIDE:
        total = tl.load(words + slot, mask=inside, other=0)
    else:
        total = _part(tl.load(words + (slot >> 1), mask=inside, other=0), (slot & 1) != 0)
    if LOW > 0:
        top = _top(tl.load(codes + slot, mask=inside, other=0))
        part = tl.div_rn(top, (n * most_parts).to(tl.float32))
        fewest = tl.div_rn(top, (4 * n).to(tl.float32))
        mean = (total & ((1 << LOW) - 1)).to(tl.float32) * part
        tl.store(second + slot, tl.where(mean > fewest, mean, fewest), mask=inside)
    value = tl.div_rn((total >> LOW).to(tl.float32) * unit, n.to(tl.float32))
    tl.store(values + slot, tl.where(tl.load(trouble) != 0, float("nan"), value), mask=inside)


def _offsets(form: Form) -> list[int]:
    return [getattr(form, name) for name in OFFSETS]


class Packed:
    """The work of ``packed_union`` on a device, in kernels, see :class:`.packed_union.Plain`."""

    def tell(self, acc: Tensor, selection: Selection, most: int, form: Form, ctx: Context) -> Tensor:
        """Write this rank's message, in two launches: accumulators of float32, coordinates that ascend."""
        indices, spare, second = selection.indices, selection.spare, ctx.second
        finite = torch.ones_like(selection.count, dtype=torch.bool) if ctx.finite is None else ctx.finite
        message = indices.new_empty(form.width, dtype=torch.int32)
        tiles = max(1, -(-form.slots // PICKS))
        largest = message.new_empty(min(tiles, PROGRAMS))
        launch(_largest, largest.numel(), acc, indices, largest, form.slots, PICKS=PICKS, warps=4)
        launch(
            _tell, tiles, acc, acc if second is None else second, indices, indices if spare is None else spare,
            selection.count, largest, finite, message, largest.numel(), *_offsets(form), form.filled, form.width, most,
            form.numel,
            CODES=form.codes, SPARES=spare is not None, PICKS=PICKS, PARTS=PROGRAMS, warps=4,
        )  # fmt: skip
        return message

    def meet(self, rows: Tensor, selection: Selection, form: Form, ctx: Context) -> Met:
        """Read the messages of all ranks, and unite what they name, in four launches and one that empties bitmaps."""
        n, tiles, spares = len(rows), -(-form.slots // PICKS), selection.spare is not None
        size = bitmap_words(form.numel)
        sizes = [1, n, size, PROGRAMS, *([size, PROGRAMS] if spares else [])]
        trouble, lowest, *marks = torch.split_with_sizes(rows.new_zeros(sum(sizes)), sizes)
        named, first = Bitmap(*marks[:2]), Bitmap(*marks[-2:])
        places, told = rows.new_empty((2, n * form.slots))
        numbers = rows.new_empty(n, dtype=torch.int64)
        until = rows.new_empty((n, form.octets - layout.MARKS))
        launch(_count_marks, n, rows, until, form.octets, rows.stride(0), WORDS=WORDS)
        launch(
            _hear, n * tiles, rows, until, *named, *first, lowest, trouble, places, told, numbers, *_offsets(form),
            rows.stride(0), tiles, Share.of(form.numel).block, form.numel,
            CODES=form.codes, SPARES=spares, PICKS=PICKS, warps=4,
        )  # fmt: skip
        slots, limit = n * form.slots, selection.limit
        if limit is None or limit >= slots:
            limit = min(slots, selection.total or slots)
        levels = rows.new_empty((2, limit) if form.codes else limit)
        indices, sizes_of = listed(named, form.numel, limit, ctx.step, first if spares else None, levels)
        raise_levels_(levels, indices, places, told, form.numel)
        of_values, tops = levels.unbind() if form.codes else (levels, None)
        how_many, union = sizes_of.unbind()
        return Met(indices, of_values, lowest, tops, trouble, numbers, union, how_many)

    def round(self, acc: Tensor, met: Met, lanes: Lanes, ctx: Context) -> Rounded:
        """Round values to integers of a power of two each, in one launch."""
        slots, n, second = met.indices.numel(), ctx.world_size, ctx.second
        words = met.levels.new_empty(slots if lanes.wide else (slots + 1) // 2)
        taken, units = acc.new_empty(slots), acc.new_empty(slots)
        launch(
            _round, -(-words.numel() // PICKS), acc, acc if second is None else second, met.indices, met.levels,
            met.levels if met.tops is None else met.tops, met.lowest, words, taken, units, slots, lanes.most,
            lanes.most_raised, n, lanes.parts, (ctx.rank + 0.5) / n,
            LOW=lanes.low, WIDE=lanes.wide, RANKS=max(MOST_RANKS, triton.next_power_of_2(n)), PICKS=PICKS, warps=4,
        )  # fmt: skip
        return Rounded(words, units, met.indices, taken)

    def average(self, words: Tensor, made: Rounded, met: Met, lanes: Lanes, n: int) -> tuple[Tensor, Tensor | None]:
        """Return the means of values and of second values, in one launch."""
        units, values = made.units, torch.empty_like(made.units)
        second = None if met.tops is None else torch.empty_like(units)
        launch(
            _average, -(-units.numel() // PICKS), words, units, words if met.tops is None else met.tops, met.trouble,
            values, values if second is None else second, units.numel(), n, lanes.parts,
            LOW=lanes.low, WIDE=lanes.wide, PICKS=PICKS, warps=4,
        )  # fmt: skip
        return values, second
