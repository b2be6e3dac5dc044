"""Work on picks, which are few, on the CPU: taking and putting values, uniting coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.ops import reference
from lightning_sparse.ops.c import native
from lightning_sparse.ops.c.native_buffers import written
from lightning_sparse.ops.host_arrays import compiled_on, places_of


def take(x: Tensor, indices: Tensor) -> Tensor:
    """Return ``x[indices]``."""
    if compiled := are_places(indices) and compiled_on(x):
        return compiled.picks.take(x, indices)
    return x.index_select(0, indices)


def under(mask: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Return ``x[mask]`` for each of some vectors."""
    places = places_of(mask)
    return tuple(x.index_select(0, places) for x in vectors)


def put_(x: Tensor, indices: Tensor, values: Tensor | float) -> None:
    """Set ``x[indices] = values``, of equal dtypes."""
    new = values if isinstance(values, Tensor) else torch.full(indices.shape, values, dtype=x.dtype, device="cpu")
    fitting = are_places(indices) and new.dtype == x.dtype and new.shape == indices.shape
    if compiled := fitting and compiled_on(x, new):
        compiled.picks.put(x, indices, new)
        written(x)
    else:
        x.index_copy_(0, indices, new)


def put_in_runs_(runs: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """Set ``x[indices] = values`` where x lies in several runs."""
    if len(runs) == 1:
        put_(runs[0], indices, values)
        return
    for run, chosen, places in _by_run(runs, indices):
        put_(run, places, values[chosen])
    written(*runs)


def take_from_runs(runs: Sequence[Tensor], indices: Tensor) -> Tensor:
    """Return ``x[indices]`` where x lies in several runs."""
    taken = runs[0].new_empty(len(indices))
    for run, chosen, places in _by_run(runs, indices):
        taken[chosen] = run.index_select(0, places)
    return taken


def _by_run(runs: Sequence[Tensor], indices: Tensor) -> Iterator[tuple[Tensor, slice | Tensor, Tensor]]:
    """Of each run that some indices fall into: it, which ones these are, and where they lie in it."""
    starts = torch.tensor([0, *(len(run) for run in runs)], device="cpu").cumsum(0)
    ascend = bool((indices[1:] >= indices[:-1]).all())
    ordered, order = (indices, None) if ascend else indices.sort(stable=True)
    if len(ordered) and not 0 <= ordered[0] <= ordered[-1] < starts[-1]:
        raise IndexError(f"an index is outside of a vector of {int(starts[-1])}")
    ends = torch.searchsorted(ordered, starts).tolist()
    for run, start, first, last in zip(runs, starts.tolist(), ends, ends[1:], strict=False):
        if first < last:
            chosen = slice(first, last)
            yield run, chosen if order is None else order[chosen], ordered[chosen] - start


def are_places(indices: Tensor) -> bool:
    """Return whether the library can read these indices."""
    return indices.dtype == torch.int64 and indices.dim() == 1 and indices.is_contiguous()


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
    keys = torch.cat(list(picks)) << 21
    keys |= levels << 1
    if spare is not None:
        keys |= torch.cat(list(spare))
    # Ranks' coordinates ascend, as a rule: numpy merges what does, in a fifth of the time that torch takes.
    keys = torch.from_numpy(np.sort(keys.numpy(), kind="stable"))
    keys = keys[: int(torch.searchsorted(keys, padding << 21))]
    coordinates, ends = keys >> 21, torch.ones_like(keys, dtype=torch.bool)
    torch.ne(coordinates[1:], coordinates[:-1], out=ends[:-1])  # of those that name a coordinate, the largest level
    kept = places_of(ends)
    named = kept.numel()
    if limit is not None and limit < named:
        ours = (keys & 1 == 0).cumsum(0, dtype=torch.int32).index_select(0, kept)  # how many up to here are not spare
        first = torch.diff(ours, prepend=ours.new_zeros(1)) > 0
        stay = torch.zeros_like(first)
        for places in (places_of(first), places_of(~first)):
            slots = min(limit, places.numel())
            limit -= slots
            ordinals = reference.spread(torch.tensor(places.numel(), device="cpu"), slots, phase)
            stay.index_fill_(0, places.index_select(0, ordinals.sub_(1)), True)
        kept = kept.index_select(0, places_of(stay))
    return coordinates.index_select(0, kept), keys.index_select(0, kept) >> 1 & 0xFFFFF, named


def add_up(parts: Sequence[tuple[Tensor, Tensor]], padding: int) -> tuple[Tensor, Tensor]:
    """Return ascending different coordinates below ``padding``, and sums of their values in the order of the parts."""
    if compiled_on(parts[0][1]) and native.library and (made := native.library.picks.add_up(parts, padding)):
        return made
    one = torch.full((1,), padding, device="cpu"), parts[0][1].new_zeros(1)  # the reference needs a slot
    union, totals, count = reference.add_up([*parts, one], padding)
    return union[:count], totals[:count]
