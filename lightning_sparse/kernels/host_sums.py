"""Sums and extremes of a vector, on the CPU: in float64, and in an order that compiled code can follow."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.kernels.host_arrays import CHUNK, buffer, compiled_for, magnitudes_of
from lightning_sparse.kernels.host_reach import lowest

LANES = 1 << 10
"""Sums are formed in as many parts: part j is that of elements j, j + LANES, ... of a chunk, in float64."""


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def excess(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Number, sum and sum of squares of ``|x| - threshold`` where that is not negative and x is not zero."""
    values = x.numpy()
    bound, level = lowest(values.dtype, threshold), np.float64(threshold)
    if compiled := compiled_for(values):
        made = torch.tensor(compiled.excess(values, threshold, float(bound)), dtype=torch.float64, device="cpu")
        return made[0], made[1], made[2]
    count, total, squares = 0, _Sum(), _Sum()
    for start in range(0, values.size, CHUNK):
        magnitudes, mask = magnitudes_of(values[start : start + CHUNK])
        count += int(np.count_nonzero(np.greater_equal(magnitudes, bound, out=mask)))
        beyond = buffer("wide", np.dtype(np.float64))[: magnitudes.size]
        np.subtract(magnitudes, level, out=beyond)
        np.maximum(beyond, 0.0, out=beyond)
        total.add(beyond)
        np.multiply(beyond, beyond, out=beyond)
        squares.add(beyond)
    return _scalar(count), _scalar(total.value()), _scalar(squares.value())


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, from sums in float64."""
    values = x.numpy()
    compiled = compiled_for(values)
    total, squares = compiled.moments(values) if compiled else _moments(values)
    count, mean = values.size, total / values.size
    variance = (squares - total * mean) / (count - 1) if count > 1 else math.nan
    deviation = variance if math.isnan(variance) else math.sqrt(max(variance, 0.0))
    return _scalar(mean), _scalar(deviation)


def mean_and_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of magnitudes, from a sum in float64."""
    values = x.numpy()
    compiled = compiled_for(values)
    total, largest = compiled.sum_and_maximum(values) if compiled else _sum_and_maximum(values)
    return _scalar(min(total / values.size, largest)), _scalar(largest)  # also where the sum overflows


def log_sum(x: Tensor) -> Tensor:
    """Sum of ``ln |x|`` over the x that are not zero."""
    values = x.numpy()
    bound, total = lowest(values.dtype, 0.0), 0.0
    for start in range(0, values.size, CHUNK):
        magnitudes, mask = magnitudes_of(values[start : start + CHUNK])
        np.less(magnitudes, bound, out=mask)
        np.copyto(magnitudes, 1, where=mask)
        total += float(np.log(magnitudes, out=magnitudes).sum(dtype=np.float64))
    return _scalar(total)


def all_finite(x: Tensor) -> bool:
    """No NaN and no infinity in x."""
    if x.dtype == torch.float32 and x.is_contiguous() and (compiled := compiled_for(values := x.detach().numpy())):
        return compiled.all_finite(values)
    low, high = torch.aminmax(x)
    return math.isfinite(low) and math.isfinite(high)


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device="cpu")


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _moments(values: NDArray[np.floating]) -> tuple[float, float]:
    total, squares = _Sum(), _Sum()
    for start in range(0, values.size, CHUNK):
        chunk = values[start : start + CHUNK]
        wide = buffer("wide", np.dtype(np.float64))[: chunk.size]
        np.copyto(wide, chunk)
        total.add(wide)
        np.multiply(wide, wide, out=wide)
        squares.add(wide)
    return total.value(), squares.value()


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _sum_and_maximum(values: NDArray[np.floating]) -> tuple[float, float]:
    """Of magnitudes."""
    total, largest = _Sum(), 0.0
    for start in range(0, values.size, CHUNK):
        magnitudes, _ = magnitudes_of(values[start : start + CHUNK])
        largest = max(largest, float(magnitudes.max()))
        wide = buffer("wide", np.dtype(np.float64))[: magnitudes.size]
        np.copyto(wide, magnitudes)
        total.add(wide)
    return total.value(), largest


class _Sum:
    """A sum of float64 vectors, in an order that compiled code can follow."""

    def __init__(self) -> None:
        self._lanes = np.zeros(LANES)

    def add(self, values: NDArray[np.float64]) -> None:
        """All elements of a vector of at most a chunk."""
        whole = values.size // LANES
        if whole:
            self._lanes += np.add.reduce(values[: whole * LANES].reshape(whole, LANES), axis=0)
        rest = values[whole * LANES :]
        self._lanes[: rest.size] += rest

    def value(self) -> float:
        """The sum."""
        lanes = self._lanes
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        return float(lanes[0])
