"""Vectors on the CPU: which functions take them, where they lie, and pieces of them that stay in cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.ops.c import native

CHUNK = 1 << 18
"""Elements per chunk: few enough to stay in cache, and so many that what Python does for each of them hardly counts."""
LINE = 64
"""Bytes of a line of the cache."""


def compiled_on(first: Tensor, *others: Tensor) -> native.Native | None:
    """The compiled kernels, where there are some for a vector of float32 and others of dtypes that gradients have."""
    if native.library is None or first.dtype != torch.float32 or not first.is_contiguous():
        return None
    for x in others:
        if x.dtype not in native.KINDS or not x.is_contiguous():
            return None
    return native.library


def zeros(size: int, dtype: torch.dtype) -> Tensor:
    """(size,) that begins with a line of the cache, in large pages where the system has some: numpy asks for them.

    Places all over a vector are then reached faster, and all of it, too. Torch does not ask.
    """
    kind = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    room = np.zeros(size + LINE // kind.itemsize, kind)
    first = -room.ctypes.data % LINE // kind.itemsize
    return torch.from_numpy(room[first : first + size])


def sqrt_(x: Tensor) -> Tensor:
    """Take roots in place, rounded alike on all processors: those of torch on CPUs may differ in the last bit."""
    if x.device.type != "cpu":
        return x.sqrt_()
    np.sqrt(x.numpy(), out=x.numpy())
    return x


def reach(magnitudes: Tensor, bound: float) -> Tensor:
    """Return which of some magnitudes reach a bound; in numpy, since torch takes seven times as long."""
    return torch.from_numpy(np.greater_equal(magnitudes.numpy(), bound))


def kth(magnitudes: Tensor, k: int) -> float:
    """Return the magnitude that k reach, itself among them; in numpy, since torch takes four times as long."""
    return float(np.partition(magnitudes.numpy(), -k)[-k])


def places_of(flags: Tensor) -> Tensor:
    """Return which of a vector of flags are set, ascending int64; in numpy, since torch takes four times as long."""
    return torch.from_numpy(flags.numpy().nonzero()[0])
