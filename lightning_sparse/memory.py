"""Error feedback: what a rank remembers of the gradients it has not sent yet. Sole writer of the residual.

A memory keeps two flat buffers per group, ``residual`` and ``acc``, and swaps them when a step is committed. The
residual before the step therefore stays whole until the ranks have agreed that the step counts: a step that is void
(a non-finite gradient somewhere) leaves it untouched, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.kernels import static_shapes
from lightning_sparse.types import Update


class Memory(ABC):
    """Turns gradients into accumulators and forgets what was sent. A frozen dataclass of settings, nothing else."""

    @abstractmethod
    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Any:
        """State for one group, empty. ``dtype`` is the accumulator's, float32 or float64."""

    @abstractmethod
    def accumulate_(self, state: Any, grad: Tensor) -> Tensor:
        """Form the accumulator of this step.

        Args:
            state: this group's state.
            grad: (numel,) or (numel + 1,), this rank's gradient; read only.

        Returns:
            acc, (numel + 1,), the last slot zero. Scratch until :meth:`forget_`; the remembered state is unchanged.
        """

    @abstractmethod
    def forget_(self, state: Any, update: Update, void: Tensor) -> None:
        """Commit the step: take what was sent out of acc and remember the rest; change nothing if ``void``."""

    @abstractmethod
    def keep_(self, state: Any, update: Update, rounding: Tensor, void: Tensor) -> None:
        """Take back what casting the average to the gradient's dtype lost: (u,) at the update's coordinates."""

    @abstractmethod
    def set_aside_(self, state: Any, spans: list[slice]) -> list[Tensor]:
        """Empty the memory in these spans and return what was there, for :meth:`bring_back_`."""

    @abstractmethod
    def bring_back_(self, state: Any, spans: list[slice], aside: list[Tensor]) -> None:
        """Undo :meth:`set_aside_`."""

    @abstractmethod
    def residual(self, state: Any) -> Tensor | None:
        """(numel,) view of what has not been sent yet, or None if nothing is remembered."""


def as_memory(memory: Memory | None) -> Memory:
    """Turn None into :class:`Residual`; leave memories as they are.

    Raises:
        ValueError: if it is neither.
    """
    if memory is None:
        return Residual()
    if not isinstance(memory, Memory):
        raise ValueError(f"Expected memory to be a Memory such as Residual(), or None, but got {memory!r}.")
    return memory


@dataclass
class FeedbackState:
    """Two buffers of numel + 1 slots, swapped at each commit."""

    residual: Tensor
    acc: Tensor


@dataclass(frozen=True)
class Residual(Memory):
    """Plain error feedback: ``acc = residual + gradient``; what was not sent is the next residual.

    Gradients enter unscaled by the learning rate ("raw" mode), which for SGD with a constant rate is identical to the
    papers' ``residual + lr * gradient``. Costs two vectors of ``numel`` accumulator elements a rank.

    Example:
        >>> import lightning_sparse as ls
        >>> import torch
        >>> stream = torch.tensor([[[3.0, 2.0]], [[0.0, 0.0]]])                  # two steps of one rank, k = 1
        >>> [step.update.tolist() for step in ls.simulate(stream, sparsifier="topk", density=0.5, memory=ls.Residual())]
        [[3.0, 0.0], [0.0, 2.0]]
        >>> [step.update.tolist() for step in ls.simulate(stream, sparsifier="topk", density=0.5, memory=ls.NoMemory())]
        [[3.0, 0.0], [0.0, 0.0]]

    References:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, arXiv 1809.07599, algorithm 1.
    """

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> FeedbackState:
        """Two zero vectors of ``numel + 1`` slots."""
        return FeedbackState(*(torch.zeros(numel + 1, device=device, dtype=dtype) for _ in range(2)))

    def accumulate_(self, state: FeedbackState, grad: Tensor) -> Tensor:
        """``acc = residual + grad``."""
        numel = state.acc.numel() - 1
        torch.add(state.residual[:numel], grad[:numel], out=state.acc[:numel])
        state.acc[numel:].zero_()
        return state.acc

    def forget_(self, state: FeedbackState, update: Update, void: Tensor) -> None:
        """``residual = acc`` with the sent coordinates at zero, or at the rounding error of what was sent."""
        if not static_shapes(void.device):
            if not void:
                _take_out(state.acc, update)
                state.residual, state.acc = state.acc, state.residual
            return
        _take_out(state.acc, update)
        torch.where(void, state.residual, state.acc, out=state.acc)
        state.residual, state.acc = state.acc, state.residual

    def keep_(self, state: FeedbackState, update: Update, rounding: Tensor, void: Tensor) -> None:
        """Each rank keeps the rounding error of the mean; over n ranks that is n times it, what the sum lost."""
        rounding = torch.where(void, torch.zeros_like(rounding), rounding)
        if update.indices is None:
            state.residual[:-1].add_(rounding)
            return
        # Not index_add_: a repeated coordinate carries the same value and must count once.
        state.residual.index_copy_(0, update.indices, state.residual[update.indices] + rounding)
        state.residual[-1:].zero_()

    def set_aside_(self, state: FeedbackState, spans: list[slice]) -> list[Tensor]:
        """Cut these spans out of the residual."""
        aside = [state.residual[span].clone() for span in spans]
        for span in spans:
            state.residual[span].zero_()
        return aside

    def bring_back_(self, state: FeedbackState, spans: list[slice], aside: list[Tensor]) -> None:
        """Put the spans back."""
        for span, piece in zip(spans, aside, strict=True):
            state.residual[span].copy_(piece)

    def residual(self, state: FeedbackState) -> Tensor:
        """(numel,) view."""
        return state.residual[:-1]


@dataclass(frozen=True)
class NoMemory(Memory):
    """No error feedback: what is not sent in its own step is lost. For comparison, and for dense groups.

    Training on a biased selection without feedback converges worse or not at all; use :class:`Residual`.
    """

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """One vector of ``numel + 1`` slots, scratch for acc."""
        return torch.zeros(numel + 1, device=device, dtype=dtype)

    def accumulate_(self, state: Tensor, grad: Tensor) -> Tensor:
        """``acc = grad``."""
        numel = state.numel() - 1
        state[:numel].copy_(grad[:numel])
        state[numel:].zero_()
        return state

    def forget_(self, state: Tensor, update: Update, void: Tensor) -> None:
        """Nothing is remembered."""

    def keep_(self, state: Tensor, update: Update, rounding: Tensor, void: Tensor) -> None:
        """Nothing is remembered."""

    def set_aside_(self, state: Tensor, spans: list[slice]) -> list[Tensor]:
        """Nothing is remembered."""
        return []

    def bring_back_(self, state: Tensor, spans: list[slice], aside: list[Tensor]) -> None:
        """Nothing is remembered."""

    def residual(self, state: Tensor) -> None:
        """Always None."""


def _take_out(acc: Tensor, update: Update) -> None:
    """Leave in acc what did not travel."""
    if update.sent is None:
        if update.sent_values is None:
            acc.zero_()
        else:
            acc[:-1].sub_(update.sent_values)
    elif update.sent_values is None:
        acc.index_fill_(0, update.sent, 0)
    else:
        acc.index_copy_(0, update.sent, acc[update.sent] - update.sent_values)
