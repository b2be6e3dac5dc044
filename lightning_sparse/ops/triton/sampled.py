"""Values at places of many vectors, which lie in memory of their own: a table says where."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.adam import NAMES, _there
from lightning_sparse.ops.triton.launch import launch


@triton.jit
def _take(addresses, places, values, KIND: tl.constexpr, SIZE: tl.constexpr):
    address = tl.load(addresses + tl.program_id(0))
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    at = tl.load(places + i)
    found = tl.load(_there(address, KIND, False) + at, mask=(at >= 0) & (address != 0), other=float("nan"))
    tl.store(values + i, found.to(tl.float64))


def take(addresses: Tensor, places: Tensor, values: Tensor, kind: torch.dtype) -> None:
    """Write values.

    Args:
        addresses: (vectors,) int64, 0 for none.
        places: (vectors, s) int64, s a power of two.
        values: (vectors, s) float64, overwritten; NaN where there is no vector.
        kind: float32, bfloat16 or float16: type of the vectors.
    """
    launch(_take, len(addresses), addresses, places, values, warps=1, KIND=NAMES[kind], SIZE=places.shape[1])
