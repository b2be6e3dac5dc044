"""Sums over whole groups, in an order that does not change from run to run: 4 bytes a coordinate, two launches.

Each program adds up its own part in float64, lane by lane and then over lanes, and one program adds up the parts. The
operations of torch add in another order: results differ in their last bits, which only a rank's own thresholds see.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.launch import PROGRAMS, TILE, Share, launch

SQUARES, EXCESS, LOGARITHMS = range(3)
"""Quantities to add up: squares of values; what is beyond a threshold, as in
:func:`~lightning_sparse.ops.reference.excess`; logarithms of magnitudes."""


@triton.jit(do_not_specialize=["numel", "per"])
def _parts(x, threshold, parts, numel, per, KIND: tl.constexpr, TILE: tl.constexpr):
    pid = tl.program_id(0)
    first = tl.zeros((TILE,), tl.float64)
    second = tl.zeros((TILE,), tl.float64)
    number = tl.zeros((TILE,), tl.int32)
    for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
        i = tile * TILE + tl.arange(0, TILE)
        inside = i < numel
        if tile * TILE + TILE <= numel:  # noqa: SIM108  # without a mask: 128 bits at once
            value = tl.load(x + i)
        else:
            value = tl.load(x + i, mask=inside, other=0.0)
        magnitude = tl.abs(value)
        if KIND == 0:
            wide = value.to(tl.float64)
            second += wide * wide
        elif KIND == 1:
            level = tl.load(threshold)
            reached = inside & (magnitude >= tl.maximum(level.to(tl.float32), 1.1754943508222875e-38))
            beyond = tl.where(reached, tl.maximum(magnitude.to(tl.float64) - level, 0.0), 0.0)
            number += reached.to(tl.int32)
            first += beyond
            second += beyond * beyond
        else:
            counted = tl.where(magnitude < 1.1754943508222875e-38, 1.0, magnitude)
            first += tl.log(counted).to(tl.float64)
    tl.store(parts + 3 * pid, tl.sum(first))
    tl.store(parts + 3 * pid + 1, tl.sum(second))
    tl.store(parts + 3 * pid + 2, tl.sum(number.to(tl.float64)))


@triton.jit(do_not_specialize=["programs"])
def _whole(parts, sums, programs, KIND: tl.constexpr, PROGRAMS: tl.constexpr):
    every = tl.arange(0, PROGRAMS)
    known = every < programs
    second = tl.load(parts + 3 * every + 1, mask=known, other=0.0)
    tl.store(sums, tl.sum(tl.load(parts + 3 * every, mask=known, other=0.0)))
    tl.store(sums + 1, tl.sum(second))
    tl.store(sums + 2, tl.sum(tl.load(parts + 3 * every + 2, mask=known, other=0.0)))
    if KIND == 0:
        tl.store(sums + 2, tl.sqrt(tl.sum(second)))  # of values, nothing is counted


def _sums(x: Tensor, kind: int, threshold: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    share = Share.of(x.numel())
    parts, sums = x.new_empty(3 * share.programs, dtype=torch.float64), x.new_empty(3, dtype=torch.float64)
    launch(
        _parts, share.programs, x, parts if threshold is None else threshold, parts, x.numel(), share.per,
        KIND=kind, TILE=TILE,
    )  # fmt: skip
    launch(_whole, 1, parts, sums, share.programs, KIND=kind, PROGRAMS=PROGRAMS, warps=4)
    first, second, third = sums.unbind()
    return first, second, third


def norm(x: Tensor) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.length.norm`, of float32, bfloat16 or float16."""
    return _sums(x, SQUARES)[2]


def excess(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do the work of :func:`~lightning_sparse.ops.reference.excess`, of float32 and a () float64 threshold."""
    total, squares, number = _sums(x, EXCESS, threshold)
    return number, total, squares


def log_sum(x: Tensor) -> Tensor:
    """Do the work of :func:`~lightning_sparse.ops.reference.log_sum`, of float32."""
    return _sums(x, LOGARITHMS)[0]
