"""Ok-Topk: about k coordinates by a threshold of each rank, which is estimated at intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_integer, expect, is_number
from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.methods.sparsifiers.estimation import kth_magnitude, reaching
from lightning_sparse.ops import known

CAPACITY = 2
"""Device slots in multiples of k. On the CPU, selections have no limit."""
SAMPLE = 1 << 16
"""Size of a sample of magnitudes, used if a device has no threshold in a step without an estimate."""


class OkTopKState(NamedTuple):
    """Threshold of one rank."""

    threshold: Tensor
    """() float64: for the next step."""
    target: Tensor
    """() int64: the k of the threshold; 0 if there is no usable one."""


@SPARSIFIERS.register
@dataclass(frozen=True)
class OkTopK(Sparsifier):
    """Each rank selects about k coordinates by its own threshold; k of the sums go to all ranks.

    Every ``interval`` steps the threshold is the k-th largest magnitude,
    exactly. In between it is adapted: after a step with fewer than ``2 k / 3`` selected it is divided by ``gain``,
    after one with more than ``5 k / 4`` multiplied by it. A selection thus costs one pass, and an exact top-k only at
    intervals. The exchange ``"balanced"`` leaves k coordinates for all ranks together, for any n.

    An accumulator with fewer than k nonzero values has no threshold: all of these are selected, but for
    subnormal ones. On CUDA at most 2 k are selected, more are thinned evenly.

    Formula:
        ``S_i = {j : |acc_i[j]| >= threshold_i}``; ``update = (1/n) topk(sum_i scatter(S_i, acc_i[S_i]))``

    Differs from the paper:
        Ours: a step with fewer than k/2 selected, or with 2 k and more, is followed by an estimate, too, since
        residuals at first and gradients later may grow faster than 1.2 % a step. (The released code is dense for the
        first 128 or 512 steps instead.) So is a change of the density. On a device, where the host does not know that
        it is needed, such an estimate is made from a sample of 65 536 magnitudes. Steps that send all coordinates, at a
        density of 1 or in a flush, leave the threshold as it was: the step after them may select few, and an estimate
        follows.

    Args:
        interval: steps from one estimate to the next, at least 1. Released: 32, and 128 for BERT.
        gain: factor of the threshold, above 1. Released: 1.012, and 1.025 for BERT.

    Raises:
        ValueError: if the interval is no positive integer or the gain is not above 1.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(20, 4, 10_000, generator=torch.Generator().manual_seed(0))
        >>> steps = list(ls.simulate(stream, sparsifier=ls.sparsifiers.OkTopK(), density=0.01))
        >>> [(step.density, step.counts.tolist()) for step in (steps[0], steps[19])]
        [(0.01, [100, 100, 100, 100]), (0.01, [168, 102, 164, 168])]

    References:
        Li, Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk), PPoPP 2022,
        arXiv 2201.07598, algorithms 1 and 2; band and gain are those of its released code.
    """

    interval: int = 32
    gain: float = 1.012

    name: ClassVar[str] = "ok_top_k"
    agreement: ClassVar[Agreement] = Agreement.INDEPENDENT
    exchange: ClassVar[str] = "balanced"
    is_its_exchange: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer(self.interval, "interval")
        moves = is_number(self.gain) and 1 < self.gain < math.inf
        expect(moves, "gain, the factor that moves the threshold,", "above 1 and finite", self.gain)

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> OkTopKState:
        """Return a state without a threshold."""
        return OkTopKState(
            torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), dtype=torch.int64, device=device)
        )

    def select(self, acc: Tensor, state: OkTopKState, ctx: Context) -> tuple[Selection, OkTopKState]:
        """Select all coordinates that reach the threshold."""
        numel, k = acc.numel(), count(ctx.density, acc.numel())
        threshold = self._threshold(acc, state, k, ctx)
        # Zeros reach a threshold of zero, but need not be sent.
        applied = threshold.clamp(min=torch.finfo(acc.dtype).tiny)
        room = min(numel, CAPACITY * k)
        selection = reaching(acc, applied, room, ctx.step, candidates=ctx.candidates)
        picks = selection.count
        few, many = 3 * picks < 2 * k, 4 * picks > 5 * k
        moved = torch.where(few, threshold / self.gain, torch.where(many, threshold * self.gain, threshold))
        good = (threshold > 0) & (2 * picks >= k) & (picks < 2 * k)
        known = torch.where(good, torch.full_like(state.target, k), 0)
        return selection, OkTopKState(moved, known)

    def _threshold(self, acc: Tensor, state: OkTopKState, k: int, ctx: Context) -> Tensor:
        fits = known(state.target == k)
        if ctx.step % self.interval == 0 or fits is False:
            return kth_magnitude(acc, k, ctx.candidates)
        if fits is True:
            return state.threshold
        sample = acc[:: -(-acc.numel() // SAMPLE)]
        return torch.where(fits, state.threshold, kth_magnitude(sample, max(1, k * sample.numel() // acc.numel())))
