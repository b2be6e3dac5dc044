"""Weight decay on each rank, before anything is left unsent."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_sparse.core.checks import check_integer, expect, is_number
from lightning_sparse.core.layout import Gradient, flattened
from lightning_sparse.core.step import Context
from lightning_sparse.methods.memory.base import MEMORIES, Memory
from lightning_sparse.methods.memory.residual import Residual
from lightning_sparse.methods.memory.transform import GradientTransform


@MEMORIES.register
@dataclass(frozen=True)
class WeightDecay(GradientTransform):
    """Add the weight decay to each rank's gradient before it is accumulated; around any other memory.

    ``gradient + decay * parameter`` is what ``torch.optim.SGD(weight_decay=decay)`` forms behind the exchange, from the
    sparse average. There every coordinate decays at every step, while its gradient arrives rarely and in lumps. Here
    the decay waits in the residual with the gradient that it was meant to balance, and with
    :class:`~lightning_sparse.MomentumCorrection` inside it gets momentum, as in SGD. At density 1 both are the same.
    Set the optimizer's own ``weight_decay`` to 0. Meant for SGD: AdamW decays apart from the gradient, and its decay
    should stay where it is.

    Groups that are kept dense decay in the same way. Where no rank used a parameter in a step, it does not decay.

    Args:
        decay: factor of the parameter, at least 0, as ``weight_decay`` of ``torch.optim.SGD``.
        memory: what remembers the sum.
        min_ndim: parameters with fewer dimensions do not decay; 2 spares biases and norms.

    Raises:
        ValueError: if ``decay`` is negative or no number, ``memory`` no memory or ``min_ndim`` no integer from 0 on; in
            the first step, where there is no model, as in :func:`~lightning_sparse.simulate`.

    Example:
        >>> import lightning_sparse as ls
        >>> memory = ls.WeightDecay(1e-4, ls.MomentumCorrection(0.9), min_ndim=2)
        >>> strategy = ls.SparseDDPStrategy(memory=memory)

    References:
        Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887: the gradient of algorithm 1 is that of a
        loss with its regularisation.
    """

    decay: float
    memory: Memory = field(default_factory=Residual)
    min_ndim: int = 0
    reads_parameters = True
    decays = True

    def __post_init__(self) -> None:
        expect(is_number(self.decay) and self.decay >= 0, "decay", "a number of at least 0", self.decay)
        check_integer(self.min_ndim, "min_ndim", least=0)
        super().__post_init__()

    def transform_(self, grad: Gradient, ctx: Context) -> None:
        """Add the decay in place."""
        if ctx.parameters is None:
            raise ValueError("WeightDecay needs the parameters of a model, and there is none here.")
        for span, parameter in ctx.parameters:
            if parameter.dim() >= self.min_ndim:
                grad[span].add_(flattened(parameter), alpha=self.decay)
