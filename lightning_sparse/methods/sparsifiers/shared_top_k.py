"""SharedTopK: every rank selects its k/n largest coordinates, and all ranks send their values at all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.ops import pad, top_k


@SPARSIFIERS.register
@dataclass(frozen=True)
class SharedTopK(Sparsifier):
    """Each rank selects the ``k // n`` coordinates that are largest in magnitude in the whole group; all send there.

    Every rank clears its residual at the union U. At most k coordinates are sent for any n: there is no build-up, no
    threshold, no ranges, no start-up phase, and messages have a size that is known beforehand and equal on all ranks. A
    coordinate that several ranks select has the same sum each time it is sent. If k is below n, k of the ranks select
    one each, in turns.

    Unlike methods of exclusive ranges, each rank sends its largest coordinates at every step, not only when its turn
    at a range comes; unlike CLT-k, all ranks contribute at every step.

    If ranks have large values at the same coordinates, the selections overlap and the union is smaller than k.

    Formula:
        ``S_i = argtop_(k // n) |acc_i|``; ``update[U] = (1/n) sum_i acc_i[U]``, U the union of the S_i

    Example:
        >>> import torch, lightning_sparse as ls
        >>> grads = torch.tensor([[[4.0, 0.0, -1.0, 2.0], [1.0, 8.0, 1.0, 2.0]]])     # one step, two ranks
        >>> step = next(ls.simulate(grads, sparsifier="shared_top_k", density=0.5))
        >>> step.counts.tolist(), step.indices.tolist(), step.update.tolist()
        ([1, 1], [0, 1], [2.5, 4.0, 0.0, 0.0])

    References:
        Ours.
    """

    name: ClassVar[str] = "shared_top_k"
    agreement: ClassVar[Agreement] = Agreement.SHARED
    exchange: ClassVar[str] = "reduce_union"
    reads_runs: ClassVar[bool] = True

    def select(self, acc: Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
        """Select the ``k // n`` largest; no state."""
        numel, n = acc.numel(), ctx.world_size
        k = count(ctx.density, numel)
        share, turn = k // n, (ctx.rank - ctx.step) % n
        if share:
            picked = top_k(acc, share, ctx.candidates)
            slots, total = share, share * n
        else:
            picked = top_k(acc, 1)[: int(turn < k)]
            slots, total = 1, k
        picks = torch.full((), picked.numel(), device=acc.device)
        return Selection(pad(picked, slots, numel), picks, aligned=True, total=total), state
