"""Momentum spent early, for many parameters in one launch: 6 bytes a coordinate in float32.

Of parameters and velocities only those elements are touched where an average has arrived.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.addresses import Table
from lightning_sparse.ops.triton.adam import NAMES, _there
from lightning_sparse.ops.triton.launch import TILE, launch
from lightning_sparse.ops.triton.second import _at, _put


@triton.jit
def _move(waits, grads, weights, velocities, i, length, shares, by, steps, LONGEST: tl.constexpr, WHOLE: tl.constexpr):
    given = _at(grads, i, length, WHOLE).to(tl.float32)
    now = tl.minimum(_at(waits, i, length, WHOLE).to(tl.int32), LONGEST - steps) + steps
    arrived = (i < length) & ((given == 0) == 0)
    _put(waits, i, tl.where(arrived, 0, now).to(tl.uint8), length, WHOLE)
    moved = given * tl.load(shares + now, mask=arrived, other=0.0)
    velocity = tl.load(velocities + i, mask=arrived, other=0.0)
    left = velocity.to(tl.float32) - moved.to(velocity.dtype).to(tl.float32)
    tl.store(velocities + i, left.to(velocity.dtype), mask=arrived)
    weight = tl.load(weights + i, mask=arrived, other=0.0)
    stepped = weight.to(tl.float32) - (moved * by).to(weight.dtype).to(tl.float32)
    tl.store(weights + i, stepped.to(weight.dtype), mask=arrived)


@triton.jit(do_not_specialize=["steps"])
def _spend(
    table, shares, reach, skip, steps,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, VELOCITY: tl.constexpr, ALIGNED: tl.constexpr, NUMBER: tl.constexpr,
    SKIPS: tl.constexpr, LONGEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``moved = grad shares[waited + steps]; v -= moved; p -= reach moved``, each operation rounded by itself."""
    go = True
    if SKIPS:
        go = tl.load(skip) <= 0
    if go:
        row = table + 5 * tl.program_id(0)
        waits = _there(tl.load(row), tl.uint8, ALIGNED)
        grads = _there(tl.load(row + 1), GRAD, ALIGNED)
        weights = _there(tl.load(row + 2), WEIGHT, False)
        velocities = _there(tl.load(row + 3), VELOCITY, False)
        length = tl.load(row + 4).to(tl.int32)
        by = reach if NUMBER else tl.load(reach).to(tl.float32)
        for start in range(0, length, TILE):
            i = start + tl.arange(0, TILE)
            if start + TILE <= length:
                _move(waits, grads, weights, velocities, i, length, shares, by, steps, LONGEST, True)
            else:
                _move(waits, grads, weights, velocities, i, length, shares, by, steps, LONGEST, False)


def spend_(
    table: Table,
    kinds: tuple[torch.dtype, torch.dtype, torch.dtype],
    shares: Tensor,
    reach: float | Tensor,
    skip: Tensor | None,
    steps: int,
) -> None:
    """Spend; see :meth:`lightning_sparse.engine.optimizers.momentum.Spending.spend_`.

    Args:
        table: of steps waited (uint8), gradients, parameters and velocities; alignment is that of the first two.
        kinds: float32, bfloat16 or float16: types of gradients, parameters and velocities.
        shares: (most + 1,) float32, of what has waited so many steps, this one included; more count as most.
        reach: what a velocity of 1 moves parameters by; a number, or () on the device.
        skip: () above 0 where no step was taken; None: one was.
        steps: to be added to those waited.
    """
    (rows, aligned), (grad, weight, velocity) = table, kinds
    launch(
        _spend, len(rows), rows, shares, reach, rows if skip is None else skip, steps,
        WEIGHT=NAMES[weight], GRAD=NAMES[grad], VELOCITY=NAMES[velocity], ALIGNED=aligned,
        NUMBER=not isinstance(reach, Tensor), SKIPS=skip is not None, LONGEST=len(shares) - 1, TILE=TILE,
    )  # fmt: skip
