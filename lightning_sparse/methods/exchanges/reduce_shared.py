"""All-reduce of the values at selections that are equal on all ranks: union release without sent indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.methods.exchanges.base import EXCHANGES, Exchange, own_picks, reduce_at


@EXCHANGES.register
@dataclass(frozen=True)
class ReduceShared(Exchange):
    """Average the values at a selection that all ranks share; no indices are sent.

    ``update[S] = (1/n) sum_i acc_i[S]`` for the common selection S, and every rank removes its values at S. One
    collective; each rank moves ``2 (n - 1) / n k w`` bytes for k coordinates and values of w bytes: fewer than dense at
    every density below 1.

    References:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, arXiv 1809.07599 (rand-k).
    """

    accepts: ClassVar[frozenset[Agreement]] = frozenset({Agreement.IDENTICAL})
    carries_second: ClassVar[bool] = True

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
        """Exchange one group; see :class:`~lightning_sparse.methods.exchanges.Exchange`."""
        n, indices = ctx.world_size, own_picks(selection)
        mean, second = yield from reduce_at(acc, indices, ctx)
        counts = selection.count.repeat(n)
        return Update(indices, mean, indices, None, counts, selection.count, second=second)
