"""Local gradient clipping of DGC."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_sparse.core.checks import check_positive
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Context
from lightning_sparse.methods.memory.base import MEMORIES, Memory
from lightning_sparse.methods.memory.residual import Residual
from lightning_sparse.methods.memory.transform import GradientTransform
from lightning_sparse.ops import static_shapes
from lightning_sparse.ops.length import norm


@MEMORIES.register
@dataclass(frozen=True)
class ClipByNorm(GradientTransform):
    """Clip each rank's gradient before another memory absorbs it.

    Clipping the average, like the Trainer's ``gradient_clip_val``, would clip the sum of many steps. DGC clips the
    incoming gradient: a group's gradient with a Euclidean norm above ``max_norm / sqrt(n)`` is scaled down to that
    norm, because the sum of n independent gradients is about ``sqrt(n)`` times as long as each of them. The limit is
    meant for that sum; for a limit c on the *average* over ranks set ``max_norm = n * c``.

    The limit applies to each group separately. A gradient with a norm below it over the whole model is never changed; a
    gradient of many groups may exceed it as a whole and still pass. With ``grouping="model"`` it is exactly DGC's rule.
    Dense groups are clipped in the same way. The part that is clipped is lost: it does not enter the residual.

    Args:
        max_norm: largest norm, above 0, in units of the gradient.
        memory: memory that absorbs the clipped gradient.

    Raises:
        ValueError: if ``max_norm`` is not positive or ``memory`` is not a memory.

    Example:
        >>> import lightning_sparse as ls
        >>> import torch
        >>> stream = torch.tensor([[[30.0, 40.0]], [[3.0, 4.0]]])                # one rank: norms 50 and 5
        >>> memory = ls.memories.ClipByNorm(10.0)
        >>> [step.update.tolist() for step in ls.simulate(stream, sparsifier="top_k", density=1.0, memory=memory)]
        [[6.0, 8.0], [3.0, 4.0]]

    References:
        Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3.2 (local gradient clipping).
    """

    max_norm: float
    memory: Memory = field(default_factory=Residual)

    def __post_init__(self) -> None:
        check_positive(self.max_norm, "max_norm", infinite=True)
        super().__post_init__()

    def transform_(self, grad: Gradient, ctx: Context) -> None:
        """Scale the gradient in place. If its norm is not finite, all of it becomes NaN, and nothing is absorbed."""
        whole = norm(grad.flat())
        scale = (self.max_norm / math.sqrt(ctx.world_size) / whole).clamp(max=1).where(whole.isfinite(), float("nan"))
        for run in grad.runs if static_shapes(grad.device) or scale != 1 else ():
            run.mul_(scale)
