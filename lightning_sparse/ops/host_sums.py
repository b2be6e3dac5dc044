"""Sums and extremes of a vector, on the CPU: in float64, and in an order that compiled code can follow."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.core.candidates import Candidates, Summed, Sums
from lightning_sparse.ops.host_arrays import buffer, compiled_for
from lightning_sparse.ops.host_reach import lowest

CHUNK = 1 << 16
"""Elements that are added up at once; compiled code has the same."""
LANES = 1 << 8
"""Sums are formed in as many parts: part j is that of elements j, j + LANES, ... of a chunk, in float64."""


def sums(x: Tensor, summed: Summed, candidates: Candidates | None = None, *, level: float = 0.0) -> Sums:
    """Sums over a vector; counted are magnitudes that reach a level and are not zero.

    Args:
        x: (numel,) finite values.
        summed: of what.
        candidates: of the group, where x is its accumulator and the level 0: they may save the pass.
        level: what magnitudes have beyond it is summed up for ``"beyond"``.
    """
    known = candidates.sums(x, summed) if candidates else None
    return _formed(x.numpy(), summed, level) if known is None else known


def excess(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Number, sum and sum of squares of ``|x| - threshold`` where that is not negative and x is not zero."""
    made = torch.tensor(sums(x, "beyond", level=threshold)[:3], dtype=torch.float64, device="cpu")
    return made[0], made[1], made[2]


def moments(x: Tensor, candidates: Candidates | None = None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, from sums in float64."""
    made, count = sums(x, "values", candidates), x.numel()
    mean = made.total / count
    variance = (made.squares - made.total * mean) / (count - 1) if count > 1 else math.nan
    deviation = variance if math.isnan(variance) else math.sqrt(max(variance, 0.0))
    return _scalar(mean), _scalar(deviation)


def mean_and_maximum(x: Tensor, candidates: Candidates | None = None) -> tuple[Tensor, Tensor]:
    """Of magnitudes, from a sum in float64."""
    made = sums(x, "magnitudes", candidates)
    return _scalar(min(made.total / x.numel(), made.largest)), _scalar(made.largest)  # also where the sum overflows


def log_sum(x: Tensor) -> Tensor:
    """Sum of ``ln |x|`` over the x that are not zero."""
    return _scalar(sums(x, "logarithms").logarithms)


def all_finite(x: Tensor) -> bool:
    """No NaN and no infinity in x."""
    if x.dtype == torch.float32 and x.is_contiguous() and (compiled := compiled_for(values := x.detach().numpy())):
        return compiled.all_finite(values)
    low, high = torch.aminmax(x)
    return math.isfinite(low) and math.isfinite(high)


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device="cpu")


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _formed(values: NDArray[np.floating], summed: Summed, level: float) -> Sums:
    bound = lowest(values.dtype, level)
    if compiled := compiled_for(values):
        return compiled.sums(values, summed, level, float(bound))
    total, squares, product, number, largest = _Sum(), _Sum(), _Product(), 0, 0.0
    for start in range(0, values.size, CHUNK):
        chunk = values[start : start + CHUNK]
        wide = buffer("wide", np.dtype(np.float64))[: chunk.size]
        if summed == "values":
            np.copyto(wide, chunk)
        else:
            magnitudes = np.abs(chunk, out=buffer("magnitudes", chunk.dtype)[: chunk.size])
            mask = buffer("mask", np.dtype(bool))[: chunk.size]
            largest = max(largest, float(magnitudes.max()))
            np.copyto(wide, magnitudes)
            number += int(np.count_nonzero(np.greater_equal(magnitudes, bound, out=mask)))
            if summed == "logarithms":
                np.copyto(magnitudes, 1, where=np.logical_not(mask, out=mask))
                product.multiply(magnitudes)
            elif summed == "beyond":
                np.subtract(wide, level, out=wide)
                np.maximum(wide, 0.0, out=wide)
        total.add(wide)
        np.multiply(wide, wide, out=wide)
        squares.add(wide)
    return Sums(number, total.value(), squares.value(), largest, *product.value())


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


class _Product:
    """A product of positive numbers, as a mantissa from 1/2 on below 1 and an exponent, in the order of a sum."""

    def __init__(self) -> None:
        self._lanes, self._exponent = np.ones(LANES), 0

    def multiply(self, values: NDArray[np.floating]) -> None:
        """By all elements of a vector of at most a chunk."""
        mantissas, exponents = np.frexp(values)
        self._exponent += int(exponents.sum(dtype=np.int64))
        wide, whole = mantissas.astype(np.float64), values.size // LANES
        if whole:
            self._keep(self._lanes * np.multiply.reduce(wide[: whole * LANES].reshape(whole, LANES), axis=0))
        rest = wide[whole * LANES :]
        self._lanes[: rest.size] *= rest
        self._keep(self._lanes)

    def _keep(self, lanes: NDArray[np.float64]) -> None:
        self._lanes, exponents = np.frexp(lanes)
        self._exponent += int(exponents.sum())

    def value(self) -> tuple[float, float]:
        """Mantissa and exponent."""
        self._keep(self._lanes)
        while self._lanes.size > 1:
            half = self._lanes.size // 2
            self._keep(self._lanes[:half] * self._lanes[half:])
        return float(self._lanes[0]), float(self._exponent)
