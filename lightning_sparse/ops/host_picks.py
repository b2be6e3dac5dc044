"""Work on picks, which are few, on the CPU: taking and putting values, uniting coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.ops.c import native
from lightning_sparse.ops.c.native_buffers import written
from lightning_sparse.ops.host_arrays import bits_of, compiled_for, compiled_on


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


def unite(
    picks: Sequence[Tensor],
    levels: Tensor,
    spare: Sequence[Tensor] | None,
    padding: int,
    limit: int | None,
    phase: int,
) -> tuple[Tensor, Tensor, int]:
    """The union of all picks below the padding index, thinned to a limit; see :func:`.reduce_union.union_of`.

    Args:
        picks: int64 coordinates below 2**31 of each rank, maybe with the padding index.
        levels: int64 in [0, 2**20) of all of them, one rank after another.
        spare: bool of each rank's: which are left out first.
        padding: the padding index.
        limit: of the union.
        phase: rotates which ones are left out.

    Returns:
        Ascending coordinates; the largest level of each; and how many there were before the limit.
    """
    if native.library and (made := native.library.picks.unite(picks, levels, spare, padding, limit, phase)):
        return made
    keys = torch.cat(list(picks)).numpy() << 21
    keys |= levels.numpy() << 1
    if spare is not None:
        keys |= torch.cat(list(spare)).numpy()
    keys.sort()
    keys = keys[: np.searchsorted(keys, padding << 21)]
    coordinates = keys >> 21
    last = np.ones(keys.size, dtype=bool)  # of those that name a coordinate, which has the largest level
    np.not_equal(coordinates[1:], coordinates[:-1], out=last[:-1])
    kept = last.nonzero()[0]
    left_out_first = (keys.take(kept) & 1).astype(bool)
    others = (~last).nonzero()[0]
    not_spare = keys.take(others) & 1 == 0
    left_out_first[(others - np.arange(others.size))[not_spare]] = False
    named = kept.size
    if limit is not None and limit < named:
        first, second = (~left_out_first).nonzero()[0], left_out_first.nonzero()[0]
        room = min(limit, first.size)
        stay = np.zeros(named, dtype=bool)
        stay[first[_spread(first.size, room, phase)]] = True
        stay[second[_spread(second.size, limit - room, phase)]] = True
        kept = kept[stay]
    return torch.from_numpy(coordinates.take(kept)), torch.from_numpy(keys.take(kept) >> 1 & 0xFFFFF), named


def _spread(total: int, room: int, phase: int) -> NDArray[np.int64]:
    """Which of so many things stay where there is no room for all, see :func:`.static.spread`; from 0."""
    if room >= total:
        return np.arange(total)
    return (np.arange(1, room + 1) * total - phase % total - 1) // room


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
    values = values.take(keys & 0xFFFFFFFF)
    first = np.ones(ordered.size, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts, others = first.nonzero()[0], (~first).nonzero()[0]
    totals = values.take(starts) + values.dtype.type(0)  # as every sum begins: -0 becomes 0
    np.add.at(totals, others - np.arange(1, others.size + 1), values.take(others))  # one after the other
    return torch.from_numpy(ordered.take(starts)), torch.from_numpy(totals)
