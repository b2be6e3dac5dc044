"""Plain error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparse.core.checks import check_share
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Absorbed, Context
from lightning_sparse.methods.memory.base import MEMORIES, Feedback, FeedbackState, Memory
from lightning_sparse.ops import accumulate_


@MEMORIES.register
@dataclass(frozen=True)
class Residual(Feedback):
    """Plain error feedback: ``acc = residual + gradient``; the values that are not sent are the next residual.

    Gradients are not scaled by the learning rate. For SGD with a constant rate, this equals the papers' ``residual + lr
    * gradient``. This memory costs one vector of ``numel`` accumulator elements a rank.

    Args:
        decay: ``acc = decay * residual + gradient``, in (0, 1]. Below 1, the weight of old gradients decays, and a
            part of them is never sent.

    Raises:
        ValueError: if ``decay`` is outside (0, 1].

    Example:
        >>> import lightning_sparse as ls
        >>> import torch
        >>> stream = torch.tensor([[[3.0, 2.0]], [[0.0, 0.0]]])                  # two steps of one rank, k = 1
        >>> [step.update.tolist() for step in ls.simulate(stream, sparsifier="top_k", density=0.5, memory=ls.memories.Residual())]
        [[3.0, 0.0], [0.0, 2.0]]
        >>> [step.update.tolist() for step in ls.simulate(stream, sparsifier="top_k", density=0.5, memory=ls.memories.NoMemory())]
        [[3.0, 0.0], [0.0, 0.0]]

    References:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, arXiv 1809.07599, algorithm 1.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        check_share(self.decay, "decay")

    def absorb_(self, state: FeedbackState, grad: Gradient, ctx: Context) -> Absorbed:
        """Set ``residual = decay * residual + grad``."""
        acc = state.residual
        return Absorbed(acc, accumulate_(acc[:-1], grad.runs, self.decay, ctx.candidates))


def as_memory(memory: Memory | str | None) -> Memory:
    """Return the memory for an instance or a name such as ``"low_pass"``; :class:`Residual` for None.

    Raises:
        ValueError: if a name is unknown (the closest known names are listed) or needs arguments, or for another type.
    """
    return Residual() if memory is None else MEMORIES.resolve(memory)
