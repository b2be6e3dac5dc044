"""Adam before the sparse exchange instead of behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.kernels import static_shapes
from lightning_sparse.memory.base import Feedback, FeedbackState, Memory, check_share, zeros
from lightning_sparse.memory.momentum import has_momentum
from lightning_sparse.types import Context, Update

HOST_PIECE, DEVICE_PIECE = 1 << 15, 1 << 24
"""Elements worked on at once: what is only needed on the way stays in cache, or below 64 MiB."""
ADAPTING = {"betas", "rho", "alpha", "etas", "lr_decay", "beta2_decay", "history_size"}
"""Settings of torch's optimizers other than SGD, each of which has one of these."""


@dataclass
class AdamState(FeedbackState):
    """Four buffers of numel + 1 slots, the number of committed steps, and the gradient between halves of a step."""

    first: Tensor
    second: Tensor
    steps: Tensor
    """() float64."""
    grad: Tensor | None = None


@dataclass(frozen=True)
class AdamCorrection(Feedback):
    """Each rank accumulates and sends the Adam direction of its own gradients; the optimizer is plain SGD."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_share(self.beta1, "beta1", zero=True, one=False)
        check_share(self.beta2, "beta2", zero=True, one=False)
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)) or not self.eps > 0:
            raise ValueError(f"Expected eps to be a positive number but got {self.eps!r}.")

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> AdamState:
        """Four zero vectors of ``numel + 1`` slots."""
        residual, acc, first, second = zeros(4, numel, device, dtype)
        return AdamState(residual, acc, first, second, torch.zeros((), device=device, dtype=torch.float64))

    def accumulate_(self, state: AdamState, grad: Tensor, ctx: Context) -> Tensor:
        """``acc = residual + direction``; the moments are formed again when the step is committed."""
        numel = state.acc.numel() - 1
        state.grad = grad[:numel]
        steps = state.steps + 1
        for piece in _pieces(numel, grad.device):
            first, second = self._moments(state, piece)
            first /= 1 - torch.pow(self.beta1, steps)
            second /= 1 - torch.pow(self.beta2, steps)
            direction = self._direction(first, second, ctx.world_size)
            torch.add(state.residual[piece], direction, out=state.acc[piece])
        state.acc[numel:].zero_()
        return state.acc

    def forget_(self, state: AdamState, update: Update, void: Tensor) -> None:  # type: ignore[override]
        """What was sent leaves the residual; the moments move on."""
        super().forget_(state, update, void)
        on_device = static_shapes(void.device)
        if on_device or not void:
            for piece in _pieces(state.acc.numel() - 1, void.device):
                for old, new in zip((state.first, state.second), self._moments(state, piece), strict=True):
                    old[piece] = torch.where(void, old[piece], new) if on_device else new
            state.steps += ~void
        state.grad = None

    def vectors(self, state: AdamState) -> dict[str, Tensor]:  # type: ignore[override]
        """Residual and both moments."""
        return {"residual": state.residual, "first": state.first, "second": state.second}

    def for_dense(self) -> Memory:
        """The same: the optimizer behind it is no Adam for dense groups either."""
        return self

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what is not SGD without momentum.

        Raises:
            ValueError: saying what to set.
        """
        adapts = any(ADAPTING & group.keys() for group in optimizer.param_groups)
        if adapts or has_momentum(optimizer):
            raise ValueError(
                "AdamCorrection sends Adam's directions, and the optimizer must only apply them, but got "
                f"{type(optimizer).__name__}{'' if adapts else ' with momentum'}. Set torch.optim.SGD(lr=<the lr you "
                "would give AdamW>, momentum=0, weight_decay=<AdamW's>)."
            )

    def _moments(self, state: AdamState, piece: slice) -> tuple[Tensor, Tensor]:
        """The next moments of a piece of the group."""
        assert state.grad is not None
        grad = state.grad[piece].to(state.first.dtype)
        first = state.first[piece] * self.beta1
        second = state.second[piece] * self.beta2
        return first.add_(grad, alpha=1 - self.beta1), second.addcmul_(grad, grad, value=1 - self.beta2)

    def _direction(self, first: Tensor, second: Tensor, n: int) -> Tensor:
        """From bias-corrected moments."""
        return math.sqrt(n) * first / (second.sqrt() + self.eps)


def _pieces(numel: int, device: torch.device) -> list[slice]:
    size = DEVICE_PIECE if static_shapes(device) else HOST_PIECE
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]
