"""Merging selections in pairs of ranks up a tree, and a broadcast of the result: gTop-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_sparse.core.messages import AllGather, Broadcast, SendRecv, Steps
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.methods.exchanges.base import EXCHANGES, Exchange, values_at
from lightning_sparse.methods.exchanges.merging import masked, pack, strongest, unpack
from lightning_sparse.ops import add_up


@EXCHANGES.register
@dataclass(frozen=True)
class Tree(Exchange):
    """Merge selected values in pairs of ranks, keep the k largest sums, and broadcast the result of the root.

    In rounds of distance ``d = 1, 2, 4, ...`` each rank r that is a multiple of 2 d receives the sparse vector of rank
    ``r + d``, if there is one, adds it to its own, and keeps the k largest magnitudes (of equal ones the lower
    coordinates). Rank 0 ends up with the result and broadcasts it: ``update = result / n``. k is the largest number of
    coordinates that a rank has selected. The number of ranks is arbitrary.

    Every rank removes its selected values, and a merging rank adds dropped values to its own residual. No value is
    lost, without additional traffic. (Published: a rank takes back those of its selected values that are not in the
    result. If one branch drops a coordinate and another brings it to the root, the dropped value is then lost.)

    A rank sends its k pairs once on the way up, ``k (4 + w)`` bytes for values of w bytes, and ``(n - 1) / n`` of that
    in the broadcast, for any n, plus 8 bytes for the counts to each other rank. There are about ``2 log2(n)`` messages
    one after the other.

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
                both = add_up([merged, unpack(received, slots, acc.dtype, padding)], padding)[:2]
                kept = strongest(both, keep, padding)
                merged = masked(both, kept, padding)
                indices, values = masked(both, ~kept, padding)
                gone.append((indices, -values))
            distance *= 2
        message = yield Broadcast(pack(merged, slots, padding), 0)
        union, total = unpack(message, slots, acc.dtype, padding)
        sent, sent_values, _ = add_up(gone, padding)
        return Update(union, total / n, sent, sent_values, counts, (union < padding).sum())
