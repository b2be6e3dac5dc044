"""ScaleCom's low-pass filter on the residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_share
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Context, Update
from lightning_sparse.methods.memory.base import MEMORIES, Feedback, FeedbackState, give_back_, take_out_


@MEMORIES.register
@dataclass(frozen=True)
class LowPass(Feedback):
    """Error feedback whose residual follows slowly: ``residual' = residual + beta (gradient - sent)``.

    ``acc = residual + gradient`` as always, and afterwards ``residual' = (1 - beta) residual + beta (acc - sent)``. The
    residual is an average over about ``1 / beta`` steps instead of a sum. That makes the residuals of the ranks more
    alike, so that one rank's pick suits the others better (:class:`~lightning_sparse.CLTk`), and damps the noise that a
    large learning rate feeds back.

    What is conserved is changed by the factor: over the ranks, ``sum residual' - sum residual = beta (sum gradient -
    n update)``. A coordinate that is never sent keeps beta of its gradients; one that is sent keeps ``1 - beta`` of its
    old residual and is not forgotten at once. Costs two vectors of ``numel`` accumulator elements a rank.

    Args:
        beta: in (0, 1]; 1 is :class:`~lightning_sparse.Residual`. Values of 0.1 to 0.3 are meant for the large
            learning rates of large batches.

    Raises:
        ValueError: if ``beta`` is outside (0, 1].

    Example:
        >>> import lightning_sparse as ls
        >>> import torch
        >>> stream = torch.tensor([[[4.0, 2.0]], [[0.0, 0.0]]])                  # two steps of one rank, k = 1
        >>> [s.update.tolist() for s in ls.simulate(stream, sparsifier="topk", density=0.5, memory=ls.LowPass(0.5))]
        [[4.0, 0.0], [0.0, 1.0]]

    References:
        Chen et al., ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
        Training, NeurIPS 2020, arXiv 2104.11125, algorithm 1.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        check_share(self.beta, "beta")

    def accumulate_(self, state: FeedbackState, grad: Gradient, ctx: Context) -> Tensor:
        """``acc = residual + grad``."""
        residual, acc = state.residual
        for span, run in grad:
            torch.add(run, residual[span], out=acc[span])
        acc[-1:].zero_()
        return acc

    def settle_(self, state: FeedbackState, update: Update, rounding: Tensor | None = None) -> None:
        """``(1 - beta) residual + beta (acc - sent)``; what a cast of the mean lost was not sent either."""
        residual, acc = state.residual
        take_out_(acc, update)
        torch.lerp(residual, acc, self.beta, out=acc)
        if rounding is not None:
            give_back_(acc, update, self.beta * rounding)
