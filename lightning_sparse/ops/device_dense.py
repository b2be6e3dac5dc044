"""The pass that takes a gradient in, on a device: by a kernel in Triton, or by operations of torch.

:mod:`~lightning_sparse.engine.fused` has a pass of its own, which notes what will probably be picked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.ops import reference
from lightning_sparse.ops.on_cuda import compare, on_cuda

MOST_NUMEL = (1 << 31) - (1 << 13)
"""Longest vector: indices of a tile behind the end must fit into 31 bits."""
FEW = 4099
"""Values on which the kernel is tried."""


def accumulate_(acc: Tensor, grad: Tensor, decay: float) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.accumulate_`, of one run, which is not written to."""
    return (_in_triton if _takes(acc, grad) else _in_torch)(acc, grad, decay)


def _takes(acc: Tensor, grad: Tensor) -> bool:
    fits = acc.dtype == torch.float32 and grad.dtype != torch.float64 and acc.is_contiguous() and grad.is_contiguous()
    if not fits or not 0 < acc.numel() <= MOST_NUMEL or not on_cuda.takes(acc):
        return False

    def attempt() -> None:
        places, found = torch.arange(FEW, device=acc.device), []
        given = ((places * 1103 % FEW) / 64).to(grad.dtype)
        given[7] = torch.inf
        for accumulate in (_in_triton, _in_torch):
            kept = places / 8
            found.append({"acc": kept, "finite": accumulate(kept, given, 0.5)})
        compare(*found, dtype=grad.dtype)

    return on_cuda.tried((accumulate_, grad.dtype, acc.device), attempt)


def _in_triton(acc: Tensor, grad: Tensor, decay: float) -> Tensor:
    from lightning_sparse.ops.triton import dense as triton_dense

    finite = torch.ones((), dtype=torch.bool, device=acc.device)
    triton_dense.add_(acc, grad, decay, finite)
    return finite


def _in_torch(acc: Tensor, grad: Tensor, decay: float) -> Tensor:
    return reference.accumulate_(acc, [grad], decay)
