"""The need of UnionTopK for spare picks, followed on the device.

The meaning of the numbers is said in :class:`~lightning_sparse.methods.sparsifiers.UnionTopK`, whose tensor operations
give the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.launch import launch


@triton.jit(do_not_specialize=["k", "turn", "n"])
def _follow(
    state, union, after, spare, k, turn, n,
    KNOWN: tl.constexpr, MOST: tl.constexpr, MARGIN: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    fill = tl.load(state[0])
    wanted = tl.load(state[1])
    now = tl.load(state[2])
    before = tl.load(state[3])
    age = tl.load(state[4])
    share = k.to(tl.float64)
    most = tl.full((), MOST, tl.float64)
    zero = tl.full((), 0.0, tl.float64)
    one = tl.full((), 1.0, tl.float64)
    if KNOWN:
        named = tl.load(union)
        surplus = (named.to(tl.float64) - wanted) / wanted
        need = tl.where(surplus < 0, 2 * fill, fill - surplus)
        now_ = tl.maximum(now, tl.minimum(tl.maximum(need, zero), one))
        full = age + 1 >= WINDOW
        before_ = tl.where(full, now_, before)
        fill_ = tl.minimum(tl.maximum(before_, now_) + tl.full((), MARGIN, tl.float64) + one / share, most)
        known = named > 0
        fill = tl.where(known, fill_, fill)
        wanted = tl.where(known, share, wanted)
        now = tl.where(known, tl.where(full, zero, now_), now)
        before = tl.where(known, before_, before)
        age = tl.where(known, tl.where(full, zero, age + 1), age)
    else:
        wanted = share
    tl.store(after, fill)
    tl.store(after + 1, wanted)
    tl.store(after + 2, now)
    tl.store(after + 3, before)
    tl.store(after + 4, age)
    whole = (tl.where(n > 1, fill, zero) * share + n.to(tl.float64) - 1.0 - turn.to(tl.float64)) / n.to(tl.float64)
    tl.store(spare, tl.floor(whole).to(tl.int64))


def follow(
    state: Sequence[Tensor],
    union: Tensor | None,
    k: int,
    turn: int,
    n: int,
    most: float,
    margin: float,
    window: int,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Do the work of :func:`.union_topk._followed` for () float64 numbers and a () int64 union, in one launch."""
    after, spare = state[0].new_empty(5), state[0].new_empty((), dtype=torch.int64)
    launch(
        _follow, 1, tuple(state), after if union is None else union, after, spare, k, turn, n,
        KNOWN=union is not None, MOST=most, MARGIN=margin, WINDOW=window, warps=1,
    )  # fmt: skip
    return after.unbind(), spare
