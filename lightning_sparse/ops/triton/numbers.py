"""The length of gradients, which steps follow on the device: :func:`.length.measure` says what is computed."""

from __future__ import annotations

import numpy as np
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
