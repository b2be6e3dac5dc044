"""Values that were sent leave a vector on a device, by a kernel in Triton or by operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.ops.on_cuda import compare, on_cuda


def subtract_at_(x: Tensor, indices: Tensor, values: Tensor | None, skipped: Tensor | None) -> None:
    """Do the work of :func:`lightning_sparse.ops.subtract_at_`; coordinates may be int32, too.

    Values at the padding index count for nothing, and where the flag is set, values may be NaN.

    Example:
        >>> x = torch.tensor([5.0, 6.0, 7.0, 0.0])
        >>> subtract_at_(x, torch.tensor([0, 2, 3]), torch.tensor([1.0, 2.0, 9.0]), None)
        >>> subtract_at_(x, torch.tensor([0, 2, 3]), None, torch.tensor(True))
        >>> x
        tensor([4., 6., 5., 0.])
    """
    (_in_triton if _takes(x, indices, values, skipped) else _in_torch)(x, indices, values, skipped)


def _takes(x: Tensor, indices: Tensor, values: Tensor | None, skipped: Tensor | None) -> bool:
    given = [each for each in (x, indices, values) if each is not None]
    fits = x.dtype in (torch.float32, torch.float64) and indices.numel() > 0 and indices.numel() < 1 << 31
    if not fits or not on_cuda.takes(x) or not all(map(Tensor.is_contiguous, given)):
        return False
    if values is not None and values.dtype != x.dtype:
        return False

    def attempt() -> None:
        few = x.new_tensor([1.5, -2.0, 3.25, 0.0, 5.0, 0.0])
        places, taken = indices.new_tensor([0, 2, 2, 5, 5]), x.new_tensor([0.5, 3.0, 3.0, 7.0, 0.0])
        flags = [None] if skipped is None else [torch.full_like(skipped, flag) for flag in (False, True)]
        for flag in flags:
            found = few.clone(), few.clone()
            for one, subtract in zip(found, (_in_triton, _in_torch), strict=True):
                subtract(one, places, None if values is None else taken, flag)
            compare(*({"x": one} for one in found), dtype=x.dtype, skipped=flag)

    what = subtract_at_, x.dtype, indices.dtype, values is None, skipped is None, x.device
    return on_cuda.tried(what, attempt)


def _in_triton(x: Tensor, indices: Tensor, values: Tensor | None, skipped: Tensor | None) -> None:
    from lightning_sparse.ops.triton import values as triton_values

    triton_values.subtract_at_(x, indices, values, skipped)


def _in_torch(x: Tensor, indices: Tensor, values: Tensor | None, skipped: Tensor | None) -> None:
    indices = indices.long()
    if skipped is not None:
        indices = indices.masked_fill(skipped, x.numel() - 1)
    if values is None:
        x.index_fill_(0, indices, 0.0)
        return
    # Not index_add_: a repeated coordinate must count once.
    x.index_copy_(0, indices, x[indices].sub_(values))
    x[-1:].zero_()
