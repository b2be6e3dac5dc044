"""Plain error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparse.core.checks import check_flag, check_share
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Absorbed, Context
from lightning_sparse.methods.memory.base import MEMORIES, Feedback, FeedbackState, Memory
from lightning_sparse.ops import accumulate_


@MEMORIES.register
@dataclass(frozen=True)
class Residual(Feedback):
    """Plain error feedback: ``acc = residual + gradient``; the values that are not sent are the next residual.

    Gradients are not scaled by the learning rate: what waits is applied at the rate of the step that sends it. With
    ``rates=True`` it is the papers' ``acc = residual + lr * gradient``, with the rate that the parameter has in that
    step; coordinates are selected by these, and ``.grad`` gets their average divided by the rate. So SGD moves
    parameters by what waited, at the rates at which it came, and its momentum continues as from any gradient. With a
    constant rate both are the same. A parameter whose rate is 0 takes no part: its gradient is thrown away, and its
    residual stays as it is.

    This memory costs one vector of ``numel`` accumulator elements a rank.

    Args:
        decay: ``acc = decay * residual + gradient``, in (0, 1]. Below 1, the weight of old gradients decays, and a
            part of them is never sent.
        rates: multiply gradients by their learning rates. Needs ``torch.optim.SGD``, with or without momentum: the
            steps of others, such as Adam's, are not the rate times a gradient.

    Raises:
        ValueError: if ``decay`` is outside (0, 1], or a flag is no bool; in the first step, if there are no rates, as
            in :func:`~lightning_sparse.simulate`.

    Example:
        >>> import lightning_sparse as ls
        >>> import torch
        >>> stream = torch.tensor([[[3.0, 2.0]], [[0.0, 0.0]]])                  # two steps of one rank, k = 1
        >>> options = {"sparsifier": "top_k", "density": 0.5}
        >>> [step.update.tolist() for step in ls.simulate(stream, **options, memory=ls.memories.Residual())]
        [[3.0, 0.0], [0.0, 2.0]]
        >>> [step.update.tolist() for step in ls.simulate(stream, **options, memory=ls.memories.NoMemory())]
        [[3.0, 0.0], [0.0, 0.0]]

    References:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, arXiv 1809.07599, algorithm 1.
    """

    decay: float = 1.0
    rates: bool = False
    takes_runs = True

    def __post_init__(self) -> None:
        check_share(self.decay, "decay")
        check_flag(self.rates, "rates")

    def __repr__(self) -> str:
        """Leave out rates unless they are asked for: most never hear of them."""
        return f"{type(self).__name__}(decay={self.decay!r}{', rates=True' if self.rates else ''})"

    @property
    def reads_rates(self) -> bool:
        """Return :attr:`rates`."""
        return self.rates

    def absorb_(self, state: FeedbackState, grad: Gradient, ctx: Context) -> Absorbed:
        """Set ``residual = decay * residual + grad``, or ``+ rate * grad``."""
        acc = state.residual
        if self.rates:
            if ctx.rates is None:
                raise ValueError("Residual(rates=True) needs the learning rates of an optimizer, and there is none.")
            grad = grad.times(ctx.rates)
        return Absorbed(acc, accumulate_(acc[:-1], grad.runs, self.decay, ctx.candidates))


def as_memory(memory: Memory | str | None) -> Memory:
    """Return the memory for an instance or a name such as ``"low_pass"``; :class:`Residual` for None.

    Raises:
        ValueError: if a name is unknown (the closest known names are listed) or needs arguments, or for another type.
    """
    return Residual() if memory is None else MEMORIES.resolve(memory)
