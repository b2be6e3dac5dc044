"""Adam's steps of many parameters in one launch: 12 bytes a coordinate in float32, 4 without weight decay.

Parameters, gradients and divisors lie in memory of their own: a table says where.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.addresses import Table
from lightning_sparse.ops.triton.launch import TILE, launch
from lightning_sparse.ops.triton.second import _at, _put

NAMES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _there(address, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the element that an address points to."""
    there = address.to(tl.pointer_type(KIND))
    if ALIGNED:
        there = tl.multiple_of(there, 16)
    return there


@triton.jit
def _move(
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
        weights = _there(tl.load(row), WEIGHT, ALIGNED)
        grads = _there(tl.load(row + 1), GRAD, ALIGNED)
        divisors = tl.load(row + 2).to(tl.pointer_type(tl.float32))
        length = tl.load(row + 3).to(tl.int32)
        if NUMBERS:
            by, left = rate, keep
        else:
            by, left = tl.load(rate).to(tl.float32), tl.load(keep).to(tl.float32)
        for start in range(0, length, TILE):
            i = start + tl.arange(0, TILE)
            if start + TILE <= length:
                _move(weights, grads, divisors, i, length, by, left, scale, DECAYS, SCALED, True)
            else:
                _move(weights, grads, divisors, i, length, by, left, scale, DECAYS, SCALED, False)


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
