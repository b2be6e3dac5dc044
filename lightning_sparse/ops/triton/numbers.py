"""Single numbers that steps follow on the device, in one launch of one program each.

The length of gradients: :func:`.length.measure` says what is computed. And the need of UnionTopK for spare picks, whose
numbers :class:`~lightning_sparse.methods.sparsifiers.UnionTopK` explains: its tensor operations give the same, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.launch import launch


@triton.jit
def _number(x: tl.constexpr):
    """In double precision: numbers that kernels are given have float32's."""
    return tl.full((), x, tl.float64)


@triton.jit(do_not_specialize=["numel"])
def _measure(
    lengths, norm, units, numel, beta2, rest,
    KEEP: tl.constexpr, LONG: tl.constexpr, FAR: tl.constexpr, ACTS: tl.constexpr,
):  # fmt: skip
    keep = _number(KEEP)
    add = 1.0 - keep
    far = _number(FAR)
    mean = tl.load(lengths)
    known = tl.load(lengths + 1)
    unit = tl.load(lengths + 2)
    size = tl.load(norm)
    square = size * size * (1.0 / (_number(1.0) * numel))
    counts = (square > 0) & (square < float("inf"))
    most = _number(LONG) * _number(LONG) * (mean / tl.where(known > 0, known, 1.0))
    clips = counts & (most > 0) & (square > most) & ACTS
    share = tl.where(clips, most / tl.where(counts, square, 1.0), 1.0)
    mean = tl.where(counts, keep * mean + add * share * square, mean)
    known = tl.where(counts, keep * known + add, known)
    length = tl.sqrt(mean / tl.where(known > 0, known, 1.0))
    moved = counts & ((length > far * unit) | (far * length < unit))
    anew = moved & (unit > 0) & ACTS
    carry = tl.where(anew, length / tl.where(unit > 0, unit, 1.0), 1.0)
    tl.store(lengths, mean)
    tl.store(lengths + 1, known)
    tl.store(lengths + 2, tl.where(moved, length, unit))
    tl.store(lengths + 3, tl.load(lengths + 3) + tl.where(clips, 1.0, 0.0))
    tl.store(lengths + 4, tl.load(lengths + 4) + tl.where(anew, 1.0, 0.0))
    tl.store(units, tl.where(square < float("inf"), tl.sqrt(share), float("nan")))
    tl.store(units + 1, carry)
    tl.store(units + 2, (_number(1.0) * beta2 + rest) * (carry * carry))


def measure(
    lengths: Tensor,
    norm: Tensor,
    units: Tensor,
    numel: int,
    beta2: float,
    acts: bool,
    keep: float,
    long: float,
    far: float,
) -> None:
    """One launch of one program; the arguments are those of :func:`.length.measure`, ``units`` is what it returns."""
    beta2_float = float(np.float32(beta2))
    launch(
        _measure, 1, lengths, norm, units, numel, beta2_float, beta2 - beta2_float, warps=1,
        KEEP=keep, LONG=long, FAR=far, ACTS=acts,
    )  # fmt: skip


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
    most = _number(MOST)
    zero = _number(0.0)
    one = _number(1.0)
    if KNOWN:
        named = tl.load(union)
        surplus = (named.to(tl.float64) - wanted) / wanted
        need = tl.where(surplus < 0, 2 * fill, fill - surplus)
        now_ = tl.maximum(now, tl.minimum(tl.maximum(need, zero), one))
        full = age + 1 >= WINDOW
        before_ = tl.where(full, now_, before)
        fill_ = tl.minimum(tl.maximum(before_, now_) + _number(MARGIN) + one / share, most)
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
    """Do the work of :func:`.union_top_k._followed` for () float64 numbers and a () int64 union, in one launch."""
    after, spare = state[0].new_empty(5), state[0].new_empty((), dtype=torch.int64)
    launch(
        _follow, 1, tuple(state), after if union is None else union, after, spare, k, turn, n,
        KNOWN=union is not None, MOST=most, MARGIN=margin, WINDOW=window, warps=1,
    )  # fmt: skip
    return after.unbind(), spare
