"""All-gather of indices, all-reduce of the values at their union: union release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.collective import Collective
from lightning_sparse.exchanges.base import EXCHANGES, Exchange, Picks, gather_picks
from lightning_sparse.kernels import distinct, static_shapes
from lightning_sparse.types import Agreement, Context, Selection, Update


@EXCHANGES.register
@dataclass(frozen=True)
class ReduceUnion(Exchange):
    """Every rank learns what any rank picked, and all contribute their values there.

    ``U = union of S_i``, ``update[U] = (1/n) sum_i acc_i[U]``, and every rank forgets U. Residuals stay smaller than
    with own release, at the price of more values: each rank moves ``4 (n - 1) (m + 1)`` bytes of indices for the
    longest selection m and ``2 (n - 1) / n |U| w`` bytes of values. With exclusive picks ``|U| = k`` whatever n is, and
    this is cheaper than dense up to a density of 2/3 (4-byte values, equal counts).

    References:
        Yoon, Oh, MiCRO, arXiv 2310.00967; Preserving Near-Optimal Gradient Sparsification Cost (ExDyna),
        arXiv 2402.13781: there all methods, Top-k included, are exchanged this way.
    """

    accepts: ClassVar[frozenset[Agreement]] = frozenset({Agreement.INDEPENDENT, Agreement.SHARED, Agreement.DISJOINT})

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context, comm: Collective) -> Update:
        """One group; see :class:`~lightning_sparse.exchanges.Exchange`."""
        padding = acc.numel() - 1
        picks = gather_picks(selection, None, padding, comm)
        union, size = union_of(picks, selection, padding)
        values = comm.all_reduce(acc[union]) / comm.world_size
        return Update(union, values, union, None, picks.counts, size)


def union_of(picks: Picks, selection: Selection, padding: int) -> tuple[Tensor, Tensor]:
    """Coordinates of the union, and how many different ones there are.

    On the CPU, a union with repeated coordinates is left as it is where it has the length of the selection's total:
    their sums are equal, and the message is as long in every step. On a device, slots are cut down to the total.
    """
    joined = picks.joined()
    if not static_shapes(joined.device) and (selection.disjoint or joined.numel() == selection.total):
        size = picks.counts.sum() if selection.disjoint else distinct(joined, padding)[1]
        return joined, size
    union, size = distinct(joined, padding)
    limit = selection.limit
    if limit is None or limit >= union.numel():
        return union[: selection.total], size
    slots = torch.arange(limit, device=union.device)
    kept = torch.where(size > limit, ((slots + 1) * size + limit - 1) // limit - 1, slots)
    return union[kept], size.clamp(max=limit)
