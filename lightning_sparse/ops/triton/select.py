"""Which coordinates are the largest: exact, in ascending order, of equal magnitudes the first ones, without a sort.

A magnitude is the 31 bits of a float32 without its sign, which order like the number. The k-th largest is found digit
by digit from the top: a histogram of 256 counts, then one of those with this first digit, and so on, the last one of
128. (A histogram takes time in proportion to its counts.) Each kernel begins by reading what the histogram of the one
before it says. All of this looks at the coordinates that the pass
before has noted, or, where these are too few or too many, at all of them: that is decided on the device.

*Share*: the largest of all. *Stripe*: the coordinates j with ``j mod n == turn``, of which the largest others are
picked, too. Those of a stripe that are picked at all are its largest ones: as many as have a share in it, and the
others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.core.layout import InRuns
from lightning_sparse.ops.addresses import vector_of
from lightning_sparse.ops.triton.launch import PROGRAMS, TILE, Share, bitmap_words, launch
from lightning_sparse.ops.triton.runs import lying, place_of

FIRST, LAST = tl.constexpr(256), tl.constexpr(128)
"""Digits: three of 8 bits and one of 7."""
DIGITS = tl.constexpr(3 * 256 + 128)
"""Counts of one search."""
CONTROL = 32
"""Words of what kernels tell each other."""
FINITE, FOUND, LISTED, STRIPE_LISTED = (tl.constexpr(i) for i in range(4))
"""Flags: all is finite; number of candidates; all that is looked for is among them."""
OWN, MAYBE, TAKEN = (tl.constexpr(i) for i in range(4, 7))
"""Of the stripe: candidates, at most these of the share, and those of the share."""
CUTS = tl.constexpr(8)
"""For the search in all and in the stripe: one past the last coordinate that is taken of those equal to the k-th."""
STEPS = tl.constexpr(10)
"""For both: what is known of the magnitude after one, two and three digits, and how many of it are to be taken."""
WIDTH = tl.constexpr(6)


WORDS = 256
"""Words of flags that a program goes through at once."""


@triton.jit
def _ones(word):
    """Number of bits that are set."""
    pairs = (word & 0x55555555) + ((word >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    halves = octets + (octets >> 8)
    return (halves + (halves >> 16)) & 63


@triton.jit
def _lowest(word):
    """Which is the lowest bit that is set, of 32; for no bit anything."""
    alone = (word & -word).to(tl.float32)  # a power of two, or the negative one of the uppermost bit
    return ((alone.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def _magnitude(x, runs, i, mask, IN_RUNS: tl.constexpr):
    """Bits of magnitudes."""
    if IN_RUNS:  # noqa: SIM108
        place = place_of(x, runs, i, tl.float32)
    else:
        place = x + i
    return tl.load(place, mask=mask, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["need", "capacity", "turn", "n", "numel", "per", "runs"])
def _collect(
    x, words, counts, control, places, magnitudes, need, capacity, turn, n, numel, per, runs,
    IN_RUNS: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """List the noted coordinates in order, with the bits of their magnitudes, unless they are too few or too many."""
    pid = tl.program_id(0)
    every = tl.arange(0, PROGRAMS)
    count = tl.load(counts + every, mask=every < tl.num_programs(0), other=0)
    total = tl.sum(count)
    listed = (total >= need) & (total <= capacity)
    if pid == 0:
        tl.store(control + FOUND, total)
        tl.store(control + LISTED, listed.to(tl.int32))
    if listed & (total > 0):  # where nothing was noted, nobody may have written the words
        at = tl.sum(tl.where(every < pid, count, 0))
        row = tl.arange(0, WORDS)
        own = tl.zeros((WORDS,), tl.int32)
        end = tl.cdiv(numel, TILE) * (TILE // 32)
        begin = pid * per * (TILE // 32)
        for start in range(begin, tl.minimum(begin + per * (TILE // 32), end), WORDS):
            inside = start + row < tl.minimum(begin + per * (TILE // 32), end)
            word = tl.load(words + start + row, mask=inside, other=0)
            ones = _ones(word)
            ordinal = at + tl.cumsum(ones) - ones
            at += tl.sum(ones)
            for _ in range(tl.max(ones)):  # those that are set, the first of each word, then the second
                i = (start + row) * 32 + _lowest(word)
                chosen = word != 0
                bits = _magnitude(x, runs, i, chosen, IN_RUNS)
                tl.store(places + ordinal, i, mask=chosen)
                tl.store(magnitudes + ordinal, bits, mask=chosen)
                own += (chosen & (i % n == turn)).to(tl.int32)
                ordinal += 1
                word &= word - 1
        own = tl.sum(own)
        if own > 0:
            tl.atomic_add(control + OWN, own, sem="relaxed")


@triton.jit
def _span(control, listed, numel, TILE: tl.constexpr):
    """Where the tiles of this program begin and end, and the number of things that are looked at."""
    end = tl.where(listed, tl.load(control + FOUND), numel)
    tiles = tl.cdiv(end, TILE)
    per = tl.cdiv(tiles, tl.num_programs(0))
    first = tl.program_id(0) * per
    return first, tl.minimum(first + per, tiles), end


@triton.jit
def _candidates(x, runs, places, magnitudes, listed, i, inside, IN_RUNS: tl.constexpr):
    """Coordinates and bits of magnitudes."""
    from_list = inside & listed
    place = tl.load(places + i, mask=from_list, other=0)
    bits = tl.load(magnitudes + i, mask=from_list, other=0)
    found = _magnitude(x, runs, i, inside & (listed == 0), IN_RUNS)
    return tl.where(listed, place, i), tl.where(listed, bits, found)


@triton.jit
def _digit_of(histogram, rank, SIZE: tl.constexpr):
    """The digit of the rank-th largest, and how many with this digit belong to the largest."""
    digit = tl.arange(0, SIZE)
    count = tl.load(histogram + digit)
    reaching = tl.cumsum(count, 0, reverse=True)
    rank = tl.minimum(rank, tl.sum(count))
    chosen = tl.max(tl.where(reaching >= rank, digit, 0))
    return chosen, rank - tl.sum(tl.where(digit > chosen, count, 0))


@triton.jit
def _magnitude_of(control, histograms, SEARCH: tl.constexpr):
    """Bits of the k-th largest magnitude, and how many that have it are taken."""
    known = tl.load(control + STEPS + WIDTH * SEARCH + 4)
    left = tl.load(control + STEPS + WIDTH * SEARCH + 5)
    digit, left = _digit_of(histograms + DIGITS * SEARCH + 3 * FIRST, left, LAST)
    return (known << 7) | digit, left


@triton.jit
def _ties_before(rows, bits, SEARCH: tl.constexpr, PROGRAMS: tl.constexpr):
    """Count these bits in the programs before this one."""
    every = tl.arange(0, PROGRAMS)
    before = every < tl.program_id(0)
    return tl.sum(tl.load(rows + (SEARCH * PROGRAMS + every) * LAST + (bits & (LAST - 1)), mask=before, other=0))


@triton.jit(do_not_specialize=["share", "turn", "n", "numel", "runs"])
def _count_digits(
    x, places, magnitudes, control, histograms, rows, spare, share, turn, n, numel, runs,
    IN_RUNS: tl.constexpr, DIGIT: tl.constexpr, SEARCH: tl.constexpr, STRIPED: tl.constexpr, TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Histogram of one of the four digits, of all (SEARCH 0) or of the stripe (SEARCH 1)."""
    pid = tl.program_id(0)
    listed = tl.load(control + LISTED) != 0
    if SEARCH == 1:
        if DIGIT == 1:
            # The stripe's others are among the candidates if enough of these are its own.
            kth, left = _magnitude_of(control, histograms, 0)
            wanted = tl.load(control + MAYBE) + tl.load(spare).to(tl.int32)
            striped_listed = listed & (tl.load(control + OWN) >= wanted)
            if pid == 0:
                tl.store(control + STRIPE_LISTED, striped_listed.to(tl.int32))
            # Who of those equal to the k-th is taken, and how many of the share are in the stripe.
            ties = _ties_before(rows, kth, 0, PROGRAMS)
            taken = 0
            first, last, end = _span(control, listed, numel, TILE)
            for tile in range(first, last):
                i = tile * TILE + tl.arange(0, TILE)
                inside = i < end
                place, bits = _candidates(x, runs, places, magnitudes, listed, i, inside, IN_RUNS)
                equal = inside & (bits == kth)
                ordinal = ties + tl.cumsum(equal.to(tl.int32))
                picked = (inside & (bits > kth)) | (equal & (ordinal <= left))
                taken += tl.sum((picked & (place % n == turn)).to(tl.int32))
                tl.store(control + CUTS + i * 0, place + 1, mask=equal & (ordinal == left))
                ties += tl.sum(equal.to(tl.int32))
            if taken > 0:
                tl.atomic_add(control + TAKEN, taken, sem="relaxed")
            listed = striped_listed
        else:
            listed = tl.load(control + STRIPE_LISTED) != 0
    own = histograms + DIGITS * SEARCH
    state = control + STEPS + WIDTH * SEARCH
    known = 0
    if DIGIT > 1:
        at: tl.constexpr = 2 * (DIGIT - 2)
        if DIGIT == 2:
            rank = share
            if SEARCH == 1:
                rank = tl.load(control + TAKEN) + tl.load(spare).to(tl.int32)
        else:
            known = tl.load(state + at - 2)
            rank = tl.load(state + at - 1)
        digit, left = _digit_of(own + (DIGIT - 2) * FIRST, rank, FIRST)
        known = (known << 8) | digit
        if pid == 0:
            tl.store(state + at, known)
            tl.store(state + at + 1, left)
    SIZE: tl.constexpr = LAST if DIGIT == 4 else FIRST
    SHIFT: tl.constexpr = 0 if DIGIT == 4 else 31 - 8 * DIGIT
    ABOVE: tl.constexpr = 39 - 8 * DIGIT  # where the digits that are known begin
    count = tl.zeros((SIZE,), tl.int32)
    maybe = 0
    first, last, end = _span(control, listed, numel, TILE)
    for tile in range(first, last):
        i = tile * TILE + tl.arange(0, TILE)
        inside = i < end
        place, bits = _candidates(x, runs, places, magnitudes, listed, i, inside, IN_RUNS)
        if SEARCH == 1:
            inside = inside & (place % n == turn)
        alike = inside
        if DIGIT > 1:
            alike = inside & ((bits >> ABOVE) == known)
        count += tl.histogram((bits >> SHIFT) & (SIZE - 1), SIZE, mask=alike)
        if DIGIT == 4 and STRIPED and SEARCH == 0:
            maybe += tl.sum((inside & ((bits >> ABOVE) >= known) & (place % n == turn)).to(tl.int32))
    digit = tl.arange(0, SIZE)
    tl.atomic_add(own + (DIGIT - 1) * FIRST + digit, count, mask=count > 0, sem="relaxed")
    if DIGIT == 4:
        tl.store(rows + (SEARCH * PROGRAMS + pid) * LAST + digit, count)
        if maybe > 0:
            tl.atomic_add(control + MAYBE, maybe, sem="relaxed")


@triton.jit(do_not_specialize=["turn", "n", "numel", "runs"])
def _count_picks(
    x, places, magnitudes, control, histograms, rows, counts, turn, n, numel, runs,
    IN_RUNS: tl.constexpr, STRIPED: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Count the picks that each program will write, and find the end of those equal to the last one."""
    SEARCH: tl.constexpr = 1 if STRIPED else 0
    listed = tl.load(control + (STRIPE_LISTED if STRIPED else LISTED)) != 0
    kth, _ = _magnitude_of(control, histograms, 0)
    lowest, left = _magnitude_of(control, histograms, SEARCH)
    ties = _ties_before(rows, lowest, SEARCH, PROGRAMS)
    cut = tl.load(control + CUTS)
    found = 0
    first, last, end = _span(control, listed, numel, TILE)
    for tile in range(first, last):
        i = tile * TILE + tl.arange(0, TILE)
        inside = i < end
        place, bits = _candidates(x, runs, places, magnitudes, listed, i, inside, IN_RUNS)
        eligible = inside
        if STRIPED:
            eligible = inside & (place % n == turn)
        equal = eligible & (bits == lowest)
        ordinal = ties + tl.cumsum(equal.to(tl.int32))
        picked = (eligible & (bits > lowest)) | (equal & (ordinal <= left))
        if STRIPED:
            picked = picked | (inside & ((bits > kth) | ((bits == kth) & (place < cut))))
        tl.store(control + CUTS + SEARCH + i * 0, place + 1, mask=equal & (ordinal == left))
        ties += tl.sum(equal.to(tl.int32))
        found += tl.sum(picked.to(tl.int32))
    tl.store(counts + tl.program_id(0), found)


@triton.jit(do_not_specialize=["room", "slots", "turn", "n", "numel", "runs"])
def _write_picks(
    x, places, magnitudes, control, histograms, counts, indices, spares, number, bound, room, slots, turn, n, numel,
    runs,
    IN_RUNS: tl.constexpr, STRIPED: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Coordinates, ascending, then ``numel``; and which ones are the stripe's others."""
    pid = tl.program_id(0)
    every = tl.arange(0, PROGRAMS)
    count = tl.load(counts + every, mask=every < tl.num_programs(0), other=0)
    at = tl.sum(tl.where(every < pid, count, 0))
    total = tl.sum(count)
    SEARCH: tl.constexpr = 1 if STRIPED else 0
    listed = tl.load(control + (STRIPE_LISTED if STRIPED else LISTED)) != 0
    kth, _ = _magnitude_of(control, histograms, 0)
    lowest, _ = _magnitude_of(control, histograms, SEARCH)
    cut, lowest_cut = tl.load(control + CUTS), tl.load(control + CUTS + SEARCH)
    first, last, end = _span(control, listed, numel, TILE)
    for tile in range(first, last):
        i = tile * TILE + tl.arange(0, TILE)
        inside = i < end
        place, bits = _candidates(x, runs, places, magnitudes, listed, i, inside, IN_RUNS)
        of_all = inside & ((bits > kth) | ((bits == kth) & (place < cut)))
        picked = of_all
        if STRIPED:
            reached = (bits > lowest) | ((bits == lowest) & (place < lowest_cut))
            picked = of_all | (inside & (place % n == turn) & reached)
        slot = at + tl.cumsum(picked.to(tl.int32)) - 1
        tl.store(indices + slot, place.to(tl.int64), mask=picked & (slot < slots))
        tl.store(spares + slot, of_all == 0, mask=picked & (slot < slots))
        at += tl.sum(picked.to(tl.int32))
    for start in range(total + pid * TILE, slots, tl.num_programs(0) * TILE):
        slot = start + tl.arange(0, TILE)
        tl.store(indices + slot, tl.zeros((TILE,), tl.int64) + numel, mask=slot < slots)
        tl.store(spares + slot, tl.zeros((TILE,), tl.int1), mask=slot < slots)
    if pid == 0:
        tl.store(number, total)
        if (tl.load(control + FINITE) != 0) & (total > 0):
            # The next pass notes what reaches 85 % of the lowest pick, more than that where it has noted very much.
            half = tl.maximum(room // 2, 1)
            noted = tl.maximum(tl.load(control + FOUND), half).to(tl.float32)
            below = 1.0 - 0.15 * half.to(tl.float32) / noted
            tl.store(bound, tl.minimum(kth, lowest).to(tl.float32, bitcast=True) * below)


@triton.jit(do_not_specialize=["words"])
def _empty(emptied, words, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(emptied + i, (i == FINITE).to(tl.int32), mask=i < words)


class Scratch:
    """The buffers of the search for one group's picks. They are kept from step to step, and hold nothing that counts.

    Args:
        numel: length of the group.
        device: where it lies.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel = numel
        sizes = CONTROL, 2 * DIGITS.value
        self.emptied = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        """(:data:`CONTROL` and twice :data:`DIGITS`,) int32 numbers of kernels for each other, and histograms."""
        self.control, self.histograms = torch.split_with_sizes(self.emptied, sizes)
        self.words, self.counts = (self.emptied.new_empty(size) for size in (bitmap_words(numel), PROGRAMS))
        """A bit for each coordinate: what has been noted, see :func:`.triton.dense.accumulate_`; and
        (:data:`PROGRAMS`,) how many were noted, by program."""
        self.bound = torch.full((), math.inf, dtype=torch.float32, device=device)
        """() float32 magnitude from which on a pass notes coordinates."""

    def begin(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Empty the buffers, and return what a pass writes to and reads: words, counts, the flag, the bound."""
        size = self.emptied.numel()
        launch(_empty, -(-size // TILE), self.emptied, size, TILE=TILE)
        return self.words, self.counts, self.control[:1], self.bound

    @property
    def finite(self) -> Tensor:
        """() bool: False if something is not finite."""
        return self.control.view(torch.bool)[0]


class Found(NamedTuple):
    """The picks of a group."""

    indices: Tensor
    """(slots,) int64, ascending, then numel."""
    spares: Tensor
    """(slots,) bool: those of the stripe that are not among the largest of all."""
    number: Tensor
    """() int64: how many."""


def pick(
    x: Tensor | InRuns,
    scratch: Scratch | None,
    share: int,
    slots: int,
    spare: Tensor | None = None,
    turn: int = 0,
    n: int = 1,
) -> Found:
    """The largest of all, and the largest others of a stripe.

    Args:
        x: (numel,) float32 without NaN; if it has some, something is picked.
        scratch: as a pass has left it. Its bound becomes that of the next step, if all of this one is finite. None:
            nothing has been noted.
        share: how many of all, from 0 to numel.
        slots: of the result, at least as many as are picked.
        spare: () int64: how many others of the stripe, fewer where there are not so many; None: no stripe.
        turn: which stripe.
        n: number of stripes.

    Returns:
        The picks.
    """
    numel, striped = x.numel(), spare is not None
    if scratch is None:
        scratch = Scratch(numel, x.device)
        scratch.begin()[1].zero_()
    share_out, new = Share.of(numel), scratch.emptied.new_empty
    capacity = min(numel, 4 * max(1, share) * (1 if spare is None else n) + TILE)
    places, magnitudes = new((2, capacity))
    rows = new((1 + striped) * PROGRAMS * LAST.value)
    first, runs, kinds = lying(vector_of(x.runs) if isinstance(x, InRuns) else x)
    of_list = first, places, magnitudes, scratch.control
    both = {"IN_RUNS": kinds["IN_RUNS"], "TILE": TILE, "PROGRAMS": PROGRAMS}
    launch(
        _collect, share_out.programs, first, scratch.words, scratch.counts, scratch.control, places, magnitudes,
        share, capacity, turn, n, numel, share_out.per, runs, WORDS=WORDS, **both,
    )  # fmt: skip
    constants = {"STRIPED": striped, **both}
    named = scratch.control if spare is None else spare
    for search in range(1 + striped):
        for digit in (1, 2, 3, 4):
            launch(
                _count_digits, share_out.programs, *of_list, scratch.histograms, rows, named, share, turn, n, numel,
                runs, DIGIT=digit, SEARCH=search, **constants,
            )  # fmt: skip
    counts = new(share_out.programs)
    launch(
        _count_picks, share_out.programs, *of_list, scratch.histograms, rows, counts, turn, n, numel, runs, **constants
    )
    indices, spares = (new(slots, dtype=dtype) for dtype in (torch.int64, torch.bool))
    number = new((), dtype=torch.int64)
    launch(
        _write_picks, share_out.programs, *of_list, scratch.histograms, counts, indices, spares, number, scratch.bound,
        capacity, slots, turn, n, numel, runs, **constants,
    )  # fmt: skip
    return Found(indices, spares, number)
