"""The norm of a whole vector, in an order that does not change from run to run: 4 bytes a coordinate, two launches.

Each program adds up the squares of its own part in float64, lane by lane and then over lanes, and one program adds up
the parts. The operations of torch add in another order: results differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.addresses import vector_of
from lightning_sparse.ops.triton.launch import PROGRAMS, TILE, Share, launch
from lightning_sparse.ops.triton.runs import lying, read_tile, run_of, tile_of


@triton.jit(do_not_specialize=["numel", "per", "runs"])
def _parts(
    x, parts, numel, per, runs,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, IN_RUNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    total = tl.zeros((TILE,), tl.float64)
    run = pid * 0
    if IN_RUNS:
        run = run_of(x, runs, pid * per * TILE)
    for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
        start = tile * TILE
        i = tl.arange(0, TILE)
        run, source, whole = tile_of(x, runs, run, start, numel, KIND, ALIGNED, IN_RUNS, TILE)
        if whole:  # without a mask: 128 bits at once
            value = tl.load(source + i)
        else:
            if IN_RUNS:
                value = read_tile(x, runs, run, start + i, tl.minimum(start + TILE, numel), KIND)
            else:
                value = tl.load(source + i, mask=i < numel - start, other=0.0)
        wide = value.to(tl.float64)
        total += wide * wide
    tl.store(parts + pid, tl.sum(total))


@triton.jit(do_not_specialize=["programs"])
def _whole(parts, norm, programs, PROGRAMS: tl.constexpr):
    every = tl.arange(0, PROGRAMS)
    tl.store(norm, tl.sqrt(tl.sum(tl.load(parts + every, mask=every < programs, other=0.0))))


def norm(runs: Sequence[Tensor]) -> Tensor:
    """Do the work of :func:`.on_device.norm`, of float32, bfloat16 or float16; the same bits in any runs."""
    like, numel = runs[0], sum(run.numel() for run in runs)
    share, (first, number, kinds) = Share.of(numel), lying(vector_of(runs))
    parts, found = (like.new_empty(size, dtype=torch.float64) for size in ((share.programs,), ()))
    launch(_parts, share.programs, first, parts, numel, share.per, number, **kinds, TILE=TILE)
    launch(_whole, 1, parts, found, share.programs, PROGRAMS=PROGRAMS, warps=4)
    return found
