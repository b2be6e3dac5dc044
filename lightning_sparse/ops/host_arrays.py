"""Vectors on the CPU as numpy sees them: views, pieces that stay in cache, and buffers of each thread.

Page faults of what is allocated anew double every pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.ops.c import native

CHUNK = 1 << 17
"""Elements per chunk: few enough to stay in cache, and so many that what Python does for each of them hardly counts."""
LINE = 64
"""Bytes of a line of the cache."""

Found = tuple[NDArray[np.int32], NDArray[np.floating]]
"""Ascending coordinates and their magnitudes."""

_buffers = threading.local()


def compiled_for(first: NDArray[Any]) -> native.Native | None:
    """The compiled kernels, where there are some for this vector."""
    return native.library if first.dtype == np.float32 and first.flags.c_contiguous else None


def compiled_on(first: Tensor, *others: Tensor) -> native.Native | None:
    """The compiled kernels, where there are some for a vector of float32 and others of dtypes that gradients have."""
    if native.library is None or first.dtype != torch.float32 or not first.is_contiguous():
        return None
    for x in others:
        if x.dtype not in native.KINDS or not x.is_contiguous():
            return None
    return native.library


def bits_of(x: Tensor) -> NDArray[Any]:
    """A view of a vector; bfloat16, which numpy does not know, as integers."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def zeros(size: int, dtype: torch.dtype) -> Tensor:
    """(size,) that begins with a line of the cache, in large pages where the system has some: numpy asks for them.

    Places all over a vector are then reached faster, and all of it, too. Torch does not ask.
    """
    kind = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    room = np.zeros(size + LINE // kind.itemsize, kind)
    first = -room.ctypes.data % LINE // kind.itemsize
    return torch.from_numpy(room[first : first + size])


def chunks(runs: Sequence[NDArray[Any]]) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Pieces of runs that stay in cache, and which coordinates they hold."""
    start = 0
    for run in runs:
        for at in range(0, run.size, CHUNK):
            piece = run[at : at + CHUNK]
            yield slice(start, start + piece.size), piece
            start += piece.size


def places_of(flags: NDArray[np.bool_]) -> NDArray[np.intp]:
    """``np.flatnonzero`` of a vector of flags.

    Up to a tenth that is set, numpy looks for one after the other, with branches that nobody can predict. Of eights
    with any flag set there are more, and among the flags of these.
    """
    whole = flags.size // 8 * 8
    eights = flags[:whole].view(np.uint64)
    some = (eights != 0).nonzero()[0]
    if 5 * some.size > 3 * eights.size:
        return flags.nonzero()[0]
    inside = eights.take(some).view(bool).nonzero()[0]
    places = (some << 3).take(inside >> 3)
    places += inside & 7
    rest = flags[whole:].nonzero()[0]
    return np.concatenate((places, rest + whole)) if rest.size else places


def buffer(use: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """(CHUNK,) for one use, the same again in each call of a thread."""
    buffers: dict[str, NDArray[Any]] = _buffers.__dict__
    key = dtype.char + use
    if key not in buffers:
        buffers[key] = np.empty(CHUNK, dtype=dtype)
    return buffers[key]


def joined(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Vectors behind each other; there may be none."""
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
