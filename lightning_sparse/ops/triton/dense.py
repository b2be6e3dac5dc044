"""The passes over whole groups: add the gradient to acc, and what happens to all of a vector only if a flag is set."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.launch import TILE, Share, launch
from lightning_sparse.ops.triton.second import TINY, _at, _put


@triton.jit
def _absorb(
    acc, grad, scale, decay, i, left,
    SCALED: tl.constexpr, CLEAR: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``acc = decay acc + grad / scale`` in a tile, where that is finite; return acc, and what it would be."""
    given = _at(grad, i, left, WHOLE)
    before = _at(acc, i, left, WHOLE)
    if SCALED:
        given = tl.div_rn(given.to(tl.float32), tl.load(scale))
    formed = before * decay + given.to(tl.float32)
    x = tl.where(tl.abs(formed) < float("inf"), formed, before)
    _put(acc, i, x, left, WHOLE)
    if CLEAR:
        _put(grad, i, tl.zeros_like(given).to(grad.dtype.element_ty), left, WHOLE)
    return x, formed


@triton.jit(do_not_specialize=["numel", "per"])
def _form(
    acc, grad, words, counts, verdict, bound, scale, decay, numel, per,
    TILE: tl.constexpr, SCALED: tl.constexpr, NOTES: tl.constexpr,
):  # fmt: skip
    """Form acc, and tell whether something is not finite. NOTES: clear the gradient, and note what reaches the bound.

    A tile is 64 words of 32 lanes, so that a row of flags becomes a word. Places are counted from the start of a tile,
    which takes fewer registers. Zeros, and so what lies behind the end, are never noted.
    """
    pid = tl.program_id(0)
    row = tl.arange(0, TILE // 32)
    lane = tl.arange(0, 32)
    places = row[:, None] * 32 + lane[None, :]
    if NOTES:
        least = tl.maximum(tl.load(bound), TINY)
    found = tl.zeros((TILE // 32, 32), tl.int32)  # added up behind the loop; what is not finite, in the upper half
    for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
        start = tile * TILE
        left = numel - start
        if left >= TILE:  # without a mask: 128 bits at once
            x, formed = _absorb(acc + start, grad + start, scale, decay, places, left, SCALED, NOTES, True)
        else:
            x, formed = _absorb(acc + start, grad + start, scale, decay, places, left, SCALED, NOTES, False)
        found += ((tl.abs(formed) < float("inf")).to(tl.int32) ^ 1) << 16
        if NOTES:
            reached = (tl.abs(x) >= least).to(tl.int32)
            tl.store(words + tile * (TILE // 32) + row, tl.sum(reached << lane[None, :], axis=1))
            found += reached
    if tl.max(found) > 0xFFFF:
        tl.store(verdict, 1 if NOTES else 0)
    if NOTES:
        tl.store(counts + pid, tl.sum(found & 0xFFFF))
        if pid == 0:
            tl.store(acc + numel, 0.0)


def accumulate_(
    acc: Tensor,
    grad: Tensor,
    decay: float,
    scale: Tensor | None,
    words: Tensor,
    counts: Tensor,
    broken: Tensor,
    bound: Tensor,
) -> None:
    """Add the gradient to acc and set it to zero, and note what will probably be picked; 16 bytes a coordinate.

    Args:
        acc: (numel + 1,) float32, changed in place; a coordinate that would not be finite is left as it is. The last
            slot becomes zero.
        grad: (numel,) or more, float32, bfloat16 or float16; the first numel become zero.
        decay: of acc.
        scale: () float32 that the gradient is divided by, in float32; None: nothing.
        words: int32, a bit for each coordinate, rounded up to tiles: which magnitudes reach the bound, but
            for zeros.
        counts: (programs,) int32, how many do so, by program.
        broken: (1,) int32, set to 1 if something would not be finite, else left as it is.
        bound: () float32.
    """
    numel = acc.numel() - 1
    share = Share.of(numel)
    launch(
        _form, share.programs, acc, grad, words, counts, broken, bound, bound if scale is None else scale,
        decay, numel, share.per, TILE=TILE, SCALED=scale is not None, NOTES=True,
    )  # fmt: skip


def add_(acc: Tensor, grad: Tensor, decay: float) -> Tensor:
    """Add the gradient to (numel,) acc, and nothing else; 12 bytes a coordinate in float32.

    Args:
        acc: as of :func:`accumulate_`, without a slot more.
        grad: (numel,) float32, bfloat16 or float16, not written to.
        decay: of acc.

    Returns:
        () bool: whether all is finite.
    """
    share, finite = Share.of(acc.numel()), acc.new_ones((), dtype=torch.bool)
    launch(
        _form, share.programs, acc, grad, acc, acc, finite, acc, acc, decay, acc.numel(), share.per, TILE=TILE,
        SCALED=False, NOTES=False,
    )  # fmt: skip
    return finite


@triton.jit(do_not_specialize=["numel", "per"])
def _look(x, words, counts, broken, bound, numel, per, TILE: tl.constexpr):
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
        tl.store(broken, 1)


def look(x: Tensor, words: Tensor, counts: Tensor, broken: Tensor, bound: Tensor) -> None:
    """Note what of (numel,) float32 reaches a bound, also zeros, as :func:`accumulate_` does; 4 bytes a coordinate."""
    share = Share.of(x.numel())
    launch(_look, share.programs, x, words, counts, broken, bound, x.numel(), share.per, TILE=TILE)


@triton.jit(do_not_specialize=["numel", "per"])
def _fill_if(x, flag, value, numel, per, TILE: tl.constexpr):
    if tl.load(flag) != 0:
        pid = tl.program_id(0)
        for tile in range(pid * per, (pid + 1) * per):
            i = tile * TILE + tl.arange(0, TILE)
            tl.store(x + i, tl.full((TILE,), value, tl.float32).to(x.dtype.element_ty), mask=i < numel)


def fill_if_(x: Tensor, flag: Tensor, value: float) -> None:
    """Fill all of a vector if the () flag is set; otherwise nothing but the flag is read."""
    share = Share.of(x.numel())
    launch(_fill_if, share.programs, x, flag, value, x.numel(), share.per, TILE=TILE)


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
