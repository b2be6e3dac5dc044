"""Low-pass filter of ScaleCom on the residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_share
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Absorbed, Context, Update
from lightning_sparse.methods.memory.base import MEMORIES, Feedback, FeedbackState, advance_, pieces, put_back_


@dataclass(frozen=True)
class LowPassState(FeedbackState):
    """State with an accumulator of its own: the residual absorbs only a part of the gradient."""

    acc: Tensor


@MEMORIES.register
@dataclass(frozen=True)
class LowPass(Feedback):
    """Error feedback with a low-pass filter: ``residual' = residual + beta (gradient - sent)``.

    The accumulator is ``acc = residual + gradient``; after the exchange ``residual' = (1 - beta) residual + beta (acc -
    sent)``. Coordinates that are not sent sum gradients times beta; one that is sent keeps ``1 - beta`` of its old
    residual, so that it forgets within about ``1 / beta`` times. This makes the residuals of the ranks more alike, so
    that one rank's selection suits the others better (:class:`.CLTK`), and damps the noise that a large learning rate
    feeds back.

    The factor also appears in the conservation law: over the ranks, ``sum residual' - sum residual = beta (sum
    gradient - n update)``. This memory costs two vectors of ``numel`` accumulator elements a rank.

    Args:
        beta: in (0, 1]; 1 is :class:`.Residual`. Values of 0.1 to 0.3 are meant for the large
            learning rates of large batches.

    Raises:
        ValueError: if ``beta`` is outside (0, 1].

    Example:
        >>> import lightning_sparse as ls
        >>> import torch
        >>> stream = torch.tensor([[[4.0, 2.0]], [[0.0, 0.0]]])                  # two steps of one rank, k = 1
        >>> memory = ls.memories.LowPass(0.5)
        >>> [s.update.tolist() for s in ls.simulate(stream, sparsifier="top_k", density=0.5, memory=memory)]
        [[4.0, 0.0], [0.0, 1.0]]

    References:
        Chen et al., ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
        Training, NeurIPS 2020, arXiv 2104.11125, algorithm 1.
    """

    beta: float = 0.1
    remembers_at_once = False
    state_class = LowPassState  # type: ignore[assignment]  # annotations of bases stop jsonargparse

    def __post_init__(self) -> None:
        check_share(self.beta, "beta")

    def absorb_(self, state: LowPassState, grad: Gradient, ctx: Context) -> Absorbed:
        """Form ``acc = residual + grad``; :meth:`settle_` updates the residual."""
        state.acc.copy_(state.residual)
        finite = [advance_([state.acc[span]], [run + state.residual[span]]) for span, run in pieces(grad)]
        return Absorbed(state.acc, torch.stack(finite).all())

    def settle_(  # type: ignore[override]
        self, state: LowPassState, update: Update, rounding: Tensor | None = None
    ) -> None:
        """Set ``residual = (1 - beta) residual + beta (acc - sent)``; the error of a cast counts as not sent."""
        super().settle_(FeedbackState(state.acc), update)
        follows = torch.lerp(state.residual, state.acc, self.beta)
        if rounding is not None:
            put_back_(follows, update, self.beta * rounding)
        state.residual.copy_(follows)

    def skip_(self, state: LowPassState) -> None:
        """Set ``residual = (1 - beta) residual + beta acc``: nothing was sent."""
        state.residual.lerp_(state.acc, self.beta)
