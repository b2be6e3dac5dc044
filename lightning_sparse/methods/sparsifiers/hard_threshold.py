"""Hard-threshold: every coordinate above a fixed magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.checks import is_number
from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.methods.sparsifiers.estimation import reaching

CAPACITY = 8
"""Device slots in multiples of k at the target density. On the CPU, selections have no limit."""


@SPARSIFIERS.register
@dataclass(frozen=True)
class HardThreshold(Sparsifier):
    """Each rank selects every coordinate whose accumulator reaches a fixed magnitude.

    Selection costs one pass, but the density is not controlled: it follows the
    scale of the gradients (up to 106.6 times the target was measured on Inception-v4 in the ExDyna paper). The density
    setting only decides the default threshold, and on CUDA the capacity of the messages: at most 8 times the target is
    sent, more are thinned evenly and stay in the residual.

    Formula:
        ``S_i = {j : |acc_i[j]| >= threshold}``; ``update[U] = (1/n) sum_i acc_i[U]``, U the union of the S_i

    Differs from the paper:
        Threshold and exchange are by default those of the MiCRO and ExDyna experiments; in the paper of Sahu et al.
        each rank sends and releases its own values: ``exchange="gather_pairs"``. On CUDA a rank sends at most 8 times
        the target.

    Args:
        threshold: magnitude above 0, in units of the accumulated gradient; with ``Residual(rates=True)`` of the
            gradient times the learning rate. None: ``1 / (2 sqrt(k))`` with k at the density of the step over all
            sparsified groups together, the formula of the MiCRO and ExDyna experiments; it does not depend on the
            gradients' scale. A threshold from each group's own k would be larger for smaller groups.

    Raises:
        ValueError: if the threshold is not a positive finite number.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> grads = torch.tensor([[[4.0, 0.0, -1.0, 2.0], [0.0, 8.0, 1.0, 2.0]]])     # one step, two ranks
        >>> step = next(ls.simulate(grads, sparsifier=ls.sparsifiers.HardThreshold(2.0), density=0.25))
        >>> step.counts.tolist(), step.indices.tolist(), step.update.tolist()
        ([2, 2], [0, 1, 3], [2.0, 4.0, 0.0, 2.0])

    References:
        Sahu et al., Rethinking Gradient Sparsification as Total Error Minimization, NeurIPS 2021, arXiv 2108.00951.
    """

    threshold: float | None = None

    agreement: ClassVar[Agreement] = Agreement.INDEPENDENT
    exchange: ClassVar[str] = "reduce_union"
    follows_density: ClassVar[bool] = False

    def __post_init__(self) -> None:
        given = self.threshold
        if given is not None and not (is_number(given) and 0 < given < math.inf):
            raise ValueError(
                f"Expected threshold to be a positive finite magnitude or None, but got {given!r}. "
                "A threshold of zero or less would select everything: use the sparsifier 'everything' for that."
            )

    def select(self, acc: Tensor, state: Tensor | None, ctx: Context) -> tuple[Selection, Tensor]:
        """Select all coordinates that reach the threshold; it is the state, () float64."""
        k = count(ctx.density, acc.numel())
        total = count(ctx.density, ctx.model_numel or acc.numel())
        magnitude = self.threshold if self.threshold is not None else 1 / (2 * math.sqrt(total))
        state = torch.full((), magnitude, dtype=torch.float64, device=acc.device)
        room = min(acc.numel(), CAPACITY * k)
        return reaching(acc, state, room, ctx.step, candidates=ctx.candidates), state
