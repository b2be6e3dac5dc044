"""What of a vector reaches a threshold, on the CPU, in pieces that stay in cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates, Found
from lightning_sparse.ops.host_arrays import CHUNK, compiled_on, places_of

MARGIN = 0.9
"""The next step's threshold is expected above this multiple of this one's."""


def above(x: Tensor, threshold: float, first: int, last: int, candidates: Candidates | None = None) -> Tensor:
    """Ascending coordinates in [first, last) with ``|x| >= threshold``."""
    bound, known = float(_number(x, threshold)), None
    if candidates is not None:
        known = candidates.reaching(x, bound)
        candidates.expect(MARGIN * bound)
    if known is None:
        return reaching(x[first:last], bound)[0].long() + first
    found = reaching_of(*known, bound)
    return found if (first, last) == (0, x.numel()) else found[(found >= first) & (found < last)]


def tail(x: Tensor, threshold: float) -> Tensor:
    """The magnitudes that reach a threshold, without zeros."""
    bound = lowest(x, threshold)
    if compiled := compiled_on(x):
        return compiled.tail(x, bound)
    return reaching(x, bound)[1]


def reached(magnitudes: Tensor, threshold: float) -> int:
    """How many magnitudes reach a threshold, compared in their precision."""
    if compiled := compiled_on(magnitudes):
        return compiled.reached(magnitudes, threshold)
    return int((magnitudes >= _number(magnitudes, threshold)).sum())


def reaching_of(indices: Tensor, magnitudes: Tensor, threshold: float) -> Tensor:
    """The int32 coordinates whose magnitudes reach a threshold, as int64."""
    if compiled := compiled_on(magnitudes):
        return compiled.reaching((indices, magnitudes), threshold)
    return indices[magnitudes >= _number(magnitudes, threshold)].long()


def reaching(x: Tensor, bound: float) -> Found:
    """What of a vector reaches a bound: ascending int32 coordinates, and magnitudes."""
    if compiled := compiled_on(x):
        return compiled.above(x, bound)
    hits = Hits(x, bound, x.numel())
    for start in range(0, x.numel(), CHUNK):
        hits.add(x[start : start + CHUNK], start)
    found = hits.found()
    assert found is not None  # there is room for all
    return found


class Hits:
    """What of the chunks of a vector reaches a bound.

    In numpy: torch takes three times as long to compare and to list what it finds.

    Args:
        x: the vector.
        bound: magnitude; NaN is not reached.
        room: for so many.
    """

    def __init__(self, x: Tensor, bound: float, room: int) -> None:
        self._bound, self._room, self._total = _number(x, bound).numpy(), room, 0
        size = min(CHUNK, x.numel())  # what is allocated anew for each chunk costs page faults
        self._magnitudes, self._flags = x.new_empty(size).numpy(), torch.empty(size, dtype=torch.bool, device="cpu")
        self._parts = [(np.empty(0, dtype=np.int32), self._magnitudes[:0])]

    def add(self, chunk: Tensor, start: int) -> None:
        """At most a chunk, that begins at a coordinate."""
        if self._total <= self._room:
            magnitudes = np.abs(chunk.numpy(), out=self._magnitudes[: len(chunk)])
            flags = self._flags[: len(chunk)]
            np.greater_equal(magnitudes, self._bound, out=flags.numpy())
            places = places_of(flags).numpy()
            self._total += places.size
            found = magnitudes.take(places)
            places += start
            self._parts.append((places.astype(np.int32), found))

    def found(self) -> Found | None:
        """Ascending coordinates and magnitudes, None if there was no room."""
        if self._total > self._room:
            return None
        indices, magnitudes = (torch.from_numpy(np.concatenate(part)) for part in zip(*self._parts, strict=True))
        return indices, magnitudes


def lowest(x: Tensor, threshold: float) -> float:
    """The threshold in the precision of a vector, raised above zero."""
    return max(float(_number(x, threshold)), torch.finfo(x.dtype).tiny)


def _number(x: Tensor, threshold: float) -> Tensor:
    """In the precision of a vector."""
    return torch.tensor(threshold, dtype=x.dtype, device="cpu")
