"""The union of what all ranks name, as a bitmap: one bit a coordinate, set in any order; no sort, and no work per rank.

Whoever sets a bit first counts it for its block of coordinates, so that the next kernel knows which ordinals its block
has. Counts and maxima of integers do not depend on the order in which they come.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.launch import PICKS, PROGRAMS, Share, bitmap_words, launch
from lightning_sparse.ops.triton.select import _lowest, _ones

WORDS = 64
"""Words of a bitmap that a program works on at once."""


class Bitmap(NamedTuple):
    """Coordinates of a group; all int32, and zero at the start."""

    words: Tensor
    """A bit for each coordinate, rounded up to tiles."""
    counts: Tensor
    """(:data:`PROGRAMS`,) bits that are set in each program's part of the group."""


@triton.jit
def _set(words, counts, place, live, block):
    """Set bits; who is the first to set one counts it."""
    bit = (1 << (place & 31)).to(tl.int32)
    before = tl.atomic_or(words + (place >> 5), bit, mask=live, sem="relaxed")
    tl.atomic_add(counts + (place // block), 1, mask=live & ((before & bit) == 0), sem="relaxed")


@triton.jit
def _shared_out(sum_, total, slot):
    """Return the rest of a sum when all multiples are out, and the number of these, beside a slot."""
    quotient = sum_ // total
    return sum_ - quotient * total, slot + quotient


@triton.jit(do_not_specialize=["limit", "phase", "block", "end", "numel"])
def _list(
    words, first_words, counts, first_counts, indices, levels, sizes, limit, phase, block, end, numel,
    SPARES: tl.constexpr, LEVELS: tl.constexpr, WORDS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write the coordinates of a bitmap in order, thinned to a limit; first ones before others.

    Of T things for c slots, the o-th one (from 1) is kept where ``(o c + phase) mod T < c``: with each of them, c is
    added, and it is kept where the sum passes a multiple of T. So the slot of the next one is the quotient.
    """
    pid = tl.program_id(0)
    every = tl.arange(0, PROGRAMS)
    known = every < tl.num_programs(0)
    count = tl.load(counts + every, mask=known, other=0)
    first_count = count
    if SPARES:
        first_count = tl.load(first_counts + every, mask=known, other=0)
    named = tl.sum(count).to(tl.int64)
    firsts = tl.sum(first_count).to(tl.int64)
    spares = named - firsts
    room = tl.minimum(firsts, limit)
    spare_room = tl.minimum(spares, limit - room)
    size = room + spare_room
    before = every < pid
    at = tl.sum(tl.where(before, first_count, 0)).to(tl.int64)
    spare_at = tl.sum(tl.where(before, count, 0)).to(tl.int64) - at
    firsts_or_1 = tl.maximum(firsts, 1)
    spares_or_1 = tl.maximum(spares, 1)
    shifted = phase % firsts_or_1
    spare_shifted = phase % spares_or_1
    if pid == 0:
        tl.store(sizes, named)
        tl.store(sizes + 1, size)
    row = tl.arange(0, WORDS)
    begin = pid * (block // 32)
    for start in range(begin, tl.minimum(begin + block // 32, end), WORDS):
        word = tl.load(words + start + row, mask=start + row < end, other=0)
        first_word = word
        if SPARES:
            first_word = tl.load(first_words + start + row, mask=start + row < end, other=0)
        ones = _ones(word)
        here = tl.sum(ones)
        if here > 0:
            of_first = _ones(first_word)
            of_spare = ones - of_first
            sum_ = at + (tl.cumsum(of_first) - of_first)
            spare_sum = spare_at + (tl.cumsum(of_spare) - of_spare)
            slot = sum_ + spare_sum
            # Only where something is left out, slots are quotients.
            if room < firsts:
                sum_, slot = _shared_out(sum_ * room + shifted, firsts, slot - sum_)
            else:
                sum_ = tl.zeros((WORDS,), tl.int64) + shifted
            if spare_room < spares:
                spare_sum, slot = _shared_out(spare_sum * spare_room + spare_shifted, spares, slot - spare_sum)
            else:
                spare_sum = tl.zeros((WORDS,), tl.int64) + spare_shifted
            for _ in range(tl.max(ones)):  # those that are set, the first of each word, then the second
                lowest = word & -word
                is_first = ((first_word & lowest) != 0).to(tl.int32)
                is_spare = (word != 0).to(tl.int32) - is_first
                sum_ += is_first * room
                spare_sum += is_spare * spare_room
                kept = (sum_ >= firsts_or_1) & (is_first != 0)
                spare_kept = (spare_sum >= spares_or_1) & (is_spare != 0)
                sum_ -= tl.where(kept, firsts_or_1, 0)
                spare_sum -= tl.where(spare_kept, spares_or_1, 0)
                either = kept | spare_kept
                tl.store(indices + slot, ((start + row) * 32 + _lowest(word)).to(tl.int64), mask=either)
                for vector in tl.static_range(LEVELS):
                    tl.store(levels + vector * limit + slot, tl.zeros((WORDS,), tl.int32), mask=either)
                slot += either.to(tl.int64)
                word &= word - 1
            at += tl.sum(of_first)
            spare_at += tl.sum(of_spare)
    for start in range(size.to(tl.int32) + pid * WORDS, limit, tl.num_programs(0) * WORDS):
        slot32 = start + row
        tl.store(indices + slot32, tl.zeros((WORDS,), tl.int64) + numel, mask=slot32 < limit)
        for vector in tl.static_range(LEVELS):
            tl.store(levels + vector * limit + slot32, tl.zeros((WORDS,), tl.int32), mask=slot32 < limit)


@triton.jit(do_not_specialize=["total", "limit", "numel"])
def _raise_levels(
    places, told, indices, levels, total, limit, numel,
    CODES: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    """The largest level, and the largest code, that was told for each coordinate of an ascending list."""
    at = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    place = tl.load(places + at, mask=at < total, other=numel)
    live = (at < total) & (place < numel)
    low = tl.zeros((PICKS,), tl.int32)
    high = low + limit
    width = limit
    while width > 0:
        middle = (low + high) >> 1
        open_ = live & (low < high)
        less = open_ & (tl.load(indices + middle, mask=open_, other=0) < place)
        high = tl.where(open_ & (less == 0), middle, high)
        low = tl.where(less, middle + 1, low)
        width = width >> 1
    within = live & (low < limit)
    hit = within & (tl.load(indices + low, mask=within, other=0) == place)
    level = tl.load(told + at, mask=hit, other=0)
    if CODES:
        tl.atomic_max(levels + limit + low, level & 255, mask=hit, sem="relaxed")
        level = level >> 8
    tl.atomic_max(levels + low, level, mask=hit, sem="relaxed")


def listed(
    bitmap: Bitmap, numel: int, limit: int, phase: int, first: Bitmap | None, levels: Tensor
) -> tuple[Tensor, Tensor]:
    """The coordinates of a bitmap, ascending, at most ``limit`` of them, evenly thinned.

    Args:
        bitmap: all.
        numel: length of the group.
        limit: slots of the result.
        phase: rotates which ones are left out.
        first: those that are left out only if there is not even room for them; None: no one goes before the others.
        levels: (limit,) or (2, limit) int32, set to zero.

    Returns:
        indices: (limit,) int64, then numel; and (2,) int64: how many there were, and how many there are.
    """
    indices = bitmap.words.new_empty(limit, dtype=torch.int64)
    sizes = bitmap.words.new_empty(2, dtype=torch.int64)
    share, other = Share.of(numel), bitmap if first is None else first
    launch(
        _list, share.programs, bitmap.words, other.words, bitmap.counts, other.counts, indices,
        levels, sizes, limit, phase, share.block, bitmap_words(numel), numel,
        SPARES=first is not None, LEVELS=levels.numel() // limit, WORDS=WORDS,
        PROGRAMS=PROGRAMS, warps=2,
    )  # fmt: skip
    return indices, sizes


def raise_levels_(levels: Tensor, indices: Tensor, places: Tensor, told: Tensor, numel: int) -> None:
    """Make each level the largest that was told for its coordinate.

    Args:
        levels: (u,) int32, at least 0; or (2, u), levels and codes.
        indices: (u,) int64 ascending coordinates that they belong to, then numel.
        places: (c,) int32 coordinates; numel and those that are not among the indices count for nothing.
        told: (c,) int32 what is told for them; with codes, ``level << 8 | code``.
        numel: length of the group.
    """
    launch(
        _raise_levels, -(-places.numel() // PICKS), places, told, indices, levels, places.numel(), indices.numel(),
        numel, CODES=levels.dim() > 1, PICKS=PICKS, warps=4,
    )  # fmt: skip
