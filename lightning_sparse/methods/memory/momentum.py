"""Momentum correction of DGC, with factor masking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_flag, check_share
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Absorbed, Context, Update
from lightning_sparse.methods.memory.base import MEMORIES, Feedback, FeedbackState, advance_, pieces


@dataclass(frozen=True)
class MomentumState(FeedbackState):
    """State with the velocity of this rank's gradients."""

    momentum: Tensor
    remembered: ClassVar[tuple[str, ...]] = ("residual", "momentum")


@MEMORIES.register
@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """Momentum on each rank, before the sparse exchange: ranks accumulate velocities instead of gradients.

    The optimizer's momentum buffer gets a gradient only after it was sent, late and summed with others. Here each rank
    runs momentum SGD on its own gradients at every step and sends the velocities: ``m = momentum m + gradient``,
    ``acc = residual + m``; with Nesterov's rule ``m = momentum (m + gradient)``, ``acc = residual + m + gradient``. The
    optimizer is plain SGD: set its own momentum to 0. Dense groups use this memory, too, and so have momentum.

    *Factor masking* sets m to zero at coordinates that were sent and arrived, so that old directions do not persist. It
    is left out in steps that send everything (density 1, dense groups): the result is momentum SGD. The weight decay of
    the optimizer is added to the averaged velocity and has no momentum.

    Without masking nothing is lost: the velocities of all steps are ``sum_t m_t = sent + residual``. This memory costs
    two vectors of ``numel`` accumulator elements a rank.

    Args:
        momentum: in [0, 1).
        nesterov: use Nesterov's rule, as ``torch.optim.SGD(nesterov=True)``.
        masking: clear the momentum of coordinates that were sent.

    Raises:
        ValueError: if ``momentum`` is outside [0, 1), or a flag is no bool.

    Example:
        >>> import lightning_sparse as ls
        >>> import torch
        >>> stream = torch.tensor([[[4.0, 2.0]], [[0.0, 0.0]], [[0.0, 0.0]]])    # three steps of one rank, k = 1
        >>> memory = ls.memories.MomentumCorrection(0.5)
        >>> [step.update.tolist() for step in ls.simulate(stream, sparsifier="top_k", density=0.5, memory=memory)]
        [[4.0, 0.0], [0.0, 3.0], [0.0, 0.0]]

    References:
        Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, sections 3.1 and 3.3, algorithms 1 and 4.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    averages = "velocities"
    state_class = MomentumState  # type: ignore[assignment]  # annotations of bases stop jsonargparse

    def __post_init__(self) -> None:
        check_share(self.momentum, "momentum", zero=True, one=False)
        check_flag(self.nesterov, "nesterov")
        check_flag(self.masking, "masking")

    def absorb_(self, state: MomentumState, grad: Gradient, ctx: Context) -> Absorbed:
        """Update the velocity and add it to the residual."""
        finite = []
        for span, run in pieces(grad):
            residual, momentum = state.residual[span], state.momentum[span]
            if self.nesterov:
                velocity = torch.add(momentum, run).mul_(self.momentum)
                acc = (residual + velocity).add_(run)
            else:
                velocity = torch.add(run, momentum, alpha=self.momentum)
                acc = residual + velocity
            finite.append(advance_([momentum, residual], [velocity, acc]))
        return Absorbed(state.residual, torch.stack(finite).all())

    def settle_(  # type: ignore[override]
        self, state: MomentumState, update: Update, rounding: Tensor | None = None
    ) -> None:
        """Remove sent values from the residual and, with masking, clear their momentum."""
        super().settle_(state, update, rounding)
        if not self.masking or update.sent is None:
            return
        momentum, numel = state.momentum, state.momentum.numel() - 1
        cleared = torch.ones_like(update.sent, dtype=torch.bool)
        if update.sent_values is not None:  # an exchange that may drop selected coordinates
            cleared = update.sent_values != 0
            if update.indices is not None:
                cleared &= _marked(update.indices, momentum)[update.sent]
        if update.sent.numel() >= numel:
            cleared &= ~_marked(update.sent, momentum)[:numel].all()
        momentum.index_copy_(0, update.sent, momentum[update.sent].masked_fill_(cleared, 0))


def _marked(indices: Tensor, like: Tensor) -> Tensor:
    """Return a mask like a vector, True at the indices."""
    return torch.zeros_like(like, dtype=torch.bool).index_fill_(0, indices, True)
