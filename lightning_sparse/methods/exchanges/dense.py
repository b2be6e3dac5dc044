"""All-reduce of all coordinates, as in DDP, with the residual added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.methods.exchanges.base import EXCHANGES, Exchange, reduce_at


@EXCHANGES.register
@dataclass(frozen=True)
class Dense(Exchange):
    """Average all coordinates: ``update = (1/n) sum_i acc_i``; the residual is empty afterwards.

    It accepts every selection and ignores its coordinates. Each rank moves ``2 (n - 1) / n * numel * w`` bytes for
    values of w bytes.
    """

    accepts: ClassVar[frozenset[Agreement]] = frozenset(Agreement)
    carries_second: ClassVar[bool] = True

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
        """Exchange one group; see :class:`~lightning_sparse.methods.exchanges.Exchange`."""
        n, numel = ctx.world_size, acc.numel() - 1
        mean, second = yield from reduce_at(acc, None, ctx)
        counts = torch.full((n,), numel, device=acc.device)
        return Update(None, mean, None, None, counts, torch.full((), numel, device=acc.device), second=second)
