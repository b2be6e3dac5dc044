"""Vectors that lie in several runs, read and written where they lie: a table says where each run would begin.

A table of r runs is ``(2 r + 1,)`` int64: for each run the address that coordinate 0 would have if the run reached so
far, then the first coordinate of each run, and the number of all. So a coordinate has the same offset in all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.addresses import RunTable

NAMES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def lying(x: Tensor | RunTable) -> tuple[Tensor, int, dict[str, Any]]:
    """Return what kernels take for a vector: itself or its table, the number of runs, and constants."""
    if isinstance(x, RunTable):
        return x.rows, x.runs, {"KIND": NAMES[x.dtype], "ALIGNED": x.aligned, "IN_RUNS": True}
    return x, 1, {"KIND": NAMES[x.dtype], "ALIGNED": True, "IN_RUNS": False}


@triton.jit
def there(address, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the element that an address points to."""
    found = address.to(tl.pointer_type(KIND))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def run_of(table, runs, i):
    """Number of the run that holds a coordinate, by bisection; of one coordinate or of many."""
    low = i * 0
    half = 1
    while half * 2 < runs:
        half *= 2
    while half > 0:
        middle = low + half
        begun = middle < runs
        begun = begun & (tl.load(table + runs + middle, mask=begun, other=0) <= i)
        low = tl.where(begun, middle, low)
        half = half // 2
    return low


@triton.jit
def place_of(table, runs, i, KIND: tl.constexpr):
    """Pointers to coordinates, wherever they lie."""
    return there(tl.load(table + run_of(table, runs, i)), KIND, False) + i


@triton.jit
def later_run(table, runs, run, start):
    """Number of the run that holds a coordinate, which lies in this one or behind it."""
    while tl.load(table + runs + run + 1) <= start:
        run += 1
    return run


@triton.jit
def tile_of(
    x, runs, run, start, numel, KIND: tl.constexpr, ALIGNED: tl.constexpr, IN_RUNS: tl.constexpr, TILE: tl.constexpr
):
    """Return the run, from this one on, in which a tile begins, where that lies, and whether it ends there, too."""
    if IN_RUNS:
        run = later_run(x, runs, run, start)
        source = there(tl.load(x + run), KIND, ALIGNED) + start
        whole = tl.load(x + runs + run + 1) >= start + TILE
    else:
        source = x + start
        whole = numel - start >= TILE
    return run, source, whole


@triton.jit
def read_tile(table, runs, run, i, end, KIND: tl.constexpr):
    """Elements of consecutive coordinates, of which the first lies in this run; zeros from ``end`` on."""
    found = tl.zeros(i.shape, KIND)
    while tl.load(table + runs + run) < end:
        inside = (i >= tl.load(table + runs + run)) & (i < tl.load(table + runs + run + 1))
        part = tl.load(there(tl.load(table + run), KIND, False) + i, mask=inside, other=0.0)
        found = tl.where(inside, part, found)
        run += 1
    return found


@triton.jit
def write_tile(table, runs, run, i, end, value, KIND: tl.constexpr):
    """Write what :func:`read_tile` reads."""
    while tl.load(table + runs + run) < end:
        inside = (i >= tl.load(table + runs + run)) & (i < tl.load(table + runs + run + 1))
        tl.store(there(tl.load(table + run), KIND, False) + i, value, mask=inside)
        run += 1
