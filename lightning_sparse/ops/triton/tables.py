"""Work on many tensors in one launch, which lie in memory of their own: a table says where.

Steps of Adam: 12 bytes a coordinate in float32, 4 without weight decay; where parameters are float32 and averages known
by their coordinates, some 80 for each of these. Momentum spent early: 6 bytes; of parameters
and velocities only those elements are touched where an average has arrived.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.addresses import RunTable, Table
from lightning_sparse.ops.triton.dense import _at, _put
from lightning_sparse.ops.triton.launch import PICKS, TILE, launch
from lightning_sparse.ops.triton.runs import NAMES, run_of, there


@triton.jit
def _step_in_tile(
    weights, grads, divisors, i, length, by, left, scale,
    DECAYS: tl.constexpr, SCALED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    given = _at(grads, i, length, WHOLE).to(tl.float32)
    arrived = (i < length) & ((given == 0) == 0)
    if SCALED:
        given = tl.div_rn(given, tl.load(scale))
    # Where no average has arrived, the quotient is zero, whatever it is divided by.
    step = tl.div_rn(given, tl.load(divisors + i, mask=arrived, other=1.0)) * by
    if DECAYS:
        weight = _at(weights, i, length, WHOLE).to(tl.float32) * left - step
        _put(weights, i, weight.to(weights.dtype.element_ty), length, WHOLE)
    else:
        weight = tl.load(weights + i, mask=arrived, other=0.0).to(tl.float32) - step
        tl.store(weights + i, weight.to(weights.dtype.element_ty), mask=arrived)


@triton.jit
def _step(
    table, rate, keep, scale, skip,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, NUMBERS: tl.constexpr, DECAYS: tl.constexpr,
    SCALED: tl.constexpr, SKIPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``p = keep p - rate (g / scale / divisor)``, each operation rounded by itself, unless the flag is set."""
    go = True
    if SKIPS:
        go = tl.load(skip) <= 0
    if go:
        row = table + 4 * tl.program_id(0)
        weights = there(tl.load(row), WEIGHT, ALIGNED)
        grads = there(tl.load(row + 1), GRAD, ALIGNED)
        divisors = tl.load(row + 2).to(tl.pointer_type(tl.float32))
        length = tl.load(row + 3).to(tl.int32)
        if NUMBERS:
            by, left = rate, keep
        else:
            by, left = tl.load(rate).to(tl.float32), tl.load(keep).to(tl.float32)
        for start in range(0, length, TILE):
            i = start + tl.arange(0, TILE)
            if start + TILE <= length:
                _step_in_tile(weights, grads, divisors, i, length, by, left, scale, DECAYS, SCALED, True)
            else:
                _step_in_tile(weights, grads, divisors, i, length, by, left, scale, DECAYS, SCALED, False)


def step_(
    table: Table,
    weight: torch.dtype,
    grad: torch.dtype,
    rate: float | Tensor,
    keep: float | Tensor,
    scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Take the steps.

    Args:
        table: of parameters, gradients and divisors; alignment is that of the first two.
        weight: float32, bfloat16 or float16: type of the parameters.
        grad: type of their gradients.
        rate: learning rate; a number, or () as keep is.
        keep: what weight decay leaves.
        scale: () float32 that gradients are divided by; None: nothing.
        skip: () above 0 where no step is to be taken; None: it is.
    """
    numbers = not isinstance(rate, Tensor)
    rows, aligned = table
    launch(
        _step, len(rows), rows, rate, keep, rows if scale is None else scale, rows if skip is None else skip,
        WEIGHT=NAMES[weight], GRAD=NAMES[grad], ALIGNED=aligned, NUMBERS=numbers, DECAYS=not numbers or keep != 1,
        SCALED=scale is not None, SKIPS=skip is not None, TILE=TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "numel", "runs"])
def _step_at(table, indices, values, divisors, rate, slots, numel, runs, NUMBER: tl.constexpr, PICKS: tl.constexpr):
    """``p -= rate (value / divisor)`` where averages have arrived, each operation rounded by itself."""
    slot = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    live = slot < slots
    place = tl.load(indices + slot, mask=live, other=0)
    live &= (place < numel) & (place != tl.load(indices + slot - 1, mask=live & (slot > 0), other=-1))
    begin = tl.load(table + run_of(table, runs, place), mask=live, other=0)
    live &= begin != 0
    by = rate if NUMBER else tl.load(rate).to(tl.float32)
    value = tl.load(values + slot, mask=live, other=0.0)
    step = tl.div_rn(value, tl.load(divisors + slot, mask=live, other=1.0)) * by
    weights = there(begin, tl.float32, False) + place
    tl.store(weights, tl.load(weights, mask=live, other=0.0) - step, mask=live)


def step_at_(table: RunTable, indices: Tensor, values: Tensor, divisors: Tensor, rate: float | Tensor) -> None:
    """Take the steps of parameters where averages have arrived.

    Args:
        table: of parameters, float32.
        indices: (u,) int64 coordinates, equal ones beside each other, and maybe the padding index.
        values: (u,) float32 averages; where a coordinate is repeated, so is its value.
        divisors: (u,) float32.
        rate: learning rate; a number, or ().
    """
    slots = indices.numel()
    launch(
        _step_at, -(-slots // PICKS), table.rows, indices, values, divisors, rate, slots, table.numel, table.runs,
        NUMBER=not isinstance(rate, Tensor), PICKS=PICKS, warps=4,
    )  # fmt: skip


@triton.jit
def _spend_in_tile(
    waits, grads, weights, velocities, i, length, shares, by, steps, LONGEST: tl.constexpr, WHOLE: tl.constexpr
):
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
        waits = there(tl.load(row), tl.uint8, ALIGNED)
        grads = there(tl.load(row + 1), GRAD, ALIGNED)
        weights = there(tl.load(row + 2), WEIGHT, False)
        velocities = there(tl.load(row + 3), VELOCITY, False)
        length = tl.load(row + 4).to(tl.int32)
        by = reach if NUMBER else tl.load(reach).to(tl.float32)
        for start in range(0, length, TILE):
            i = start + tl.arange(0, TILE)
            if start + TILE <= length:
                _spend_in_tile(waits, grads, weights, velocities, i, length, shares, by, steps, LONGEST, True)
            else:
                _spend_in_tile(waits, grads, weights, velocities, i, length, shares, by, steps, LONGEST, False)


def spend_(
    table: Table,
    kinds: tuple[torch.dtype, torch.dtype, torch.dtype],
    shares: Tensor,
    reach: float | Tensor,
    skip: Tensor | None,
    steps: int,
) -> None:
    """Spend; see :meth:`lightning_sparse.ops.momentum.Spending.spend_`.

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
