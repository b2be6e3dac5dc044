"""All-gather of (index, value) pairs: own release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.methods.exchanges.base import (
    EXCHANGES,
    Exchange,
    gather_rows,
    joined,
    read_picks,
    values_at,
)
from lightning_sparse.ops import add_up, compiled


@EXCHANGES.register
@dataclass(frozen=True)
class GatherPairs(Exchange):
    """Send the selected coordinates of every rank with their values; the update is the sum of the values over n.

    ``update = (1/n) sum_i scatter(S_i, acc_i[S_i])`` and rank i removes its values at ``S_i``. There is one collective
    if all ranks select equally many (Top-k), else one more of 8 bytes. Each rank receives ``(n - 1) m (4 + w)`` bytes
    for the longest selection m and values of w bytes. These are fewer bytes than dense only while ``density < 1/n``
    (4-byte values, equal counts).

    The sums are formed in rank order, one rank after another, so that they are equal on all ranks bit for bit.

    References:
        Aji, Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, arXiv 1704.05021.
    """

    accepts: ClassVar[frozenset[Agreement]] = frozenset({Agreement.INDEPENDENT, Agreement.DISJOINT})

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
        """Exchange one group; see :class:`~lightning_sparse.methods.exchanges.Exchange`."""
        padding = acc.numel() - 1
        values = values_at(acc, selection.indices, ctx)
        longest, rows = yield from gather_rows(selection, values, padding)
        library = None if ctx.disjoint else compiled(acc.device, acc.dtype)
        if library is not None and (made := library.add_pairs(rows, longest, padding, ctx.world_size)):
            size = torch.tensor(made[0].numel(), device="cpu")
            return Update(*made, selection.indices, None, rows[:, 0].long(), size)
        picks = read_picks(rows, longest, selection, values, padding)
        assert picks.values is not None
        if ctx.disjoint:
            union, size = picks.joined(), picks.counts.sum()
            total = joined(picks.values)
        else:
            parts = list(zip(picks.indices, picks.values, strict=True))
            union, total, size = add_up(parts, padding)
        return Update(union, total / ctx.world_size, selection.indices, None, picks.counts, size)
