"""The norm of a whole vector, in an order that does not change from run to run: 4 bytes a coordinate, two launches.

Each program adds up the squares of its own part in float64, lane by lane and then over lanes, and one program adds up
the parts. The operations of torch add in another order: results differ in their last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.launch import PROGRAMS, TILE, Share, launch


@triton.jit(do_not_specialize=["numel", "per"])
def _parts(x, parts, numel, per, TILE: tl.constexpr):
    pid = tl.program_id(0)
    total = tl.zeros((TILE,), tl.float64)
    for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
        i = tile * TILE + tl.arange(0, TILE)
        if tile * TILE + TILE <= numel:  # noqa: SIM108  # without a mask: 128 bits at once
            value = tl.load(x + i)
        else:
            value = tl.load(x + i, mask=i < numel, other=0.0)
        wide = value.to(tl.float64)
        total += wide * wide
    tl.store(parts + pid, tl.sum(total))


@triton.jit(do_not_specialize=["programs"])
def _whole(parts, norm, programs, PROGRAMS: tl.constexpr):
    every = tl.arange(0, PROGRAMS)
    tl.store(norm, tl.sqrt(tl.sum(tl.load(parts + every, mask=every < programs, other=0.0))))


def norm(x: Tensor) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.length.norm`, of float32, bfloat16 or float16."""
    share = Share.of(x.numel())
    parts, found = x.new_empty(share.programs, dtype=torch.float64), x.new_empty((), dtype=torch.float64)
    launch(_parts, share.programs, x, parts, x.numel(), share.per, TILE=TILE)
    launch(_whole, 1, parts, found, share.programs, PROGRAMS=PROGRAMS, warps=4)
    return found
