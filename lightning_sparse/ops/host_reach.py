"""The coordinates of a vector that reach a threshold, on the CPU, in pieces that stay in cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates, Found
from lightning_sparse.ops.host_arrays import CHUNK, compiled_on, places_of, reach

MARGIN = 0.9
"""The next step's threshold is expected above this multiple of this one's."""


def above(x: Tensor, threshold: float, first: int, last: int, candidates: Candidates | None = None) -> Tensor:
    """Return ascending coordinates in [first, last) with ``|x| >= threshold``."""
    bound = _number(x, threshold)
    known: Found | None = None
    if candidates is not None:
        known = candidates.reaching(x, bound)
        candidates.expect(MARGIN * bound)
    if known is None:
        return reaching(x[first:last], bound)[0].long() + first
    found = reaching_of(*known, bound)
    return found if (first, last) == (0, x.numel()) else found[(found >= first) & (found < last)]


def tail(x: Tensor, threshold: float) -> Tensor:
    """Return the magnitudes that reach a threshold, without zeros."""
    bound = lowest(x, threshold)
    if compiled := compiled_on(x):
        return compiled.tail(x, bound)
    return reaching(x, bound)[1]


def reached(magnitudes: Tensor, threshold: float) -> int:
    """Return how many magnitudes reach a threshold, compared in their precision."""
    return int(reach(magnitudes, _number(magnitudes, threshold)).sum())


def reaching_of(indices: Tensor, magnitudes: Tensor, threshold: float) -> Tensor:
    """Return the int32 coordinates whose magnitudes reach a threshold, as int64."""
    return indices.index_select(0, places_of(reach(magnitudes, _number(magnitudes, threshold)))).long()


def reaching(x: Tensor, bound: float) -> Found:
    """Return what of a vector reaches a bound, NaN never: ascending int32 coordinates, and magnitudes."""
    if compiled := compiled_on(x):
        return compiled.above(x, bound)
    hits = Hits(x, bound, x.numel())
    for start, chunk in enumerate(torch.split(x, CHUNK)):
        hits.add(chunk, start * CHUNK)
    found = hits.found()
    assert found is not None  # there is room for all
    return found


class Hits:
    """Find the coordinates of a vector's chunks that reach a bound; in numpy, since torch takes three times as long.

    Args:
        x: the vector.
        bound: magnitude; NaN is not reached.
        room: for so many.
    """

    def __init__(self, x: Tensor, bound: float, room: int) -> None:
        self._bound, self._room = _number(x, bound), room
        self._indices, self._magnitudes = [np.empty(0, np.int32)], [x[:0].numpy()]

    def add(self, chunk: Tensor, start: int) -> None:
        """Look at a chunk, which begins at a coordinate; nothing is looked at any more where there is no room."""
        if self._room >= 0:
            values = chunk.numpy()
            flags = np.greater_equal(values, self._bound)
            flags |= np.less_equal(values, -self._bound)
            places = places_of(torch.from_numpy(flags)).numpy()
            self._room -= len(places)
            self._indices.append((places + start).astype(np.int32))
            self._magnitudes.append(np.abs(values.take(places)))

    def found(self) -> Found | None:
        """Return ascending coordinates and magnitudes, None if there was no room."""
        if self._room < 0:
            return None
        return torch.from_numpy(np.concatenate(self._indices)), torch.from_numpy(np.concatenate(self._magnitudes))


def lowest(x: Tensor, threshold: float) -> float:
    """Return the threshold in the precision of a vector, raised above zero."""
    return max(_number(x, threshold), torch.finfo(x.dtype).tiny)


def _number(x: Tensor, threshold: float) -> float:
    """Round to the precision of a vector."""
    return float(torch.tensor(threshold, dtype=x.dtype, device="cpu"))
