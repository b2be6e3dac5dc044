"""Broadcast of one rank's indices, all-reduce of the values there: union release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_sparse.core.messages import Broadcast, Steps
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.methods.exchanges.base import EXCHANGES, Exchange, reduce_at


@EXCHANGES.register
@dataclass(frozen=True)
class FollowLeader(Exchange):
    """Send the selection of one rank, the leader, to all, and average the values of all ranks there.

    ``S = S_leader`` with ``leader = t mod n``, ``update[S] = (1/n) sum_i acc_i[S]``, and every rank removes its values
    at S. The counts are the leader's k for every rank. Each rank moves ``(n - 1) / n 4 k`` bytes of indices (on average
    over ranks) and ``2 (n - 1) / n k w`` bytes of values of w bytes. These are fewer bytes than dense up to a density
    of 2/3 (4-byte values), for any n.

    Selections must have equally many slots on all ranks; those of the other ranks are not read.

    References:
        Chen et al., ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
        Training, NeurIPS 2020, arXiv 2104.11125, section 3.
    """

    accepts: ClassVar[frozenset[Agreement]] = frozenset({Agreement.LEADER})
    carries_second: ClassVar[bool] = True

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
        """Exchange one group; see :class:`~lightning_sparse.methods.exchanges.Exchange`."""
        n, padding = ctx.world_size, acc.numel() - 1
        indices = (yield Broadcast(selection.indices.int(), ctx.step % n)).long()
        mean, second = yield from reduce_at(acc, indices, ctx)
        size = (indices < padding).sum()
        return Update(indices, mean, indices, None, size.repeat(n), size, second=second)
