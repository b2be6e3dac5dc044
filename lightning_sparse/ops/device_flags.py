"""Work on CUDA that is done only if a flag is set there: in Triton, without touching anything if it is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sparse.ops.on_cuda import on_cuda

MOST_NUMEL = (1 << 31) - (1 << 13)
"""Longest vector: indices of a tile behind the end must fit into 31 bits."""
MOST_CHOSEN = 512
"""Longest tensor that is chosen between."""


def fill_if_(x: Tensor, flag: Tensor, value: float) -> bool:
    """Fill all of a vector if the flag is set; False if nothing was done, as there is no kernel for it."""
    if not _takes(x, flag):
        return False
    from lightning_sparse.ops.triton import dense as triton_dense

    if not on_cuda.tried((fill_if_, x.dtype), lambda: triton_dense.fill_if_(x[:0], flag, value)):
        return False
    triton_dense.fill_if_(x, flag, value)
    return True


def choose(flag: Tensor, yes: Any, no: Any) -> Any:
    """Choose all tensors in one launch (:func:`lightning_sparse.ops.choose`); None if there is no kernel for it."""
    pairs: list[tuple[Tensor, Tensor]] = []
    if not on_cuda.takes(flag) or not isinstance(no, tuple) or not _pairs(yes, no, pairs) or not pairs:
        return None
    from lightning_sparse.ops.triton import dense as triton_dense

    first, second = zip(*pairs, strict=True)
    out = tuple(torch.empty_like(x) for x in second)
    what = choose, tuple((x.dtype, x.numel()) for x in out)
    if not on_cuda.tried(what, lambda: triton_dense.choose(flag, first, second, out)):
        return None
    triton_dense.choose(flag, first, second, out)
    return _rebuilt(no, iter(out))


def _takes(x: Tensor, flag: Tensor) -> bool:
    return on_cuda.takes(x) and flag.device == x.device and x.is_contiguous() and 0 < x.numel() < MOST_NUMEL


def _pairs(yes: Any, no: Any, found: list[tuple[Tensor, Tensor]]) -> bool:
    """Find pairs of tensors in tuples; False if there are some between which a kernel cannot choose."""
    if isinstance(no, Tensor) and isinstance(yes, Tensor):
        found.append((yes, no))
        alike = yes.shape == no.shape and yes.dtype == no.dtype and yes.device == no.device
        return alike and yes.is_contiguous() and no.is_contiguous() and 0 < no.numel() <= MOST_CHOSEN
    if isinstance(no, tuple) and isinstance(yes, tuple):
        return all(_pairs(a, b, found) for a, b in zip(yes, no, strict=True))
    return not isinstance(no, Tensor)


def _rebuilt(no: Any, chosen: Any) -> Any:
    """The tuples again, with what was chosen."""
    if isinstance(no, Tensor):
        return next(chosen)
    if isinstance(no, tuple):
        parts = [_rebuilt(one, chosen) for one in no]
        return type(no)(*parts) if hasattr(no, "_fields") else tuple(parts)
    return no
