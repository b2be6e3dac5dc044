"""Adding up sparse vectors and keeping the largest sums: what the exchanges with intermediate stations share.

A sparse vector is a pair of tensors of one length: int64 coordinates, different ones, and their values. Where shapes
are static (not on the CPU), slots without a coordinate hold the padding index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.methods.exchanges.base import reinterpreted
from lightning_sparse.ops import pad, static_shapes, top_k, under

Pairs = tuple[Tensor, Tensor]
"""Coordinates and values."""


def strongest(pairs: Pairs, keep: int | Tensor, padding: int) -> Tensor:
    """Return a mask of the ``keep`` values that are largest in magnitude; of equal ones those that come first.

    NaN comes before everything, infinities included: it has to reach all ranks, so that all know of it. Padding comes
    last.
    """
    indices, values = pairs
    weight = values.abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    if static_shapes(values.device):
        order = weight.masked_fill(indices == padding, -1).sort(descending=True, stable=True).indices
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return place < keep
    kept = torch.zeros(len(indices), dtype=torch.bool, device="cpu")
    kept[top_k(weight, int(keep))] = True
    return kept


def masked(pairs: Pairs, mask: Tensor, padding: int) -> Pairs:
    """Return the pairs under a mask, in order: on the CPU only these, elsewhere in all slots, padding at the end."""
    indices, values = pairs
    if not static_shapes(values.device):
        kept, their = under(mask, indices, values)
        return kept, their
    indices, order = indices.masked_fill(~mask, padding).sort()
    return indices, values.masked_fill(~mask, 0)[order]


def pack(pairs: Pairs, slots: int, padding: int) -> Tensor:
    """Form a message of int32 words: the coordinates in ``slots`` slots, then the bits of the values.

    Args:
        pairs: what to send; of more than ``slots`` pairs, the first ones.
        slots: how many fit.
        padding: fills up.
    """
    indices, values = (x[:slots] for x in pairs)
    indices, values = pad(indices, slots, padding), pad(values, slots, 0)
    return torch.cat([indices.int(), values.contiguous().view(torch.int32)])


def unpack(message: Tensor, slots: int, dtype: torch.dtype, padding: int) -> Pairs:
    """Return the pairs that :func:`pack` was given, bit for bit; on the CPU without padding."""
    return unpack_rows(message.unsqueeze(0), slots, dtype, padding)[0]


def pack_rows(indices: Tensor, values: Tensor) -> Tensor:
    """Form a message as :func:`pack` does for each of (n, slots) coordinates and values."""
    return torch.cat([indices.int(), values.view(torch.int32)], dim=1)


def unpack_rows(messages: Tensor, slots: int, dtype: torch.dtype, padding: int) -> list[Pairs]:
    """Return the pairs that each of (n, words) messages holds, see :func:`unpack`."""
    indices, values = messages[:, :slots].long(), reinterpreted(messages[:, slots:], dtype)
    pairs = list(zip(indices.unbind(), values.unbind(), strict=True))
    if static_shapes(messages.device):
        return pairs
    found = (indices < padding).sum(1).tolist()  # padding is at the end
    return [(own[:count], their[:count]) for (own, their), count in zip(pairs, found, strict=True)]
