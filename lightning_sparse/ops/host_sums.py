"""Sums and extremes of a vector, on the CPU: in float64, and in an order that compiled code can follow."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.ops.host_arrays import compiled_on
from lightning_sparse.ops.host_reach import lowest

Array = NDArray[Any]
Summed = Literal["values", "magnitudes", "logarithms", "beyond"]
"""Terms of the sums over a vector, next to their squares: values; magnitudes; magnitudes and their logarithms; or the
excess of magnitudes over a level."""
SUMMED: tuple[Summed, ...] = get_args(Summed)

CHUNK = 1 << 16
"""Elements that are added up at once; compiled code has the same."""
LANES = 1 << 8
"""Sums are formed in as many parts: part j is that of elements j, j + LANES, ... of a chunk, in float64."""


class Sums(NamedTuple):
    """Sums over a vector, in float64."""

    number: float
    """Number of magnitudes that reach the bound, by default the smallest normal number; unused for values."""
    total: float
    squares: float
    """Sum of squares."""
    largest: float
    """Largest magnitude; unused for values."""
    mantissa: float
    """Mantissa of the product of the counted magnitudes; for logarithms only."""
    exponent: float
    """The product is ``mantissa * 2 ** exponent``."""

    @property
    def logarithms(self) -> float:
        """Sum of the logarithms of the counted magnitudes."""
        return math.log(self.mantissa) + self.exponent * math.log(2)


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def sums(x: Tensor, summed: Summed, *, level: float = 0.0) -> Sums:
    """Return sums over a vector; counted are magnitudes that reach a level and are not zero.

    Args:
        x: (numel,) finite values.
        summed: of what.
        level: what magnitudes have beyond it is summed up for ``"beyond"``.
    """
    bound = lowest(x, level)
    if compiled := compiled_on(x):
        return Sums(*compiled.sums(x, SUMMED.index(summed) + 1, level, bound))
    totals, product, exponent, number, largest = np.zeros((2, LANES)), np.ones(LANES), 0, 0, 0.0
    for chunk in torch.split(x, CHUNK):
        wide = chunk.numpy().astype(np.float64)
        if summed != "values":
            wide = np.abs(wide)
            counted = wide >= bound
            number, largest = number + int(np.count_nonzero(counted)), max(largest, wide.max(initial=0.0))
        if summed == "logarithms":
            mantissas, exponents = np.frexp(np.where(counted, wide, 1.0))
            product, more = np.frexp(_lanes(product, mantissas, np.multiply))
            exponent += exponents.sum() + more.sum()
        elif summed == "beyond":
            wide = np.maximum(wide - level, 0.0)
        totals = np.stack([_lanes(*each, np.add) for each in zip(totals, (wide, wide * wide), strict=True)])
    while product.size > 1:
        totals = np.add(*np.split(totals, 2, axis=1))
        product, more = np.frexp(np.multiply(*np.split(product, 2)))
        exponent += more.sum()
    total, squares = totals.ravel().tolist()
    return Sums(number, total, squares, float(largest), float(product[0]), float(exponent))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation, from sums in float64."""
    made, count = sums(x, "values"), x.numel()
    mean = made.total / count
    variance = (made.squares - made.total * mean) / (count - 1) if count > 1 else math.nan
    deviation = variance if math.isnan(variance) else math.sqrt(max(variance, 0.0))
    return _scalar(mean), _scalar(deviation)


def mean_and_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return both of magnitudes, from a sum in float64."""
    made = sums(x, "magnitudes")
    return _scalar(min(made.total / x.numel(), made.largest)), _scalar(made.largest)  # also where the sum overflows


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def _lanes(made: Array, values: Array, two: np.ufunc) -> Array:
    """Form of each lane what has been made, and of at most a chunk of further values, row after row.

    In numpy, which goes row by row; sums of torch take an order of their own, and cumulative ones six times as long.
    """
    whole = len(values) // LANES * LANES
    if whole:
        made = two(made, two.reduce(values[:whole].reshape(-1, LANES), axis=0))
    rest = values[whole:]
    return np.concatenate([two(made[: rest.size], rest), made[rest.size :]])
