"""The functions of host.c, compiled, for numpy arrays. Which are used: :mod:`~lightning_sparse.kernels.library`."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.kernels.library import choose

KINDS = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}
"""Of gradients; bfloat16 comes as its bits."""

SLACK = 16
"""Slots behind what is found that the library may write to."""

Found = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Ascending coordinates and their magnitudes."""

_buffers = threading.local()


class Native:
    """The functions of the library; what they compute is said in :mod:`~lightning_sparse.kernels.host`.

    Args:
        library: as :func:`~lightning_sparse.kernels.library.load` gives it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("ls_accumulate", "ls_above"):
            getattr(library, name).restype = ctypes.c_int64

    def accumulate(
        self,
        acc: NDArray[np.float32],
        residual: NDArray[np.float32],
        grad: NDArray[Any],
        bound: float,
        room: int,
    ) -> tuple[Found | None, bool]:
        """``acc = residual + grad`` and ``grad = 0``; what reaches a bound, and whether all is finite."""
        indices, magnitudes = _scratch(room)
        finite = ctypes.c_int32()
        count = self._library.ls_accumulate(
            _at(acc), _at(residual), _at(grad), KINDS[grad.dtype], _long(acc.size), ctypes.c_float(bound), _long(0),
            _at(indices), _at(magnitudes), _long(room), ctypes.byref(finite),
        )  # fmt: skip
        found = None if count > room else (indices[:count].copy(), magnitudes[:count].copy())
        return found, bool(finite.value)

    def above(self, matrix: NDArray[np.float32], bound: float) -> Found:
        """What of the rows of a matrix reaches a bound, by place in their sequence."""
        room = matrix.size // 8 + 64
        indices, magnitudes = _scratch(room)
        count = self._above(matrix, bound, indices, magnitudes)
        if count <= room:
            return indices[:count].copy(), magnitudes[:count].copy()
        indices, magnitudes = np.empty(count + SLACK, np.int32), np.empty(count + SLACK, np.float32)
        self._above(matrix, bound, indices, magnitudes)
        return indices[:count], magnitudes[:count]

    def tail(self, values: NDArray[np.float32], bound: float) -> NDArray[np.float32]:
        """The magnitudes that reach a bound, in a buffer of this thread."""
        buffer = _buffers.__dict__.get("tail")
        if buffer is None or buffer.size < values.size + SLACK:
            buffer = _buffers.__dict__["tail"] = np.empty(values.size + SLACK, np.float32)  # touched as far as it is used
        found: NDArray[np.float32] = buffer[: self._above(values[None], bound, None, buffer)]
        return found

    def _above(
        self,
        matrix: NDArray[np.float32],
        bound: float,
        indices: NDArray[np.int32] | None,
        magnitudes: NDArray[np.float32],
    ) -> int:
        rows, columns = matrix.shape
        count: int = self._library.ls_above(
            _at(matrix), _long(rows), _long(columns), _long(matrix.strides[0] // 4), ctypes.c_float(bound), _long(0),
            None if indices is None else _at(indices), _at(magnitudes), _long(magnitudes.size - SLACK),
        )  # fmt: skip
        return count

    def all_finite(self, values: NDArray[np.float32]) -> bool:
        """No NaN and no infinity."""
        return bool(self._library.ls_all_finite(_at(values), _long(values.size)))

    def excess(self, values: NDArray[np.float32], level: float, bound: float) -> tuple[float, float, float]:
        """Number of magnitudes that reach the bound; sum and sum of squares of what they have beyond the level."""
        out = (ctypes.c_double * 3)()
        self._library.ls_excess(_at(values), _long(values.size), ctypes.c_double(level), ctypes.c_float(bound), out)
        return out[0], out[1], out[2]

    def moments(self, values: NDArray[np.float32]) -> tuple[float, float]:
        """Sum and sum of squares."""
        out = (ctypes.c_double * 2)()
        self._library.ls_moments(_at(values), _long(values.size), out)
        return out[0], out[1]

    def sum_and_maximum(self, values: NDArray[np.float32]) -> tuple[float, float]:
        """Of magnitudes."""
        out = (ctypes.c_double * 2)()
        self._library.ls_sum_and_maximum(_at(values), _long(values.size), out)
        return out[0], out[1]

    def take(self, values: NDArray[np.float32], indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """``values[indices]``."""
        out = np.empty(indices.size, np.float32)
        if self._library.ls_take(_at(values), _long(values.size), _at(indices), _long(indices.size), _at(out)):
            raise IndexError(f"an index is outside of a vector of {values.size}")
        return out

    def put(self, values: NDArray[np.float32], indices: NDArray[np.int64], new: NDArray[np.float32]) -> None:
        """``values[indices] = new``."""
        if self._library.ls_put(_at(values), _long(values.size), _at(indices), _long(indices.size), _at(new)):
            raise IndexError(f"an index is outside of a vector of {values.size}")


def _scratch(room: int) -> Found:
    """Buffers of this thread for coordinates and magnitudes."""
    found: Found | None = _buffers.__dict__.get("found")
    size = room + SLACK
    if found is None or found[0].size < size:
        found = _buffers.__dict__["found"] = np.empty(size, np.int32), np.empty(size, np.float32)
    return found[0][:size], found[1][:size]


def _at(x: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


_long = ctypes.c_int64

_chosen, description = choose()
library = None if _chosen is None else Native(_chosen)
"""What :mod:`~lightning_sparse.kernels.host` uses, None for numpy alone; :data:`description` says it in words."""
