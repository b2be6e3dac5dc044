"""CLT-k: the ranks take turns at selecting for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.ops import top_k


@SPARSIFIERS.register
@dataclass(frozen=True)
class CLTK(Sparsifier):
    """Cyclic local top-k: in step t, rank ``t mod n`` selects its k largest magnitudes, and all ranks send there.

    Every rank clears its residual at S. Exactly k coordinates are sent for any n: no build-up, no padding, one vector
    of indices on the wire. Only the leader searches its accumulator; the others are idle meanwhile.

    The method relies on similar accumulators on all ranks. If a coordinate is large on one rank alone, it waits for up
    to n steps. For large batches and learning rates ScaleCom smooths the residual with a low-pass filter: that is
    ``memory=ls.memories.LowPass(beta)``, not part of the selection.

    Formula:
        ``S = argtop_k |acc_leader|`` with leader ``t mod n``; ``update[S] = (1/n) sum_i acc_i[S]``

    Differs from the paper:
        ScaleCom selects in chunks of the group to save time; here the selection is exact. The baseline of that name in
        the ExDyna experiments lets all ranks search and discards the results of the followers.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> grads = torch.tensor([[4.0, 0.0, -1.0, 2.0], [0.0, 8.0, 1.0, 2.0]]).repeat(2, 1, 1)    # two steps and ranks
        >>> steps = list(ls.simulate(grads, sparsifier="clt_k", density=0.25))
        >>> [(step.counts.tolist(), step.indices.tolist(), step.update.tolist()) for step in steps]
        [([1, 1], [0], [2.0, 0.0, 0.0, 0.0]), ([1, 1], [1], [0.0, 8.0, 0.0, 0.0])]

    References:
        Chen et al., ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
        Training, NeurIPS 2020, arXiv 2104.11125, section 3.
    """

    name: ClassVar[str] = "clt_k"
    agreement: ClassVar[Agreement] = Agreement.LEADER
    exchange: ClassVar[str] = "follow_leader"

    def select(self, acc: Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
        """Select the k largest on the leader, nothing on the other ranks; no state."""
        numel = acc.numel()
        k = count(ctx.density, numel)
        leads = ctx.rank == ctx.step % ctx.world_size
        indices = top_k(acc, k, ctx.candidates) if leads else torch.full((k,), numel, device=acc.device)
        return Selection(indices, torch.full((), k if leads else 0, device=acc.device), aligned=True), state
