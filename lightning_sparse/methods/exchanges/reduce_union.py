"""All-gather of indices, all-reduce of the values at their union: union release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.methods.exchanges.base import EXCHANGES, Exchange, Picks, gather_picks, joined, reduce_at
from lightning_sparse.ops import distinct, static_shapes, unite, united


@EXCHANGES.register
@dataclass(frozen=True)
class ReduceUnion(Exchange):
    """Average the values of all ranks at every coordinate that any rank selected.

    ``U = union of S_i``, ``update[U] = (1/n) sum_i acc_i[U]``, and every rank removes its values at U. Residuals stay
    smaller than with own release, but more values are sent: each rank moves ``4 (n - 1) (m + 1)`` bytes of indices for
    the longest selection m and ``2 (n - 1) / n |U| w`` bytes of values of w bytes. With exclusive selections
    ``|U| = k`` for any n, and these are fewer bytes than dense up to a density of 2/3 (4-byte values, equal counts).

    References:
        Yoon, Oh, MiCRO, arXiv 2310.00967; Preserving Near-Optimal Gradient Sparsification Cost (ExDyna),
        arXiv 2402.13781: there all methods, Top-k included, are exchanged this way.
    """

    accepts: ClassVar[frozenset[Agreement]] = frozenset({Agreement.INDEPENDENT, Agreement.SHARED, Agreement.DISJOINT})
    carries_second: ClassVar[bool] = True

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
        """One group; see :class:`~lightning_sparse.methods.exchanges.Exchange`."""
        padding = acc.numel() - 1
        picks = yield from gather_picks(selection, None, padding)
        union = union_of(picks, selection, padding, ctx)
        mean, second = yield from reduce_at(acc, union.indices, ctx)
        return Update(union.indices, mean, union.indices, None, picks.counts, union.size, union.named, second)


class Union(NamedTuple):
    """The coordinates that the ranks will send together."""

    indices: Tensor
    """(u,) int64 coordinates and padding, as in :class:`~lightning_sparse.core.step.Update`."""
    size: Tensor
    """() int64: different ones among them."""
    named: Tensor
    """() int64: different ones that any rank named, before the selection's limit."""
    levels: Tensor
    """(u,) integers: the largest level that a rank gave the coordinate; 0 where none were given."""


def union_of(picks: Picks, selection: Selection, padding: int, ctx: Context, levels: Tensor | None = None) -> Union:
    """The union of all picks, thinned to the selection's limit: spare picks first, and others in each step.

    On the CPU, a union with repeated coordinates is left as it is where it has the length of the selection's total:
    their sums are equal, and the message is as long in every step. On a device, slots are cut down to the total.

    Args:
        picks: of all ranks.
        selection: of this rank, for what it promises about all of them.
        padding: the padding index.
        ctx: the step.
        levels: of all picks in rank order, integers in [0, 2**20), int64 on the CPU; None: there are none.
    """
    if static_shapes(picks.counts.device):
        all_picks = picks.joined()
        spare = None if picks.spare is None else joined(picks.spare)
        # Of what is below the padding index, there is not more than the total.
        return Union(*united(all_picks, spare, levels, padding, selection.total, selection.limit, ctx.step))
    if levels is None:
        all_picks = picks.joined()
        levels = torch.zeros_like(all_picks)
        if ctx.disjoint or all_picks.numel() == selection.total:
            size = picks.counts.sum() if ctx.disjoint else distinct(all_picks, padding)[1]
            return Union(all_picks, size, size, levels)
    assert not isinstance(picks.indices, Tensor)
    assert not isinstance(picks.spare, Tensor)  # one vector for each rank, where lengths are known
    union, levels, before = unite(picks.indices, levels, picks.spare, padding, selection.limit, ctx.step)
    size, named = (torch.tensor(number, device="cpu") for number in (union.numel(), before))
    end = selection.total if union.numel() == before else None  # more than promised, if a rank raises an alarm
    return Union(union[:end], size, named, levels[:end].long())
