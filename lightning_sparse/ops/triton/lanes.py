"""The first messages of ``packed_union``: what a rank tells of its picks.

What the numbers mean is said in :mod:`~lightning_sparse.methods.exchanges.packed_union`, whose tensor operations give
the same messages, bit for bit. The values follow in :mod:`~lightning_sparse.ops.triton.values`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.form import Form
from lightning_sparse.ops.triton.launch import Share, launch
from lightning_sparse.ops.triton.select import _ones
from lightning_sparse.ops.triton.union import PICKS, Bitmap, _set

LOWEST, TROUBLE = tl.constexpr(-1100), tl.constexpr((1 << 20) - 1)
LEVELS_END = tl.constexpr(1 << 20)
SILENT = tl.constexpr(0)
CODE_ZERO = tl.constexpr(128)
WORDS = 4096
"""Words of marks that a program goes through at once."""


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


@triton.jit(do_not_specialize=["parts", "slots", "bits", "octets", "filled", "apart", "most", "numel"])
def _tell(
    acc, beside, keys, number, largest, broken, message, parts, slots, bits, octets, filled, apart, most, numel,
    CODES: tl.constexpr, PICKS: tl.constexpr, PARTS: tl.constexpr,
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
        trouble = (tl.load(broken) != 0) | (top_bits >= 0x7F800000)
        tl.store(message, tl.load(number).to(tl.int32))
        tl.store(message + 1, tl.where(trouble, TROUBLE, level))
        for word in range(filled, apart):
            tl.store(message + word, 0)
    # A mark is set where a pick's upper bits and its number add up to the place, which grows from pick to pick.
    lane = tl.arange(0, 32)
    for start in range(pid * (PICKS // 32), octets - 2, tl.num_programs(0) * (PICKS // 32)):
        row = start + tl.arange(0, PICKS // 32)
        mark = row[:, None] * 32 + lane[None, :]
        low = tl.zeros((PICKS // 32, 32), tl.int32)
        high = low + slots
        width = slots
        while width > 0:
            middle = (low + high) >> 1
            open_ = low < high
            less = open_ & ((tl.load(keys + middle, mask=open_, other=0) >> (1 + bits)) + middle < mark)
            high = tl.where(open_ & (less == 0), middle, high)
            low = tl.where(less, middle + 1, low)
            width = width >> 1
        found = low < slots
        found &= (tl.load(keys + low, mask=found, other=0) >> (1 + bits)) + low == mark
        tl.store(message + 2 + row, tl.sum(found.to(tl.int32) << lane[None, :], axis=1), mask=row < octets - 2)
    four = tl.arange(0, 4)
    row = pid * (PICKS // 4) + tl.arange(0, PICKS // 4)
    slot = row[:, None] * 4 + four[None, :]
    octet = (tl.load(keys + slot, mask=slot < slots, other=0) >> 1) & 255
    tl.store(message + octets + row, tl.sum(octet << (8 * four)[None, :], axis=1), mask=row * 4 < slots)
    eight = tl.arange(0, 8)
    row = pid * (PICKS // 8) + tl.arange(0, PICKS // 8)
    slot = row[:, None] * 8 + eight[None, :]
    inside = slot < slots
    key = tl.load(keys + slot, mask=inside, other=0)
    plane = message + octets + (slots + 3) // 4
    for shift in range(8, bits, 4):
        nibble = (key >> (1 + shift)) & 15
        tl.store(plane + row, tl.sum(nibble << (4 * eight)[None, :], axis=1), mask=row * 8 < slots)
        plane += (slots + 7) // 8
    magnitude = tl.abs(tl.load(acc + (key >> 1), mask=inside, other=0.0))
    exponent, mantissa = _exponent(magnitude)
    halvings = top_exponent - exponent - (mantissa > top_mantissa).to(tl.int32)
    halvings = tl.where(magnitude > 0, halvings, tl.where(top > 0, 24, 0))
    told = tl.minimum(tl.maximum(halvings, 0) // 3, 7) | ((key & 1) << 3)
    told = tl.where(inside, told, 0)
    tl.store(plane + row, tl.sum(told << (4 * eight)[None, :], axis=1), mask=row * 8 < slots)
    if CODES:
        row = pid * (PICKS // 4) + tl.arange(0, PICKS // 4)
        slot = row[:, None] * 4 + four[None, :]
        key = tl.load(keys + slot, mask=slot < slots, other=0)
        code = _code(tl.load(beside + (key >> 1), mask=slot < slots, other=0.0))
        code = tl.where(slot < slots, code, 0)
        end = plane + (slots + 7) // 8
        tl.store(end + row, tl.sum(code << (8 * four)[None, :], axis=1), mask=row * 4 < slots)


@triton.jit(do_not_specialize=["octets", "apart"])
def _count_marks(rows, until, octets, apart, WORDS: tl.constexpr):
    """Count the marks before each word, by a program for each rank."""
    rank = tl.program_id(0)
    count = 0
    for start in range(0, octets - 2, WORDS):
        word = start + tl.arange(0, WORDS)
        inside = word < octets - 2
        ones = _ones(tl.load(rows + rank.to(tl.int64) * apart + 2 + word, mask=inside, other=0))
        tl.store(until + rank.to(tl.int64) * (octets - 2) + word, count + tl.cumsum(ones) - ones, mask=inside)
        count += tl.sum(ones)


@triton.jit(do_not_specialize=["slots", "bits", "octets", "apart", "tiles", "block", "numel"])
def _hear(
    rows, until, words, counts, first_words, first_counts, lowest, trouble, places, levels, numbers,
    slots, bits, octets, apart, tiles, block, numel,
    CODES: tl.constexpr, PICKS: tl.constexpr,
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
    before = until + rank.to(tl.int64) * (octets - 2)
    low = tl.zeros((PICKS,), tl.int32)
    high = low + (octets - 3)
    span = octets - 2
    while span > 0:
        middle = (low + high + 1) >> 1
        open_ = inside & (low < high)
        passed = open_ & (tl.load(before + middle, mask=open_, other=0) <= slot)
        high = tl.where(open_ & (passed == 0), middle - 1, high)
        low = tl.where(passed, middle, low)
        span = span >> 1
    word = tl.load(own + 2 + low, mask=inside, other=0)
    left = slot - tl.load(before + low, mask=inside, other=0)
    bit = tl.zeros((PICKS,), tl.int32)
    for half in tl.static_range(5):
        here = _ones((word >> bit) & ((1 << (16 >> half)) - 1))
        beyond = left >= here
        left -= tl.where(beyond, here, 0)
        bit += tl.where(beyond, 16 >> half, 0)
    place = (low * 32 + bit - slot) << bits
    place |= (tl.load(own + octets + (slot >> 2), mask=inside, other=0) >> (8 * (slot & 3))) & 255
    plane = own + octets + (slots + 3) // 4
    for shift in range(8, bits, 4):
        place |= ((tl.load(plane + (slot >> 3), mask=inside, other=0) >> (4 * (slot & 7))) & 15) << shift
        plane += (slots + 7) // 8
    place = tl.where((place < 0) | (place > numel), numel, place)
    told = (tl.load(plane + (slot >> 3), mask=inside, other=0) >> (4 * (slot & 7))) & 15
    level = tl.maximum(top - (told & 7) * 3, SILENT)
    tl.store(places + rank * slots + slot, place, mask=inside)
    said = level
    if CODES:
        codes = tl.load(plane + (slots + 7) // 8 + (slot >> 2), mask=inside, other=0)
        said = (level << 8) | ((codes >> (8 * (slot & 3))) & 255)
    tl.store(levels + rank * slots + slot, said, mask=inside)
    reached = tl.min(tl.where(inside & (slot < number), level, top))
    tl.atomic_max(lowest + rank, -reached + LEVELS_END, sem="relaxed")
    live = inside & (place < numel)
    _set(words, counts, place, live, block)
    _set(first_words, first_counts, place, live & (told < 8), block)


def tell(
    acc: Tensor,
    keys: Tensor,
    number: Tensor,
    largest: Tensor,
    broken: Tensor,
    form: Form,
    most: int,
    second: Tensor | None = None,
) -> Tensor:
    """A rank's message: how many picks, how large the largest is, where they are and how large.

    Args:
        acc: (numel + 1,) float32.
        keys: (slots,) int32 picks, ``2 j`` or ``2 j + 1``, then ``2 numel``.
        number: () int64.
        largest: (p,) int32 bits of magnitudes, the largest of them that of the largest pick.
        broken: (1,) int32: 1 if the rank is in trouble.
        form: of the message.
        most: largest integer that a value becomes.
        second: (numel + 1,) float32, where there are codes.

    Returns:
        (:attr:`Form.width`,) int32.
    """
    message = keys.new_empty(form.width)
    launch(
        _tell, max(1, -(-form.slots // PICKS)), acc, acc if second is None else second, keys, number, largest, broken,
        message, largest.numel(), form.slots, form.bits, form.octets, form.filled, form.width, most, form.numel,
        CODES=form.codes, PICKS=PICKS, PARTS=1024, warps=4,
    )  # fmt: skip
    return message


class Heard(NamedTuple):
    """The contents of the messages of all ranks."""

    places: Tensor
    """(n slots,) int32 coordinates, and numel."""
    levels: Tensor
    """(n slots,) int32 levels; with codes, ``level << 8 | code``."""
    numbers: Tensor
    """(n,) int64 picks of each rank."""


def hear(rows: Tensor, form: Form, named: Bitmap, first: Bitmap, lowest: Tensor, trouble: Tensor) -> Heard:
    """Read the messages of all ranks, and mark what they name.

    Args:
        rows: (n, :attr:`Form.width`) int32, each row contiguous; they may lie apart.
        form: of the messages.
        named: bits are set for all picks.
        first: bits are set for those that are not spare.
        lowest: (n,) int32, 0 at the start: 2**20 less the lowest level of each rank.
        trouble: (1,) int32, set to 1 if a rank is in trouble.
    """
    n, tiles = len(rows), -(-form.slots // PICKS)
    places, levels = rows.new_empty((2, n * form.slots))
    numbers = rows.new_empty(n, dtype=torch.int64)
    until = rows.new_empty((n, form.octets - form.marks))
    launch(_count_marks, n, rows, until, form.octets, rows.stride(0), WORDS=WORDS)
    launch(
        _hear, n * tiles, rows, until, named.words, named.counts, first.words, first.counts, lowest, trouble, places,
        levels, numbers, form.slots, form.bits, form.octets, rows.stride(0), tiles, Share.of(form.numel).block,
        form.numel, CODES=form.codes, PICKS=PICKS, warps=4,
    )  # fmt: skip
    return Heard(places, levels, numbers)
