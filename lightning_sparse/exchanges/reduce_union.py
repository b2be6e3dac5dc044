"""All-gather of indices, all-reduce of the values at their union: union release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_sparse.collective import Collective
from lightning_sparse.exchanges.base import EXCHANGES, Exchange, gather_picks
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
        union, size = picks.joined(), picks.counts.sum()
        if not selection.disjoint or static_shapes(acc.device):
            # On a device also for exclusive picks: sorted, the padding is at the end and can be cut off.
            different, size = distinct(union, padding)
            # Where the picks together are no more than was allowed for, repeated ones may as well stay: their sums are
            # equal, and the message is as long in every step.
            if static_shapes(acc.device) or union.numel() != selection.total:
                union = different[: selection.total]
        values = comm.all_reduce(acc[union]) / comm.world_size
        return Update(union, values, union, None, picks.counts, size)
