"""Top-k: each rank's k largest magnitudes."""

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
class TopK(Sparsifier):
    """Each rank selects the k coordinates of its accumulator that are largest in magnitude.

    k is meant *per rank*: the union of n ranks holds up to
    n k coordinates, so that the actual density grows with n (gradient build-up). Exact on every device; ties go to the
    lower coordinate on the CPU.

    Formula:
        ``S_i = argtop_k |acc_i|`` with ``k = max(1, floor(density * numel))``; ``update = (1/n) sum_i scatter(S_i,
        acc_i[S_i])``

    Differs from the paper:
        Both published ways of sending are available: pairs with own release (``exchange="gather_pairs"``, the default,
        Aji and Heafield) and the union with the values of all ranks (``exchange="reduce_union"``, the Top-k baseline of
        MiCRO and ExDyna). Unlike the latter's code, k is at least 1 in small groups.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> grads = torch.tensor([[[4.0, 0.0, -1.0, 2.0], [0.0, 8.0, 1.0, 2.0]]])     # one step, two ranks
        >>> step = next(ls.simulate(grads, sparsifier=ls.sparsifiers.TopK(), density=0.25))
        >>> step.indices.tolist(), step.update.tolist(), step.build_up
        ([0, 1], [2.0, 4.0, 0.0, 0.0], 2.0)

    References:
        Aji, Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, arXiv 1704.05021, section 3.
    """

    name: ClassVar[str] = "top_k"
    agreement: ClassVar[Agreement] = Agreement.INDEPENDENT
    exchange: ClassVar[str] = "gather_pairs"
    reads_runs: ClassVar[bool] = True

    def select(self, acc: Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
        """Select the k largest; no state."""
        indices = top_k(acc, count(ctx.density, acc.numel()), ctx.candidates)
        picks = torch.full((), indices.numel(), device=acc.device)
        return Selection(indices, picks, aligned=True), state
