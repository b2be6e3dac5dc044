"""Adam before the sparse exchange instead of after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_eps, check_share
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Absorbed, Context
from lightning_sparse.methods.memory.base import MEMORIES, CountedFeedback, CountedState, advance_, pieces
from lightning_sparse.ops import zeros


@dataclass(frozen=True)
class AdamState(CountedState):
    """State with Adam's moments."""

    first: Tensor | None
    """None if ``beta1`` is 0: the first moment is then the gradient."""
    second: Tensor
    remembered: ClassVar[tuple[str, ...]] = ("residual", "first", "second")


@MEMORIES.register
@dataclass(frozen=True)
class AdamCorrection(CountedFeedback):
    """Each rank accumulates and sends the Adam direction of its own gradients; the optimizer is plain SGD.

    With g the rank's gradient, ``m = beta1 m + (1 - beta1) g`` and ``v = beta2 v + (1 - beta2) g^2``, both divided by
    Adam's bias corrections, ``acc = residual + sqrt(n) m / (sqrt(v) + eps)``. The average
    of n independent gradients is ``sqrt(n)`` times smaller than each; the factor makes a step about as long as dense
    Adam's. For one rank at density 1 the result is AdamW. No direction is lost: the directions of all steps add up to
    the values sent plus the residual. Dense groups use this memory, too.

    If the learning rate is tuned again, **prefer** ``torch.optim.AdamW(betas=(0.0, 0.999))`` **after**
    :class:`Residual`: on a word LSTM (8 ranks, 300 steps, UnionTopK, each at its best rate) it reached a perplexity
    of 31.2 at density 0.01 and 47.5 at 0.001, this memory 33.1 and 74.9, dense AdamW 27.7. At the learning rate of
    dense training, this memory is better at 0.01 (31.3, against 36.0 and, with AdamW's usual betas, 43.8) and worse
    at 0.001 (``docs/reports/adam-rates.md``). Two likely reasons: all directions have about the same length, so that
    the largest residuals say less about importance; and a rank's own v is noisier than that of the average.

    The first moment is off by default: the residual already averages over steps, and ``beta1=0.9`` was worse at both
    densities (56.0 and 90.6).

    This memory costs two vectors of ``numel`` accumulator elements a rank, one more than :class:`Residual`, and another
    one with a first moment. SGD keeps no vector; AdamW keeps two.

    The optimizer must be ``torch.optim.SGD(lr, momentum=0, weight_decay)``, which is checked when training starts. Its
    weight decay is AdamW's: it is added to a direction, not to a gradient. Start from AdamW's learning rate in dense
    training, and try lower rates at lower densities.

    Squares of a skipped step are absorbed, but the step is not counted: the steps after it are shorter for a while.
    Steps are counted for each group, not for each parameter as in torch. A parameter that is first used at a late
    step T gets a first step that is longer by up to ``sqrt((1 - beta2^T) / (1 - beta2))``, like a new row of an
    embedding with AdamW.

    Args:
        beta1: of the first moment, in [0, 1); 0: none. Adam's is 0.9.
        beta2: of the second moment, in [0, 1).
        eps: added to the root of the second moment, at least 1.2e-38, in units of the gradient.

    Raises:
        ValueError: if a setting is out of its range.

    Example:
        >>> import lightning_sparse as ls
        >>> import torch
        >>> stream = torch.tensor([[[5.0, -0.01]], [[5.0, 0.0]]])                # two steps of one rank
        >>> memory = ls.memories.AdamCorrection()
        >>> for step in ls.simulate(stream, sparsifier="top_k", density=1.0, memory=memory):
        ...     print([round(x, 3) for x in step.update.tolist()])
        [1.0, -1.0]
        [1.0, 0.0]

    References:
        Ours. Kingma, Ba, Adam, ICLR 2015, arXiv 1412.6980, algorithm 1; Loshchilov, Hutter, Decoupled weight decay
        regularization, ICLR 2019, arXiv 1711.05101, algorithm 2.
    """

    beta1: float = 0.0
    beta2: float = 0.999
    eps: float = 1e-8
    averages = "directions"

    def __post_init__(self) -> None:
        check_share(self.beta1, "beta1", zero=True, one=False)
        check_share(self.beta2, "beta2", zero=True, one=False)
        check_eps(self.eps)

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> AdamState:
        """Return zero vectors of ``numel + 1`` slots: two, or three with a first moment."""
        residual, second = (zeros(numel + 1, device, dtype) for _ in range(2))
        first = zeros(numel + 1, device, dtype) if self.beta1 else None
        steps = torch.zeros((), device=device, dtype=torch.float64)
        return AdamState(residual, steps, first, second)

    def absorb_(self, state: AdamState, grad: Gradient, ctx: Context) -> Absorbed:
        """Update the moments and add the direction to the residual."""
        steps = state.steps + 1
        finite = []
        for piece, given in pieces(grad):
            vectors = [state.residual[piece], state.second[piece]]
            wide = given.to(vectors[0].dtype)
            second = torch.mul(vectors[1], self.beta2).addcmul_(wide, wide, value=1 - self.beta2)
            second.clamp_(max=torch.finfo(second.dtype).max)  # squares overflow where gradients do not
            first, moments = wide, [second]
            if state.first is not None:
                vectors.append(state.first[piece])
                first = torch.mul(vectors[2], self.beta1).add_(wide, alpha=1 - self.beta1)
                moments.append(first)
            first, second = first / (1 - torch.pow(self.beta1, steps)), second / (1 - torch.pow(self.beta2, steps))
            direction = math.sqrt(ctx.world_size) * first / (second.sqrt() + self.eps)
            finite.append(advance_(vectors, [vectors[0] + direction, *moments]))
        return Absorbed(state.residual, torch.stack(finite).all())
