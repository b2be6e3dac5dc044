"""Sums and extremes of a vector, on the CPU: in float64, and in an order that compiled code can follow."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates, Summed, Sums
from lightning_sparse.ops.host_arrays import compiled_on
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
    return _formed(x, summed, level) if known is None else known


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
    if compiled := compiled_on(x):
        return compiled.all_finite(x)
    low, high = torch.aminmax(x)
    return math.isfinite(low) and math.isfinite(high)


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device="cpu")


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _formed(x: Tensor, summed: Summed, level: float) -> Sums:
    bound = lowest(x, level)
    if compiled := compiled_on(x):
        return compiled.sums(x, summed, level, bound)
    sums = torch.zeros(2, LANES, dtype=torch.float64, device="cpu")
    product, exponent, number, largest = torch.ones_like(sums[0]), 0, 0, 0.0
    for start in range(0, x.numel(), CHUNK):
        chunk = x[start : start + CHUNK]
        if summed == "values":
            wide = chunk.double()
        else:
            magnitudes = chunk.abs()
            counted = magnitudes >= bound
            largest, number = max(largest, float(magnitudes.max())), number + int(counted.sum())
            wide = magnitudes.double()
            if summed == "logarithms":
                mantissas, exponents = torch.frexp(wide.masked_fill(~counted, 1.0))
                product, more = torch.frexp(_lanes(mantissas, product, np.multiply))
                exponent += int(exponents.sum()) + int(more.sum())
            elif summed == "beyond":
                wide = (wide - level).clamp_(min=0.0)
        for lanes, values in zip(sums, (wide, wide * wide), strict=True):
            lanes.copy_(_lanes(values, lanes, np.add))
    while product.numel() > 1:
        first, second = sums.chunk(2, dim=1)
        sums = first + second
        first, second = product.chunk(2)
        product, more = torch.frexp(first * second)
        exponent += int(more.sum())
    product, more = torch.frexp(product)
    total, squares = sums.view(-1).tolist()
    return Sums(number, total, squares, largest, float(product), float(exponent + int(more.sum())))


def _lanes(values: Tensor, lanes: Tensor, two: np.ufunc) -> Tensor:
    """What has been formed of each lane, and of at most a chunk of further values, row after row.

    In numpy, which goes row by row; sums of torch take an order of their own, and cumulative ones six times as long.
    """
    x, made, whole = values.numpy(), lanes.numpy(), len(values) // LANES * LANES
    if whole:
        made = two(made, two.reduce(x[:whole].reshape(-1, LANES), axis=0))
    rest = x[whole:]
    return torch.from_numpy(np.concatenate([two(made[: rest.size], rest), made[rest.size :]]))
