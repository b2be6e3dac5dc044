"""Each rank adds up the selected values of one region, and the largest sums go to all: Ok-Topk's split and reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.messages import AllGather, AllReduce, AllToAll, Steps
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.methods.density import count
from lightning_sparse.methods.exchanges.base import EXCHANGES, Exchange, values_at
from lightning_sparse.methods.exchanges.merging import masked, pack, pack_rows, strongest, unpack_rows
from lightning_sparse.ops import add_up, pad, spread


@EXCHANGES.register
@dataclass(frozen=True)
class Balanced(Exchange):
    """Send the k largest sums of selected values, with traffic that does not grow with the number of ranks.

    1. The group is cut into n regions with about equally many selected coordinates: the j-th boundary is the mean over
       ranks of the coordinate below which a rank has j/n of its selection, if it has any.
    2. Each rank sends its selected values in region j to rank j, which adds them up in rank order.
    3. Each rank sends the largest sums of its region to all ranks, and all keep the k largest of them.

    ``update = (1/n) topk(sum_i scatter(S_i, acc_i[S_i]))`` with k at the target density *for all ranks together*, for
    selections of any size. Rank i removes those of its selected values that are in the result. As one rank decides
    about a coordinate for all, no value is lost.

    Messages have a fixed size. A rank sends at most ``m = ceil(3 k / (2 n))`` pairs to each other one in step 2, and as
    many in step 3. More than m selected coordinates in a region are thinned evenly, others in each step; of more than m
    sums, the largest are sent. The rest stays in the residuals. With 4-byte values a rank sends at most
    ``6 k (n - 1) / n`` words of 4 bytes, as the paper says, and 12 (n - 1) more for boundaries, counts and rounding up.
    (The authors' code sends 2 k/3 to 5 k/4 pairs without a limit, balances the lengths of the results, and finds both
    boundaries and a threshold for the sums anew only every few dozen steps. An exchange has no memory: here all ranks
    find the exact k-th largest of the sums that they have received.)

    References:
        Li, Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk), PPoPP 2022,
        arXiv 2201.07598, section 3.
    """

    accepts: ClassVar[frozenset[Agreement]] = frozenset({Agreement.INDEPENDENT})

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
        """Exchange one group; see :class:`~lightning_sparse.methods.exchanges.Exchange`."""
        n, padding = ctx.world_size, acc.numel() - 1
        k = count(ctx.density, padding)
        slots = min(padding, -(-3 * k // (2 * n)))
        bounds, counts = yield from _regions(selection, padding, ctx)
        mine = _split(selection.indices, bounds, slots, ctx.step)
        sent = mine.flatten()
        rows = yield AllToAll(pack_rows(mine, values_at(acc, sent, ctx).view_as(mine)))
        sums = add_up(unpack_rows(rows, slots, acc.dtype, padding), padding)[:2]
        largest = masked(sums, strongest(sums, slots, padding), padding)
        rows = yield AllGather(pack(largest, slots, padding))
        found = unpack_rows(rows, slots, acc.dtype, padding)
        received = torch.cat([indices for indices, _ in found]), torch.cat([values for _, values in found])
        union, total = (x[:k] for x in masked(received, strongest(received, k, padding), padding))
        next_one = pad(union, len(union) + 1, -1)[torch.searchsorted(union, sent)]
        sent = sent.masked_fill(next_one != sent, padding)
        return Update(union, total / n, sent, None, counts, (union < padding).sum())


def _regions(selection: Selection, numel: int, ctx: Context) -> Steps[tuple[Tensor, Tensor]]:
    """Agree on (n + 1,) boundaries of the regions and gather (n,) counts of all ranks, in one message."""
    n, device = ctx.world_size, selection.indices.device
    parts = torch.arange(n + 1, device=device)
    ordered = pad(selection.indices, selection.indices.numel() + 1, numel)
    own = torch.where(selection.count > 0, ordered[parts[1:-1] * selection.count // n], 0)
    counts = torch.where(parts[:-1] == ctx.rank, selection.count, 0)
    received = yield AllReduce(torch.cat([own, counts]))
    places, counts = received[: n - 1], received[n - 1 :]
    # A rank that has picked nothing is not counted in where the picks are.
    inner = places // (counts > 0).sum().clamp(min=1)
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), numel)]), counts


def _split(indices: Tensor, bounds: Tensor, slots: int, phase: int) -> Tensor:
    """Return (n, slots) picks by region, padded; if a region has more, every part of it loses the same share."""
    first = torch.searchsorted(indices, bounds)
    first, total = first[:-1, None], first.diff()[:, None]
    ordinals = spread(total, slots, phase)
    place = (first + ordinals - 1).clamp(max=indices.numel())
    ordered = torch.cat([indices, bounds[-1:]])
    return torch.where(ordinals <= total, ordered[place], bounds[-1])
