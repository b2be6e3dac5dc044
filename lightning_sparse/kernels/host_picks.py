"""Work on picks, which are few, on the CPU: taking and putting values, uniting coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.host_arrays import bits_of, compiled_for, compiled_on, written


def take(x: Tensor, indices: Tensor) -> Tensor:
    """``x[indices]``."""
    if not indices.numel():
        return x.new_empty(0)  # of an empty array, torch makes a vector that it cannot look at as another dtype
    if compiled := _are_places(indices) and compiled_on(x):
        return compiled.picks.take(x, indices)
    return torch.from_numpy(x.numpy().take(indices.numpy()))


def under(mask: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """``x[mask]`` for each of some vectors."""
    places = np.flatnonzero(mask.numpy())
    return tuple(torch.from_numpy(x.numpy().take(places)) for x in vectors)


def put_(x: Tensor, indices: Tensor, values: Tensor | float) -> None:
    """``x[indices] = values``, of equal dtypes."""
    new = values if isinstance(values, Tensor) else torch.full(indices.shape, values, dtype=x.dtype, device="cpu")
    fitting = _are_places(indices) and new.dtype == x.dtype and new.shape == indices.shape
    if compiled := fitting and compiled_on(x, new):
        compiled.picks.put(x, indices, new)
    else:
        bits_of(x)[indices.numpy()] = bits_of(new)
    written(x)


def put_in_runs_(runs: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """As :func:`put_`, where x lies in several runs."""
    if len(runs) == 1:
        put_(runs[0], indices, values)
        return
    for run, chosen, places in _by_run(runs, indices.numpy()):
        put_(run, torch.from_numpy(places), values[chosen])
    written(*runs)


def take_from_runs(runs: Sequence[Tensor], indices: Tensor) -> Tensor:
    """``x[indices]`` where x lies in several runs."""
    taken = torch.empty(len(indices), dtype=runs[0].dtype, device="cpu")
    bits = bits_of(taken)
    for run, chosen, places in _by_run(runs, indices.numpy()):
        bits[chosen] = bits_of(run)[places]
    return taken


def _by_run(
    runs: Sequence[Tensor], indices: NDArray[np.int64]
) -> Iterator[tuple[Tensor, slice | NDArray[np.int64], NDArray[np.int64]]]:
    """Of each run that some indices fall into: it, which ones these are, and where they lie in it."""
    starts = np.cumsum([0, *(len(run) for run in runs)])
    if indices.size and not 0 <= indices.min() <= indices.max() < starts[-1]:
        raise IndexError(f"an index is outside of a vector of {starts[-1]}")
    order = None if (indices[1:] >= indices[:-1]).all() else indices.argsort(kind="stable")
    ordered = indices if order is None else indices[order]
    ends = np.searchsorted(ordered, starts)
    for run, start, first, last in zip(runs, starts, ends, ends[1:], strict=False):
        if first < last:
            chosen = slice(first, last)
            yield run, chosen if order is None else order[chosen], ordered[chosen] - start


def _are_places(indices: Tensor) -> bool:
    """Whether the library can read these indices."""
    return indices.dtype == torch.int64 and indices.dim() == 1 and indices.is_contiguous()


def distinct(indices: Tensor, padding: int) -> Tensor:
    """Ascending different values below ``padding``."""
    ordered = np.sort(indices.numpy())
    first = np.empty(ordered.shape, dtype=bool)
    first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    first &= ordered < padding
    return torch.from_numpy(ordered[first])


def unite(indices: Tensor, spare: Tensor, levels: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`distinct`, with what was said of each coordinate.

    Args:
        indices: (c,) int64 coordinates below 2**31, and maybe the padding index.
        spare: (c,) bool.
        levels: (c,) int64 in [0, 2**20).
        padding: the padding index.

    Returns:
        indices as :func:`distinct`; for each of them whether ``spare`` was said every time, and the largest level; and
        their number, () int64.
    """
    keys = np.sort((indices << 21 | spare.long() << 20 | levels).numpy())
    keys = keys[: np.searchsorted(keys, padding << 21)]
    coordinates = keys >> 21
    starts = np.flatnonzero(np.concatenate([[True], coordinates[1:] != coordinates[:-1]])[: keys.size])
    largest = keys & 0xFFFFF
    if starts.size:
        largest = np.maximum.reduceat(largest, starts)
    said = (keys[starts] >> 20 & 1).astype(bool)  # the lowest key of each coordinate comes first
    union = torch.from_numpy(coordinates[starts])
    return union, torch.from_numpy(said), torch.from_numpy(largest), torch.tensor(starts.size, device="cpu")


def expand(words: Tensor, slots: int, blocks: int, padding: int) -> Tensor:
    """Coordinates from 16-bit offsets in blocks of 65 536.

    Args:
        words: (..., blocks + (slots + 1) // 2) int32: the slot at which each block ends, ascending; then offsets, two
            in each word, of which the first may have borrowed from the second.
        slots: number of offsets.
        blocks: number of blocks.
        padding: what slots behind the last block hold, and what coordinates are limited to.

    Returns:
        (..., slots) int64.

    Example:
        >>> expand(torch.tensor([1, 2, 7 + (3 << 16)], dtype=torch.int32), slots=2, blocks=2, padding=100_000)
        tensor([    7, 65539])
    """
    rows = np.ascontiguousarray(words.numpy().reshape(-1, words.shape[-1]))
    made = np.empty((len(rows), slots), dtype=np.int64)
    firsts = np.arange(blocks + 1) << 16
    for row, places in zip(rows, made, strict=True):
        low, high = row[blocks:] & 0xFFFF, row[blocks:] >> 16 & 0xFFFF
        high += low >> 15  # what the first of the two had borrowed, where it is negative as a 16-bit integer
        high &= 0xFFFF
        counts = np.diff(row[:blocks], prepend=0, append=slots)
        places[:] = np.repeat(firsts, counts)
        places[0::2] += low[: (slots + 1) // 2]
        places[1::2] += high[: slots // 2]
    np.minimum(made, padding, out=made)
    return torch.from_numpy(made.reshape(*words.shape[:-1], slots))


def among(values: Tensor, ordered: Tensor) -> Tensor:
    """Which of some coordinates are among ascending ones."""
    if (compiled := native.library) and _are_places(values) and _are_places(ordered):
        return compiled.picks.among(values, ordered)
    places = np.searchsorted(ordered.numpy()[:-1], values.numpy())
    return torch.from_numpy(ordered.numpy()[places] == values.numpy()) if ordered.numel() else values != values


def locate(ordered: Tensor, values: Tensor) -> Tensor:
    """Positions of ascending values in an ascending tensor that holds them."""
    return torch.from_numpy(np.searchsorted(ordered.numpy(), values.numpy()))


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def add_up(parts: Sequence[tuple[Tensor, Tensor]], padding: int) -> tuple[Tensor, Tensor]:
    """Ascending different coordinates below ``padding``, and the sums of their values in the order of the parts.

    One sort of ``coordinate, place`` brings what belongs together side by side, in the order of the parts; looking each
    coordinate up in the union takes several times longer.
    """
    coordinates = np.concatenate([indices.numpy() for indices, _ in parts])
    values = np.concatenate([part.numpy() for _, part in parts])
    if compiled := compiled_for(values):
        made = compiled.picks.add_up(coordinates, values, np.array([len(part) for part, _ in parts]), padding)
        if made is not None:
            return torch.from_numpy(made[0]), torch.from_numpy(made[1])
    keys = coordinates << 32
    keys |= np.arange(keys.size)
    keys.sort()
    keys = keys[: np.searchsorted(keys, padding << 32)]
    ordered = keys >> 32
    values = values[keys & 0xFFFFFFFF]
    first = np.empty(ordered.size, dtype=bool)
    first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    totals = values[starts] + values.dtype.type(0)  # as every sum begins: -0 becomes 0
    repeated = np.flatnonzero(np.diff(starts, append=ordered.size) > 1)
    ends = np.append(starts[1:], ordered.size)
    place = 1
    while repeated.size:
        totals[repeated] += values[starts[repeated] + place]
        place += 1
        repeated = repeated[starts[repeated] + place < ends[repeated]]
    return torch.from_numpy(ordered[starts]), torch.from_numpy(totals)
