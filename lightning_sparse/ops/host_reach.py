"""What of a vector reaches a threshold, on the CPU.

Torch's own ``nonzero`` takes several times longer: it allocates what it returns and what it compares with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.core.candidates import Candidates
from lightning_sparse.ops.host_arrays import CHUNK, Found, buffer, chunks, compiled_for, joined, places_of

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
    parts = []
    for _, chunk in chunks([values]):
        magnitudes = np.abs(chunk, out=buffer("magnitudes", chunk.dtype)[: chunk.size])
        parts.append(magnitudes.take(places_of(magnitudes >= bound)))  # a boolean index takes several times as long
    return torch.from_numpy(joined(parts, values.dtype))


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
    return _reaching([values], values.dtype, bound)


def reaching_in_blocks(whole: NDArray[np.floating], rest: NDArray[np.floating], bound: np.floating) -> Found:
    """As :func:`reaching`, of the rows of a matrix, one after another, and of what follows them."""
    compiled = whole.strides[1] == whole.itemsize and compiled_for(rest)
    if compiled:
        first, more = compiled.above(whole, float(bound)), compiled.above(rest[None], float(bound))
        return np.concatenate([first[0], more[0] + np.int32(whole.size)]), np.concatenate([first[1], more[1]])
    rounds, block = whole.shape
    rows = max(1, CHUNK // block)
    parts = [whole[row : row + rows] for row in range(0, rounds, rows)] if block <= CHUNK else [*whole]
    return _reaching([*parts, rest], rest.dtype, bound)


def _reaching(runs: Sequence[NDArray[np.floating]], dtype: np.dtype[np.floating], bound: np.floating) -> Found:
    hits = Hits(dtype, bound, sum(run.size for run in runs))
    for span, chunk in chunks(runs):
        hits.add(chunk, span.start)
    found, _ = hits.found()
    assert found is not None  # there is room for all
    return found


class Hits:
    """What of the chunks of a vector reaches a bound, and whether all of it is finite.

    Magnitudes are compared by their bits as integers, which have the same order, with NaN after infinity: what is not
    finite is among the hits, and need not be looked for.

    Args:
        dtype: of the vector.
        bound: magnitude; NaN is not reached.
        room: for so many.
    """

    def __init__(self, dtype: np.dtype[np.floating], bound: float | np.floating, room: int) -> None:
        self._dtype, self._integers = dtype, np.dtype(f"i{dtype.itemsize}")
        self._level = np.abs(np.maximum(dtype.type(bound), dtype.type(0))).view(self._integers)
        self._infinite = dtype.type(np.inf).view(self._integers)
        self._least = min(self._level, self._infinite)
        self._all_but_sign = np.iinfo(self._integers).max
        self._bits, self._mask = buffer("bits", self._integers), buffer("mask", np.dtype(bool))
        self._room, self._total, self._given_up, self._finite = room, 0, False, True
        self._indices: list[NDArray[np.int32]] = []
        self._found: list[NDArray[np.integer]] = []

    def add(self, chunk: NDArray[np.floating], start: int) -> None:
        """At most a chunk, of any shape, that begins at a coordinate."""
        bits, mask = self._bits[: chunk.size], self._mask[: chunk.size]
        np.bitwise_and(chunk.view(self._integers), self._all_but_sign, out=bits.reshape(chunk.shape))
        self._given_up = self._total > self._room
        places = places_of(np.greater_equal(bits, self._infinite if self._given_up else self._least, out=mask))
        self._total += places.size
        if self._given_up:
            self._finite = self._finite and not places.size
        elif places.size:
            self._found.append(bits.take(places))
            places += start
            self._indices.append(places.astype(np.int32))

    def found(self) -> tuple[Found | None, bool]:
        """Ascending coordinates and magnitudes, None if there was no room; and whether all is finite."""
        indices, bits = joined(self._indices, np.dtype(np.int32)), joined(self._found, self._integers)
        finite = self._finite and bool((bits < self._infinite).all())
        if not finite:
            numbers = ((bits >= self._level) & (bits <= self._infinite)).nonzero()[0]
            indices, bits = indices.take(numbers), bits.take(numbers)
        room = not self._given_up and indices.size <= self._room
        return (indices, bits.view(self._dtype)) if room else None, finite


def lowest(dtype: np.dtype[np.floating], threshold: float) -> np.floating:
    """The threshold in this precision, raised above zero."""
    lowest: np.floating = max(dtype.type(threshold), np.finfo(dtype).smallest_normal)
    return lowest
