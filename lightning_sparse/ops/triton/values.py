"""Work at the coordinates of an average: put it into the gradient's place, and take what was sent out of a residual."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.addresses import vector_of
from lightning_sparse.ops.triton.dense import tell_and_fill_
from lightning_sparse.ops.triton.launch import PICKS, PROGRAMS, launch
from lightning_sparse.ops.triton.runs import lying, place_of


@triton.jit(do_not_specialize=["slots", "numel", "runs"])
def _hand_over(
    grad, indices, average, scale, values, rounding, flags, slots, numel, largest, runs,
    SCALED: tl.constexpr, NARROW: tl.constexpr, KIND: tl.constexpr, IN_RUNS: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    wrong = tl.zeros((PICKS,), tl.int32)
    for start in range(pid * PICKS, slots, tl.num_programs(0) * PICKS):
        slot = start + tl.arange(0, PICKS)
        inside = slot < slots
        place = tl.load(indices + slot, mask=inside, other=0)
        value = tl.load(average + slot, mask=inside, other=0.0)
        given = value
        if SCALED:
            given = value * tl.load(scale)
        if NARROW:
            given = tl.where(given > largest, largest, tl.where(given < -largest, -largest, given))
        given = given.to(KIND)
        if IN_RUNS:  # noqa: SIM108
            places = place_of(grad, runs, place, KIND)
        else:
            places = grad + place
        tl.store(places, given, mask=inside & (place < numel))
        handed = given.to(tl.float32)
        checked = handed
        if SCALED:
            handed = tl.div_rn(handed, tl.load(scale))
        tl.store(values + slot, handed, mask=inside)
        if NARROW:
            tl.store(rounding + slot, value - handed, mask=inside)
            checked = value
        wrong |= (inside & ((tl.abs(checked) < float("inf")) == 0)).to(tl.int32)
    tl.store(flags + pid, tl.max(wrong))


def hand_over_(
    runs: Sequence[Tensor], indices: Tensor, average: Tensor, scale: Tensor | None, cleared: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Put an average into the gradient's place, in two launches; see :func:`.on_device.hand_over_`."""
    grad = vector_of(runs)
    if not cleared:
        runs[0].zero_() if len(runs) == 1 else torch._foreach_zero_(list(runs))
    slots, dtype, numel = indices.numel(), runs[0].dtype, sum(run.numel() for run in runs)
    narrow = dtype != torch.float32
    values, rounding = torch.empty_like(average), torch.empty_like(average) if narrow else None
    flags = indices.new_empty(max(1, min(PROGRAMS, -(-slots // PICKS))), dtype=torch.int32)
    first, number, kinds = lying(grad)
    del kinds["ALIGNED"]
    launch(
        _hand_over, flags.numel(), first, indices, average, average if scale is None else scale, values,
        values if rounding is None else rounding, flags, slots, numel, torch.finfo(dtype).max, number,
        SCALED=scale is not None, NARROW=narrow, **kinds, PICKS=PICKS, warps=4,
    )  # fmt: skip
    return values, rounding, tell_and_fill_(grad, flags, float("nan"))


@triton.jit(do_not_specialize=["slots", "numel"])
def _subtract_at(
    x, indices, values, slots, numel,
    EMPTY: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    live = slot < slots
    place = tl.load(indices + slot, mask=live, other=0)
    live &= place < numel
    if EMPTY:
        tl.store(x + place, tl.zeros((PICKS,), x.dtype.element_ty), mask=live)
    else:
        before = tl.load(indices + slot - 1, mask=live & (slot > 0), other=-1)
        value = tl.load(values + slot, mask=live, other=0.0)
        live &= (place != before) & (value != 0)
        left = tl.load(x + place, mask=live, other=0.0)
        tl.store(x + place, left - value, mask=live)


def subtract_at_(x: Tensor, indices: Tensor, values: Tensor | None) -> None:
    """Do the work of :func:`.on_device.subtract_at_`, which says it in words."""
    slots = indices.numel()
    launch(
        _subtract_at, -(-slots // PICKS), x, indices, x if values is None else values, slots, x.numel() - 1,
        EMPTY=values is None, PICKS=PICKS, warps=4,
    )  # fmt: skip
