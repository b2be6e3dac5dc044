"""No sparsification: every coordinate, every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier


@SPARSIFIERS.register
@dataclass(frozen=True)
class Everything(Sparsifier):
    """Select all coordinates, as in plain DDP: the dense baseline, with the code and metrics of other methods.

    The density is ignored. Parameters that a plan keeps dense (``dense=["*.bias"]``) use this, too.

    Formula:
        ``update = (1/n) sum_i acc_i``

    Example:
        >>> import torch, lightning_sparse as ls
        >>> step = next(ls.simulate(torch.ones(1, 2, 5), sparsifier="everything", density=0.1))
        >>> step.density, step.update.tolist()
        (1.0, [1.0, 1.0, 1.0, 1.0, 1.0])
    """

    agreement: ClassVar[Agreement] = Agreement.EVERYTHING
    exchange: ClassVar[str] = "dense"
    reads_runs: ClassVar[bool] = True
    follows_density: ClassVar[bool] = False

    def select(self, acc: Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
        """Select all coordinates; the indices are left empty."""
        indices = torch.empty(0, dtype=torch.int64, device=acc.device)
        count = torch.full((), acc.numel(), device=acc.device)
        return Selection(indices, count, aligned=True), state
