"""What of a vector reaches a threshold, on the CPU.

Torch's own ``nonzero`` takes several times longer: it allocates what it returns and what it compares with.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.candidates import Candidates
from lightning_sparse.kernels.host_arrays import CHUNK, Found, compiled_for, joined, magnitudes_of

MARGIN = 0.9
"""The next step's threshold is expected above this multiple of this one's."""


def above(x: Tensor, threshold: float, first: int, last: int, candidates: Candidates | None = None) -> Tensor:
    """Ascending coordinates in [first, last) with ``|x| >= threshold``."""
    values = x.numpy()
    bound = values.dtype.type(threshold)
    known = None
    if candidates is not None:
        known = candidates.reaching(x, float(bound))
        candidates.expect(MARGIN * float(bound))
    if known is None:
        return torch.from_numpy(reaching(values[first:last], bound)[0].astype(np.int64) + first)
    if (first, last) != (0, values.size):
        inside = slice(*np.searchsorted(known[0], (first, last)))
        known = known[0][inside], known[1][inside]
    return torch.from_numpy(those_reaching(known, float(bound)))


def tail(x: Tensor, threshold: float) -> Tensor:
    """The magnitudes that reach a threshold, without zeros."""
    values = x.numpy()
    bound = lowest(values.dtype, threshold)
    if compiled := compiled_for(values):
        return torch.from_numpy(compiled.tail(values, float(bound)))
    return torch.from_numpy(reaching(values, bound)[1])


def reached(magnitudes: Tensor, threshold: float) -> int:
    """How many magnitudes reach a threshold, compared in their precision."""
    values = magnitudes.numpy()
    if compiled := compiled_for(values):
        return compiled.reached(values, threshold)
    return int(np.count_nonzero(values >= values.dtype.type(threshold)))


def reaching_of(indices: Tensor, magnitudes: Tensor, threshold: float) -> Tensor:
    """The int32 coordinates whose magnitudes reach a threshold, as int64."""
    return torch.from_numpy(those_reaching((indices.numpy(), magnitudes.numpy()), threshold))


def those_reaching(known: Found, threshold: float) -> NDArray[np.int64]:
    """The coordinates of those whose magnitudes reach a threshold."""
    indices, magnitudes = known
    if compiled := compiled_for(magnitudes):
        return compiled.reaching(known, threshold)
    return indices.take(np.flatnonzero(magnitudes >= magnitudes.dtype.type(threshold))).astype(np.int64)


def reaching(values: NDArray[np.floating], bound: np.floating) -> Found:
    """What of a vector reaches a bound, with magnitudes."""
    if compiled := compiled_for(values):
        return compiled.above(values[None], float(bound))
    indices: list[NDArray[np.int32]] = []
    found: list[NDArray[np.floating]] = []
    for start in range(0, values.size, CHUNK):
        magnitudes, mask = magnitudes_of(values[start : start + CHUNK])
        np.greater_equal(magnitudes, bound, out=mask)
        hits = np.flatnonzero(mask)
        if hits.size:
            found.append(magnitudes.take(hits))  # a boolean index takes ten times as long
            hits += start
            indices.append(hits.astype(np.int32))
    return joined(indices, np.dtype(np.int32)), joined(found, values.dtype)


def reaching_in_blocks(whole: NDArray[np.floating], rest: NDArray[np.floating], bound: np.floating) -> Found:
    """As :func:`reaching`, of the rows of a matrix, one after another, and of what follows them."""
    compiled = whole.strides[1] == whole.itemsize and compiled_for(rest)
    if compiled:
        first, more = compiled.above(whole, float(bound)), compiled.above(rest[None], float(bound))
        return np.concatenate([first[0], more[0] + np.int32(whole.size)]), np.concatenate([first[1], more[1]])
    rounds, block = whole.shape
    rows = max(1, CHUNK // block)
    parts = [whole[row : row + rows] for row in range(0, rounds, rows)] if block <= CHUNK else [*whole]
    indices: list[NDArray[np.int32]] = []
    found: list[NDArray[np.floating]] = []
    start = 0
    for part in [*parts, rest]:
        if block <= CHUNK:
            magnitudes, mask = magnitudes_of(part)
            hits = np.flatnonzero(np.greater_equal(magnitudes, bound, out=mask))
            places, reached = hits.astype(np.int32), magnitudes.take(hits)
        else:
            places, reached = reaching(part, bound)
        places += start
        indices.append(places)
        found.append(reached)
        start += part.size
    return np.concatenate(indices), np.concatenate(found)


def lowest(dtype: np.dtype[np.floating], threshold: float) -> np.floating:
    """The threshold in this precision, raised above zero."""
    lowest: np.floating = max(dtype.type(threshold), np.finfo(dtype).smallest_normal)
    return lowest
