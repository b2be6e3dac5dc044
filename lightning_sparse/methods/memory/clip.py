"""Local gradient clipping, as in DGC."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_positive
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Context
from lightning_sparse.methods.memory.base import MEMORIES, Memory
from lightning_sparse.methods.memory.residual import Residual
from lightning_sparse.methods.memory.transform import GradientTransform
from lightning_sparse.ops import static_shapes

CHUNK = 1 << 16
"""Elements of which norms are taken at once: float32 sums of millions of squares are off in the fourth digit."""


@MEMORIES.register
@dataclass(frozen=True)
class ClipByNorm(GradientTransform):
    """Clip each rank's gradient before it is accumulated; around any other memory.

    Clipping the average, as the Trainer's ``gradient_clip_val`` does, would clip what has gathered in residuals for
    many steps. DGC clips what comes in: a group's gradient whose Euclidean norm exceeds ``max_norm / sqrt(n)`` is
    scaled down to it, because the sum of n independent gradients is about ``sqrt(n)`` times as long as each of them.
    The limit is meant for that sum; for a limit c on the *average* over ranks set ``max_norm = n * c``.

    The limit holds for each group by itself: a gradient whose norm over the whole model is below it is never touched,
    but one of many groups may be longer as a whole and still pass. With ``grouping="model"`` it is exactly DGC's rule.
    Groups that are kept dense are clipped in the same way. What is clipped is gone: it does not enter the residual.

    Args:
        max_norm: largest norm, above 0, in units of the gradient.
        memory: what remembers the clipped gradient.

    Raises:
        ValueError: if ``max_norm`` is not positive or ``memory`` is no memory.

    Example:
        >>> import lightning_sparse as ls
        >>> import torch
        >>> stream = torch.tensor([[[30.0, 40.0]], [[3.0, 4.0]]])                # one rank: norms 50 and 5
        >>> memory = ls.ClipByNorm(10.0)
        >>> [step.update.tolist() for step in ls.simulate(stream, sparsifier="topk", density=1.0, memory=memory)]
        [[6.0, 8.0], [3.0, 4.0]]

    References:
        Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3.2 (local gradient clipping).
    """

    max_norm: float
    memory: Memory = field(default_factory=Residual)

    def __post_init__(self) -> None:
        check_positive(self.max_norm, "max_norm")
        super().__post_init__()

    def transform_(self, grad: Gradient, ctx: Context) -> None:
        """Scale the gradient in place; if its norm is not finite, all of it becomes NaN, and none is absorbed."""
        whole = norm(grad.flat())
        scale = (self.max_norm / math.sqrt(ctx.world_size) / whole).clamp(max=1).where(whole.isfinite(), float("nan"))
        for run in grad.runs if static_shapes(grad.device) or scale != 1 else ():
            run.mul_(scale)


def norm(x: Tensor) -> Tensor:
    """() float64 Euclidean norm; infinite or NaN if anything in x is."""
    on_device = static_shapes(x.device)
    dtype = torch.float64 if on_device else torch.promote_types(x.dtype, torch.float32)
    whole = x.numel() // CHUNK * CHUNK
    rows = torch.linalg.vector_norm(x[:whole].view(-1, CHUNK), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(x[whole:], dtype=dtype)
    total: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]), dtype=torch.float64)
    if not on_device and not total.isfinite():  # squares of more than 1e19 are beyond float32
        total = torch.linalg.vector_norm(x.double())
    return total


def joint_norm(pieces: Sequence[Tensor]) -> Tensor:
    """() float64 Euclidean norm of several vectors, at least one, as if they were one."""
    if len(pieces) == 1:
        return norm(pieces[0])
    whole: Tensor = torch.linalg.vector_norm(torch.stack([norm(piece) for piece in pieces]))
    return whole
