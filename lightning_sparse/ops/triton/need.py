"""The beginning of a step of the default: its scratch is emptied, and the need for spare picks is followed.

What the numbers mean is said in :class:`~lightning_sparse.methods.sparsifiers.UnionTopK`, whose tensor operations give
the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.launch import TILE, launch


@triton.jit(do_not_specialize=["k", "turn", "n", "words"])
def _begin(
    scratch, void, state, union, after, spare, k, turn, n, words,
    KNOWN: tl.constexpr, MOST: tl.constexpr, MARGIN: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i = pid * TILE + tl.arange(0, TILE)
    tl.store(scratch + i, tl.zeros((TILE,), tl.int32), mask=i < words)
    if pid == 0:
        tl.store(void, 0)
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
        whole = (fill * share + n.to(tl.float64) - 1.0 - turn.to(tl.float64)) / n.to(tl.float64)
        tl.store(spare, tl.floor(whole).to(tl.int32))


def begin(
    scratch: Tensor,
    void: Tensor,
    state: Sequence[Tensor],
    union: Tensor | None,
    k: int,
    turn: int,
    n: int,
    *,
    most: float,
    margin: float,
    window: int,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Empty the scratch and the flag, and follow the need.

    Args:
        scratch: int32, becomes zero.
        void: () uint8, becomes zero.
        state: five () float64 numbers: fill, wanted, now, before, age.
        union: () int64 coordinates that were named in the step before, -1 where only the device knows that there was
            none; None: there was none.
        k: coordinates that are wanted.
        turn: which stripe is this rank's.
        n: number of ranks.
        most: largest fill.
        margin: what is added to the need, as a share of k.
        window: steps after which a need begins to be forgotten.

    Returns:
        The next five numbers, and () int32 how many spare picks this rank makes.
    """
    after, spare = state[0].new_empty(5), void.new_empty((), dtype=torch.int32)
    launch(
        _begin, -(-scratch.numel() // TILE), scratch, void, tuple(state), scratch if union is None else union, after,
        spare, k, turn, n, scratch.numel(), KNOWN=union is not None, MOST=most, MARGIN=margin, WINDOW=window,
        TILE=TILE, warps=4,
    )  # fmt: skip
    return after.unbind(), spare
