"""Formulations of fixed output size: no operation here makes the host wait for a device.

That rules out ``nonzero``, ``unique``, boolean indexing and ``.item()``; a test runs this file on meta tensors,
where each of them raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_sparse.kernels import Span


ROW = 1 << 12
"""Elements that are summed in their own precision."""


def top_k(x: Tensor, k: int) -> Tensor:
    """Ascending coordinates of the k largest magnitudes."""
    return torch.topk(x.abs(), k, sorted=False).indices.sort().values


def largest(x: Tensor, k: int, span: Span | None) -> tuple[Tensor, Tensor]:
    """Coordinates and magnitudes in descending order; missing ones are ``numel`` and -1."""
    magnitudes = x.abs()
    if span is not None:
        magnitudes = torch.where(_inside(x, span), magnitudes, -1)
    top = torch.topk(magnitudes, k, sorted=True)
    return torch.where(top.values >= 0, top.indices, x.numel()), top.values


def above(x: Tensor, threshold: Tensor, span: Span | None, capacity: int, phase: int) -> tuple[Tensor, Tensor]:
    """Ascending coordinates, at most ``capacity`` of them, see :func:`spread`."""
    mask = x.abs() >= threshold
    if span is not None:
        mask &= _inside(x, span)
    ordinals = mask.cumsum(0)  # int64; the n-th candidate is the first place where this reaches n
    total = ordinals[-1]
    indices = torch.searchsorted(
        ordinals, spread(total, capacity, phase)
    )  # numel, the padding index, where there is no such candidate
    return indices, total.clamp(max=capacity)


def spread(total: Tensor, slots: int, phase: int) -> Tensor:
    """Ordinals from 1 of what gets a slot, see :func:`lightning_sparse.kernels.spread`."""
    slot = torch.arange(1, slots + 1, device=total.device)
    shift = torch.remainder(torch.full_like(total, phase), total.clamp(min=1))
    return torch.where(total > slots, (slot * total - shift + slots - 1) // slots, slot)


def excess(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number, sum and sum of squares of ``|x| - threshold`` where that is not negative and x is not zero."""
    magnitudes = x.abs()
    count = (magnitudes >= threshold.clamp(min=torch.finfo(x.dtype).tiny)).sum()
    beyond = (magnitudes.double() - threshold).clamp_(min=0)
    return count.double(), beyond.sum(), beyond.dot(beyond)


def log_sum(x: Tensor) -> Tensor:
    """Sum of ``ln |x|`` over the x that are not zero."""
    magnitudes = x.abs()
    return torch.where(magnitudes < torch.finfo(x.dtype).tiny, 1, magnitudes).log().sum(dtype=torch.float64)


def distinct(indices: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Ascending different coordinates first, the padding index in the slots that are left."""
    ordered = indices.sort().values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[1:] = ordered[1:] == ordered[:-1]
    ordered = ordered.masked_fill(repeated, padding).sort().values
    return ordered, (ordered < padding).sum()


def unite(keys: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Different coordinates of keys ``coordinate, 1 bit, 20 bits``, ascending, then padding."""
    ordered = keys.sort().values
    coordinates = ordered >> 21
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = coordinates[1:] != coordinates[:-1]
    runs = first.cumsum(0) - 1
    union = torch.full_like(ordered, padding).scatter_(0, runs, coordinates)
    levels = torch.zeros_like(ordered).scatter_reduce_(0, runs, ordered & 0xFFFFF, "amax")
    spare = torch.ones_like(ordered).scatter_reduce_(0, runs, ordered >> 20 & 1, "amin")
    return union, spare.bool(), levels, (union < padding).sum()


def add_up(parts: Sequence[tuple[Tensor, Tensor]], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Different coordinates, ascending, then padding, and the sums of their values in the order of the parts."""
    union, count = distinct(torch.cat([indices for indices, _ in parts]), padding)
    # One more slot: padding finds a place even where the union has none.
    slots = torch.cat([union, union.new_full((1,), padding)])
    totals = parts[0][1].new_zeros(slots.shape)
    for indices, values in parts:
        totals.index_add_(0, torch.searchsorted(slots, indices), values)
    return union, totals[:-1], count


def top_k_of_blocks(x: Tensor, k: int, first: int, block: int, period: int) -> Tensor:
    """Ascending coordinates of the k largest magnitudes among those of blocks."""
    rounds = x.numel() // period
    whole, rest = x[: rounds * period].view(rounds, period), x[rounds * period + first :][:block]
    places = top_k(torch.cat([whole[:, first : first + block].reshape(-1), rest]), k)
    # In the rest, places continue after the last complete round as they do from round to round.
    return places // block * period + first + places % block


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation."""
    return x.mean().double(), x.std().double()


def mean_and_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of magnitudes; rows are summed in x's precision, sums of rows in float64."""
    whole = x.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, ROW), 1, dim=1)
    total = rows.double().sum() + torch.linalg.vector_norm(x[whole:], 1).double()
    low, high = torch.aminmax(x)
    largest = torch.maximum(-low, high).double()
    return torch.minimum(total / x.numel(), largest), largest  # also where the sum overflows


def _inside(x: Tensor, span: Span) -> Tensor:
    places = torch.arange(x.numel(), device=x.device)
    return (places >= span[0]) & (places < span[1])
