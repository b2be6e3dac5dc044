"""The passes over whole groups: add the gradient to acc, form second moments and scores, and note what may be picked.

What second moments and scores mean is said in :class:`.SecondMoment`. Besides, what happens to all of
a vector only if a flag is set.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.addresses import RunTable
from lightning_sparse.ops.reference import Weights
from lightning_sparse.ops.triton.launch import PICKS, PROGRAMS, TILE, Share, launch
from lightning_sparse.ops.triton.runs import lying, place_of, read_tile, run_of, tile_of, write_tile

MOST = tl.constexpr(3.4028234663852886e38)
"""The largest float32."""
TINY = tl.constexpr(1.401298464324817e-45)
"""The smallest above 0."""


@triton.jit
def _at(x, i, numel, WHOLE: tl.constexpr):
    """Elements of a tile; without a mask, 128 bits are read at once."""
    if WHOLE:  # noqa: SIM108
        found = tl.load(x + i)
    else:
        found = tl.load(x + i, mask=i < numel, other=0.0)
    return found


@triton.jit
def _put(x, i, value, numel, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(x + i, value)
    else:
        tl.store(x + i, value, mask=i < numel)


@triton.jit
def _absorb(acc, given, decay, i, left, WHOLE: tl.constexpr):
    """``acc = decay acc + given`` in a tile, where that is finite; return acc, and what it would be."""
    before = _at(acc, i, left, WHOLE)
    formed = before * decay + given.to(tl.float32)
    x = tl.where(tl.abs(formed) < float("inf"), formed, before)
    _put(acc, i, x, left, WHOLE)
    return x, formed


@triton.jit(do_not_specialize=["numel", "per", "runs"])
def _form(
    acc, grad, words, counts, finite, bound, decay, numel, per, runs,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, IN_RUNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Form acc, clear the gradient, and note what reaches the bound, and whether all is finite.

    A tile is 64 words of 32 lanes, so that a row of flags becomes a word. Places are counted from the start of a tile,
    which takes fewer registers. Zeros, and so what lies behind the end, are never noted.
    """
    pid = tl.program_id(0)
    row = tl.arange(0, TILE // 32)
    lane = tl.arange(0, 32)
    places = row[:, None] * 32 + lane[None, :]
    least = tl.maximum(tl.load(bound), TINY)
    found = tl.zeros((TILE // 32, 32), tl.int32)  # added up behind the loop; what is not finite, in the upper half
    run = pid * 0
    if IN_RUNS:
        run = run_of(grad, runs, pid * per * TILE)
    for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
        start = tile * TILE
        left = numel - start
        run, source, whole = tile_of(grad, runs, run, start, numel, KIND, ALIGNED, IN_RUNS, TILE)
        if whole:  # without a mask: 128 bits at once
            given = _at(source, places, left, True)
            x, formed = _absorb(acc + start, given, decay, places, left, True)
            _put(source, places, tl.zeros_like(given), left, True)
        else:
            if IN_RUNS:
                end = tl.minimum(start + TILE, numel)
                given = read_tile(grad, runs, run, start + places, end, KIND)
                x, formed = _absorb(acc + start, given, decay, places, left, False)
                write_tile(grad, runs, run, start + places, end, tl.zeros_like(given), KIND)
            else:
                given = _at(source, places, left, False)
                x, formed = _absorb(acc + start, given, decay, places, left, False)
                _put(source, places, tl.zeros_like(given), left, False)
        reached = (tl.abs(x) >= least).to(tl.int32)
        tl.store(words + tile * (TILE // 32) + row, tl.sum(reached << lane[None, :], axis=1))
        found += reached + (((tl.abs(formed) < float("inf")).to(tl.int32) ^ 1) << 16)
    if tl.max(found) > 0xFFFF:
        tl.store(finite, 0)
    tl.store(counts + pid, tl.sum(found & 0xFFFF))


def accumulate_(
    acc: Tensor, grad: Tensor | RunTable, decay: float, words: Tensor, counts: Tensor, finite: Tensor, bound: Tensor
) -> None:
    """Add the gradient to acc and set it to zero, and note what will probably be picked; 16 bytes a coordinate.

    Args:
        acc: (numel,) float32, changed in place; a coordinate that would not be finite is left as it is.
        grad: (numel,) float32, bfloat16 or float16; becomes zero.
        decay: of acc.
        words: int32, a bit for each coordinate, rounded up to tiles: which magnitudes reach the bound, but
            for zeros.
        counts: (programs,) int32, how many do so, by program.
        finite: (1,) int32, set to 0 if something would not be finite, else left as it is.
        bound: () float32.
    """
    share, (first, runs, kinds) = Share.of(acc.numel()), lying(grad)
    launch(
        _form, share.programs, acc, first, words, counts, finite, bound, decay, acc.numel(), share.per, runs, **kinds,
        TILE=TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["programs", "numel", "per", "runs"])
def _fill_if(
    x, flags, any_flag, value, programs, numel, per, runs,
    KIND: tl.constexpr, IN_RUNS: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    every = tl.arange(0, PROGRAMS)
    set_ = tl.max(tl.load(flags + every, mask=every < programs, other=0))
    if pid == 0:
        tl.store(any_flag, set_ != 0)
    if set_ != 0:
        for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
            i = tile * TILE + tl.arange(0, TILE)
            if IN_RUNS:  # noqa: SIM108
                places = place_of(x, runs, i, KIND)
            else:
                places = x + i
            tl.store(places, tl.full((TILE,), value, tl.float32).to(KIND), mask=i < numel)


def tell_and_fill_(x: Tensor | RunTable, flags: Tensor, value: float) -> Tensor:
    """Fill all of a vector if one of at most :data:`PROGRAMS` int32 flags is set, and return () whether one is."""
    numel = x.numel if isinstance(x, RunTable) else x.numel()
    share, found, (first, runs, kinds) = Share.of(numel), flags.new_empty((), dtype=torch.bool), lying(x)
    del kinds["ALIGNED"]
    launch(
        _fill_if, share.programs, first, flags, found, value, flags.numel(), numel, share.per, runs, **kinds, TILE=TILE,
        PROGRAMS=PROGRAMS,
    )  # fmt: skip
    return found


@triton.jit
def _score(x, second, least, damping):
    """``x / sqrt(sqrt(second + (damping x)^2) + least)``, each operation rounded by itself."""
    waited = x * damping
    within = second + waited * waited
    return tl.div_rn(x, tl.sqrt_rn(tl.sqrt_rn(tl.where(within > MOST, MOST, within)) + least))


@triton.jit
def _least(power, EPS: tl.constexpr):
    """Return the stand-in for Adam's eps beside roots that are not corrected, see :meth:`.SecondMoment.absorb_`."""
    return (tl.sqrt(1.0 - tl.load(power)) * tl.full((), EPS, tl.float64)).to(tl.float32)


@triton.jit
def _damp(power, damping):
    """Return the factor of magnitudes beside roots that are not corrected, see :meth:`.SecondMoment.absorb_`."""
    return (tl.sqrt(1.0 - tl.load(power)) * damping).to(tl.float32)


@triton.jit
def _moments(acc, second, given, units, add, i, left, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """Form a tile of accumulator and second moment, where the former is finite; return both, and what it would be."""
    take = tl.load(units).to(tl.float32).to(KIND).to(tl.float32)
    wide = (given.to(tl.float32) * take).to(KIND).to(tl.float32)
    before = _at(acc, i, left, WHOLE)
    formed = wide + before * tl.load(units + 1).to(tl.float32)
    finite = tl.abs(formed) < float("inf")
    x = tl.where(finite, formed, before)
    _put(acc, i, x, left, WHOLE)
    before = _at(second, i, left, WHOLE)
    moment = before * tl.load(units + 2).to(tl.float32) + (wide * add) * wide
    moment = tl.where(moment > MOST, MOST, moment)  # squares overflow where gradients do not
    moment = tl.where(finite, moment, before)
    _put(second, i, moment, left, WHOLE)
    return x, moment, formed


@triton.jit(do_not_specialize=["numel", "per", "runs"])
def _weigh(
    acc, second, score, grad, words, counts, finite, bound, power, units, add, damping, numel, per, runs,
    EPS: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, IN_RUNS: tl.constexpr, IN_PLACE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Form all three and note which scores reach the bound, as :func:`_form` does."""
    pid = tl.program_id(0)
    row = tl.arange(0, TILE // 32)
    lane = tl.arange(0, 32)
    i = row[:, None] * 32 + lane[None, :]
    reach = tl.maximum(tl.load(bound), TINY)
    least = _least(power, EPS)
    damp = _damp(power, damping)
    found = tl.zeros((TILE // 32,), tl.int32)  # added up behind the loop; what is not finite, in the upper half
    run = pid * 0
    if IN_RUNS:
        run = run_of(grad, runs, pid * per * TILE)
    for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
        start = tile * TILE
        left = numel - start
        end = tl.minimum(start + TILE, numel)
        vectors = acc + start, second + start
        run, source, whole = tile_of(grad, runs, run, start, numel, KIND, ALIGNED, IN_RUNS, TILE)
        if whole:
            given = _at(source, i, left, True)
            x, moment, formed = _moments(*vectors, given, units, add, i, left, KIND, True)
        else:
            if IN_RUNS:  # noqa: SIM108
                given = read_tile(grad, runs, run, start + i, end, KIND)
            else:
                given = _at(source, i, left, False)
            x, moment, formed = _moments(*vectors, given, units, add, i, left, KIND, False)
        value = _score(x, moment, least, damp)
        if IN_PLACE:
            if whole:
                _put(source, i, value, left, True)
            else:
                write_tile(grad, runs, run, start + i, end, value, KIND)
        else:
            if left >= TILE:
                _put(score + start, i, value, left, True)
            else:
                _put(score + start, i, value, left, False)
        reached = (tl.abs(value) >= reach).to(tl.int32)
        tl.store(words + tile * (TILE // 32) + row, tl.sum(reached << lane[None, :], axis=1))
        found += tl.sum(reached + (((tl.abs(formed) < float("inf")).to(tl.int32) ^ 1) << 16), axis=1)
    if tl.max(found) > 0xFFFF:
        tl.store(finite, 0)
    tl.store(counts + pid, tl.sum(found & 0xFFFF))


def weigh_(
    acc: Tensor,
    second: Tensor,
    score: Tensor | None,
    grad: Tensor | RunTable,
    by: Weights,
    words: Tensor,
    counts: Tensor,
    finite: Tensor,
    bound: Tensor,
) -> None:
    """Form accumulator, second moment and score, and note what will probably be picked; 24 bytes a coordinate.

    Args:
        acc: (numel,) float32, changed in place; a coordinate that would not be finite is left as it is, and so is
            its second moment.
        second: (numel,) float32 second moments, changed in place.
        score: (numel,) float32, overwritten; the gradient's own place, or another one. None: the place of a gradient
            in runs.
        grad: (numel,) float32, bfloat16 or float16.
        by: numbers.
        words: int32, a bit for each coordinate, rounded up to tiles: which scores reach the bound, but for
            zeros.
        counts: (programs,) int32, how many do so, by program.
        finite: (1,) int32, set to 0 if some of acc would not be finite, else left as it is.
        bound: () float32.
    """
    share, (first, runs, kinds) = Share.of(acc.numel()), lying(grad)
    launch(
        _weigh, share.programs, acc, second, acc if score is None else score, first, words, counts, finite, bound,
        by.power, by.units, 1 - by.beta2, by.damping, acc.numel(), share.per, runs, EPS=by.eps, **kinds,
        IN_PLACE=score is None, TILE=TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots"])
def _divide(second, values, power, divisor, slots, damping, EPS: tl.constexpr, PICKS: tl.constexpr):
    """See :meth:`.SecondMoment._divisor`."""
    slot = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    inside = slot < slots
    correction = (1.0 - tl.load(power)).to(tl.float32)
    waited = tl.abs(tl.load(values + slot, mask=inside, other=0.0)) * damping
    within = tl.div_rn(tl.load(second + slot, mask=inside, other=0.0), correction) + waited * waited
    root = tl.sqrt_rn(tl.where(within == within, tl.where(within > MOST, MOST, within), 1.0))
    tl.store(divisor + slot, tl.where(waited > root, waited, root) + EPS, mask=inside)


def divisors(second: Tensor, values: Tensor, power: Tensor, eps: float, damping: float) -> Tensor:
    """Return the (u,) divisors of (u,) averages, all float32; see :meth:`.SecondMoment.divisors`."""
    divisor = torch.empty_like(values)
    launch(
        _divide, -(-values.numel() // PICKS), second, values, power, divisor, values.numel(), damping, EPS=eps,
        PICKS=PICKS, warps=4,
    )  # fmt: skip
    return divisor
