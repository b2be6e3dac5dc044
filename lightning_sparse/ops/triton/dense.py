"""The passes over whole groups: add the gradient to acc, and what happens to all of a vector only if a flag is set."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.launch import PROGRAMS, TILE, Share, launch
from lightning_sparse.ops.triton.second import TINY, _at, _put


@triton.jit
def _absorb(acc, grad, decay, i, left, WHOLE: tl.constexpr):
    """``acc = decay acc + grad`` in a tile, where that is finite; return acc, and what it would be."""
    given = _at(grad, i, left, WHOLE)
    before = _at(acc, i, left, WHOLE)
    formed = before * decay + given.to(tl.float32)
    x = tl.where(tl.abs(formed) < float("inf"), formed, before)
    _put(acc, i, x, left, WHOLE)
    _put(grad, i, tl.zeros_like(given), left, WHOLE)
    return x, formed


@triton.jit(do_not_specialize=["numel", "per"])
def _form(acc, grad, words, counts, finite, bound, decay, numel, per, TILE: tl.constexpr):
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
    for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
        start = tile * TILE
        left = numel - start
        if left >= TILE:  # without a mask: 128 bits at once
            x, formed = _absorb(acc + start, grad + start, decay, places, left, True)
        else:
            x, formed = _absorb(acc + start, grad + start, decay, places, left, False)
        reached = (tl.abs(x) >= least).to(tl.int32)
        tl.store(words + tile * (TILE // 32) + row, tl.sum(reached << lane[None, :], axis=1))
        found += reached + (((tl.abs(formed) < float("inf")).to(tl.int32) ^ 1) << 16)
    if tl.max(found) > 0xFFFF:
        tl.store(finite, 0)
    tl.store(counts + pid, tl.sum(found & 0xFFFF))


def accumulate_(
    acc: Tensor, grad: Tensor, decay: float, words: Tensor, counts: Tensor, finite: Tensor, bound: Tensor
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
    share = Share.of(acc.numel())
    launch(
        _form, share.programs, acc, grad, words, counts, finite, bound, decay, acc.numel(), share.per, TILE=TILE
    )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "per"])
def _look(x, words, counts, finite, bound, numel, per, TILE: tl.constexpr):
    pid = tl.program_id(0)
    row = tl.arange(0, TILE // 32)
    lane = tl.arange(0, 32)
    places = row[:, None] * 32 + lane[None, :]
    least = tl.load(bound)
    found = tl.zeros((TILE // 32, 32), tl.int32)
    for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
        i = tile * TILE + places
        if tile * TILE + TILE <= numel:  # noqa: SIM108
            magnitude = tl.abs(_at(x, i, numel, True))
        else:
            magnitude = tl.abs(_at(x, i, numel, False))
        reached = ((magnitude >= least) & (i < numel)).to(tl.int32)
        tl.store(words + tile * (TILE // 32) + row, tl.sum(reached << lane[None, :], axis=1))
        found += reached + (((magnitude < float("inf")).to(tl.int32) ^ 1) << 16)
    tl.store(counts + pid, tl.sum(found & 0xFFFF))
    if tl.max(found) > 0xFFFF:
        tl.store(finite, 0)


def look(x: Tensor, words: Tensor, counts: Tensor, finite: Tensor, bound: Tensor) -> None:
    """Note what of (numel,) float32 reaches a bound, also zeros, as :func:`accumulate_` does; 4 bytes a coordinate."""
    share = Share.of(x.numel())
    launch(_look, share.programs, x, words, counts, finite, bound, x.numel(), share.per, TILE=TILE)


@triton.jit(do_not_specialize=["programs", "numel", "per"])
def _fill_if(x, flags, any_flag, value, programs, numel, per, TILE: tl.constexpr, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    every = tl.arange(0, PROGRAMS)
    set_ = tl.max(tl.load(flags + every, mask=every < programs, other=0))
    if pid == 0:
        tl.store(any_flag, set_ != 0)
    if set_ != 0:
        for tile in range(pid * per, (pid + 1) * per):
            i = tile * TILE + tl.arange(0, TILE)
            tl.store(x + i, tl.full((TILE,), value, tl.float32).to(x.dtype.element_ty), mask=i < numel)


def tell_and_fill_(x: Tensor, flags: Tensor, value: float) -> Tensor:
    """Fill all of a vector if one of at most :data:`PROGRAMS` int32 flags is set, and return () whether one is."""
    share, found = Share.of(x.numel()), flags.new_empty((), dtype=torch.bool)
    launch(
        _fill_if, share.programs, x, flags, found, value, flags.numel(), x.numel(), share.per, TILE=TILE,
        PROGRAMS=PROGRAMS,
    )  # fmt: skip
    return found


@triton.jit
def _choose(flag, yes, no, out, sizes, SIZE: tl.constexpr):
    chosen = tl.load(flag) != 0
    i = tl.arange(0, SIZE)
    for part in tl.static_range(len(yes)):
        inside = i < sizes[part]
        first = tl.load(yes[part] + i, mask=inside & chosen, other=0)
        second = tl.load(no[part] + i, mask=inside & (chosen == 0), other=0)
        tl.store(out[part] + i, tl.where(chosen, first, second), mask=inside)


MOST_CHOSEN = 512
"""Longest tensor that :func:`choose` takes."""


def choose(flag: Tensor, yes: tuple[Tensor, ...], no: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> None:
    """``out[i] = yes[i] if flag else no[i]`` for short tensors, of equal shapes and dtypes for each i, at once."""
    size = triton.next_power_of_2(max((x.numel() for x in out), default=1))
    launch(_choose, 1, flag, yes, no, out, tuple(x.numel() for x in out), SIZE=size, warps=4)
