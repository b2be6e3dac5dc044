"""Merging picks in pairs of ranks up a tree, and a broadcast of what is left: gTop-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_sparse.core.messages import AllGather, Broadcast, SendRecv, Steps
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.methods.exchanges.base import EXCHANGES, Exchange, values_at
from lightning_sparse.methods.exchanges.merging import add_up, masked, pack, strongest, unpack


@EXCHANGES.register
@dataclass(frozen=True)
class Tree(Exchange):
    """Ranks merge their picks in pairs, the largest k sums go on, and the root tells everyone.

    In rounds of distance ``d = 1, 2, 4, ...`` each rank r that is a multiple of 2 d receives the sparse vector of rank
    ``r + d``, if there is one, adds it to its own, and keeps the k largest magnitudes (of equal ones the lower
    coordinates). Rank 0 ends up with the result and broadcasts it: ``update = result / n``. k is the number of picks of
    the rank that picked most. Any number of ranks will do.

    Every rank forgets its picks, and what a merging rank drops, it adds to its own residual. Nothing is lost, at no
    cost in traffic. (Published: a rank takes back those of its picks that are not in the result. What was dropped on
    one branch while another brought the same coordinate to the root is then lost.)

    A rank sends its k pairs once on the way up, ``k (4 + w)`` bytes for values of w bytes, and ``(n - 1) / n`` of that
    in the broadcast, whatever n is, plus 8 bytes for the counts to each other rank. The way takes about
    ``2 log2(n)`` messages one after the other.

    References:
        Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks,
        ICDCS 2019, arXiv 1901.04359, algorithms 2 and 3.
    """

    accepts: ClassVar[frozenset[Agreement]] = frozenset({Agreement.INDEPENDENT})

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
        """Exchange one group; see :class:`~lightning_sparse.methods.exchanges.Exchange`."""
        n, rank, padding = ctx.world_size, ctx.rank, acc.numel() - 1
        counts = yield AllGather(selection.count)
        keep = counts.max()
        slots = selection.indices.numel() if selection.aligned else max(1, int(keep))
        merged = selection.indices, values_at(acc, selection.indices, ctx)
        gone = [merged]
        distance = 1
        while distance < n:
            gives = rank % (2 * distance) == distance
            takes = rank % (2 * distance) == 0 and rank + distance < n
            to, source = rank - distance if gives else None, rank + distance if takes else None
            received = yield SendRecv(pack(merged, slots, padding), to, source)
            if takes:
                both = add_up([merged, unpack(received, slots, acc.dtype, padding)], padding)
                kept = strongest(both, keep, padding)
                merged = masked(both, kept, padding)
                indices, values = masked(both, ~kept, padding)
                gone.append((indices, -values))
            distance *= 2
        message = yield Broadcast(pack(merged, slots, padding), 0)
        union, total = unpack(message, slots, acc.dtype, padding)
        sent, sent_values = add_up(gone, padding)
        return Update(union, total / n, sent, sent_values, counts, (union < padding).sum())
