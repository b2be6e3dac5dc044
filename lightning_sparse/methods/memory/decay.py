"""Weight decay on each rank, before the sparse exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_sparse.core.checks import check_integer, check_number
from lightning_sparse.core.layout import Gradient, flattened
from lightning_sparse.core.step import Context
from lightning_sparse.methods.memory.base import MEMORIES, Memory
from lightning_sparse.methods.memory.residual import Residual
from lightning_sparse.methods.memory.transform import GradientTransform


@MEMORIES.register
@dataclass(frozen=True)
class WeightDecay(GradientTransform):
    """Add the weight decay to each rank's gradient before another memory absorbs it.

    ``torch.optim.SGD(weight_decay=decay)`` forms ``gradient + decay * parameter`` after the exchange, from the sparse
    average. Every coordinate then decays at every step, while its gradient arrives rarely, as a sum of many steps. Here
    the decay stays in the residual together with the gradient that it balances, and with
    :class:`.MomentumCorrection` inside it gets momentum, as in SGD. At density 1 both are equal. Set
    the optimizer's own ``weight_decay`` to 0. This memory is meant for SGD; leave AdamW's decoupled decay to AdamW.

    Dense groups decay in the same way. A parameter that no rank used in a step does not decay.

    Args:
        decay: factor of the parameter, at least 0, as ``weight_decay`` of ``torch.optim.SGD``.
        memory: memory that absorbs the sum.
        min_ndim: parameters with fewer dimensions do not decay; 2 excludes biases and norms.

    Raises:
        ValueError: if ``decay`` is not a number of at least 0, ``memory`` is not a memory or ``min_ndim`` is not an
            integer of at least 0; in the first step, if there is no model, as in :func:`~lightning_sparse.simulate`.

    Example:
        >>> import lightning_sparse as ls
        >>> memory = ls.memories.WeightDecay(1e-4, ls.memories.MomentumCorrection(0.9), min_ndim=2)
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
        check_number(self.decay, "decay")
        check_integer(self.min_ndim, "min_ndim", least=0)
        super().__post_init__()

    def transform_(self, grad: Gradient, ctx: Context) -> None:
        """Add the decay in place."""
        if ctx.parameters is None:
            raise ValueError("WeightDecay needs the parameters of a model, and there is none here.")
        for span, parameter in ctx.parameters:
            if parameter.dim() >= self.min_ndim:
                grad[span].add_(flattened(parameter), alpha=self.decay)
