"""Local gradient clipping of DGC."""

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
"""Elements of a partial norm: float32 sums of millions of squares are wrong in the fourth digit."""


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
        """Scale the gradient in place. If its norm is not finite, all of it becomes NaN, and nothing is absorbed."""
        whole = norm(grad.flat())
        scale = (self.max_norm / math.sqrt(ctx.world_size) / whole).clamp(max=1).where(whole.isfinite(), float("nan"))
        for run in grad.runs if static_shapes(grad.device) or scale != 1 else ():
            run.mul_(scale)


def norm(x: Tensor) -> Tensor:
    """Return the () float64 Euclidean norm; infinite or NaN if an element of x is."""
    if static_shapes(x.device):
        return torch.linalg.vector_norm(x, dtype=torch.float64)  # type: ignore[no-any-return]
    dtype = torch.promote_types(x.dtype, torch.float32)
    whole = x.numel() // CHUNK * CHUNK
    rows = torch.linalg.vector_norm(x[:whole].view(-1, CHUNK), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(x[whole:], dtype=dtype)
    total: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]), dtype=torch.float64)
    if not total.isfinite():  # squares of more than 1e19 are beyond float32
        total = torch.linalg.vector_norm(x.double())
    return total


def joint_norm(pieces: Sequence[Tensor]) -> Tensor:
    """Return the () float64 Euclidean norm of the concatenation of vectors, at least one."""
    if len(pieces) == 1:
        return norm(pieces[0])
    short = [] if static_shapes(pieces[0].device) else [piece for piece in pieces if piece.numel() <= CHUNK]
    norms = [norm(piece) for piece in pieces if not short or piece.numel() > CHUNK]
    if short:  # at once: a norm of its own takes five calls
        dtype = torch.promote_types(short[0].dtype, torch.float32)
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(short, dtype=dtype)), dtype=torch.float64)
        norms += [total] if total.isfinite() else [norm(piece) for piece in short]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole
