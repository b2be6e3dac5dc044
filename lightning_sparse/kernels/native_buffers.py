"""Where the library finds what Python owns: addresses, and buffers of each thread."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SLACK = 16
"""Slots behind what is found that the library may write to."""

long = ctypes.c_int64

_buffers = threading.local()


def at(x: NDArray[Any] | Tensor) -> ctypes.c_void_p:
    """Where it lies; the caller keeps it."""
    address = x.data_ptr() if isinstance(x, Tensor) else x.__array_interface__["data"][0]
    return ctypes.c_void_p(address)


def space(use: str, size: int, dtype: type[np.generic]) -> NDArray[Any]:
    """A buffer of this thread, at least as long; touched as far as it is used."""
    buffer: NDArray[Any] | None = _buffers.__dict__.get(use)
    if buffer is None or buffer.size < size:
        buffer = _buffers.__dict__[use] = np.empty(size, dtype)
    return buffer


def zeros(use: str, size: int) -> NDArray[np.uint8]:
    """A buffer of this thread that is zero whenever nobody works with it."""
    table: NDArray[np.uint8] | None = _buffers.__dict__.get(use)
    if table is None:
        table = _buffers.__dict__[use] = np.zeros(size, np.uint8)
    return table
