"""Copies of the weights that drift apart, in place of gradients that wait: for any optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_flag, expect
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Absorbed, Context, Update
from lightning_sparse.methods.memory.base import MEMORIES, Memory, NoMemory, take_out_
from lightning_sparse.ops import part_, put_, put_in_runs_, static_shapes, subtract_at_, take, zeros

FORGETS = 0.95
"""What is left, in each step, of the sums that the factor is measured by."""
SQUARES = "own", "mean", "owns", "means"
"""Of drifts that were averaged: of this rank's and of their mean, in the latest step, and weighted sums over the steps
before, of the mean over ranks and of the mean."""


LOOKED_AT = 3
"""First steps in which ranks look whether they move alike."""


class Working:
    """What a step works with; nothing of it is remembered."""

    def __init__(self) -> None:
        self.away: Tensor | None = None
        """(numel + 1,) drift of this rank, within a step."""
        self.copy: Gradient | None = None
        """The rank's weights, where they lie."""
        self.factor = 1.0
        """What averages are longer by."""
        self.compared = False
        """True when ranks have compared what they have begun with."""
        self.steps = 0
        self.totals: Tensor | None = None
        """(2,) float64 sums of the drift and of gradients, in the first steps."""


@dataclass(frozen=True)
class DriftState:
    """Vectors of numel + 1 slots, the last one zero, changed in place."""

    agreed: Tensor
    """Weights that all ranks agree on, equal bit for bit."""
    pushed: Tensor | None
    """This rank's gradients, summed since the coordinate was sent last; None where nobody selects by them."""
    squares: Tensor
    """(4,) float64, see :data:`SQUARES`."""
    work: Working = field(default_factory=Working, compare=False)


@MEMORIES.register
@dataclass(frozen=True)
class Drift(Memory):
    """Each rank trains a copy of the weights; what has drifted furthest from the agreed weights is averaged.

    For optimizers that are not linear in gradients, such as Lion and Muon. Each rank runs the user's optimizer on its
    own gradients and its own copy ``x_i`` of the weights. With p the weights that all ranks agree on, after each step

        ``acc_i = p - x_i``;  K: what a sparsifier selects by ``|acc_i s_i|``;  ``p[K] -= f mean_i acc_i[K]``

    and each copy follows p in K, but for what this rank has not sent. ``s_i`` is the sum of the rank's gradients since
    the coordinate was sent; ``acc_i s_i`` is, to first order, what the average gains in the loss. Nothing is lost:
    ``p - x_i`` keeps what is not sent, and the rounding of messages.

    The mean of n moves that agree little is shorter than the optimizer's own on the mean gradient. Either steps are
    longer for it: the learning rate is multiplied by ``sqrt(n)``, and decoupled weight decay divided by it. Or averages
    are: f is ``sum_K mean_i acc_i^2 / sum_K (mean_i acc_i)^2`` of the steps before, between 1 and n.

    The model is p: ``state_dict()``, checkpoints, validation and :meth:`.Engine.agreed` have it. ``.grad`` is the
    rank's own. Dense groups average gradients as DDP does, and so do groups whose density is always 1; a schedule that
    begins at 1 averages weights after each step. See ``docs/guide/optimizers.md`` for what it costs.

    This memory costs one vector of ``numel`` accumulator elements a rank, two with ``gain``.

    Args:
        gain: select by the gain; False: by the drift alone.
        longer: "steps" multiplies the learning rate by ``sqrt(n)`` (but not that of SGD, whose steps are linear in
            gradients), "averages" measures f.

    Raises:
        ValueError: for other values.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.SparseDDPStrategy(memory=ls.memories.Drift(gain=False))
        >>> strategy.config.memory
        Drift(gain=False, longer='steps')

    References:
        Ours. With SGD it is Xu, Huo, Huang, Step-Ahead Error Feedback for Distributed Training with Compressed
        Gradient, AAAI 2021, arXiv 2008.05823.
    """

    gain: bool = True
    longer: Literal["steps", "averages"] = "steps"
    averages = "moves"
    remembers_at_once = False

    def __post_init__(self) -> None:
        check_flag(self.gain, "gain")
        expect(self.longer in ("steps", "averages"), "longer", "'steps' or 'averages'", self.longer)

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> DriftState:
        """Return zeros; :meth:`begin_` gives them the weights."""
        agreed = zeros(numel + 1, device, dtype)
        pushed = zeros(numel + 1, device, dtype) if self.gain else None
        return DriftState(agreed, pushed, torch.zeros(len(SQUARES), device=device, dtype=torch.float64))

    def begin_(self, state: DriftState, copy: Gradient) -> None:
        """Let ranks agree on their weights, which are equal."""
        state.work.copy = copy
        for span, run in copy:
            state.agreed[span].copy_(run)

    def copy(self, state: DriftState) -> Gradient:
        """Return this rank's weights, where they lie."""
        assert state.work.copy is not None
        return state.work.copy

    def push_(self, state: DriftState, span: slice, grad: Tensor, scale: Tensor | None) -> None:
        """Add this rank's gradient of some coordinates, before its optimizer steps.

        Args:
            state: of this group.
            span: the coordinates.
            grad: flat, of the rank.
            scale: () of the loss, which gradients still have; None: none.
        """
        if state.pushed is not None:
            state.pushed[span].add_(grad if scale is None else grad / scale)

    def factor(self, state: DriftState, ranks: int) -> float:
        """Return f, or what steps are longer by, between 1 and the number of ranks; may wait for the device."""
        if self.longer == "steps":
            return math.sqrt(ranks)
        owns, means = state.squares[2:].tolist()
        return min(max(1.0, owns / means), float(ranks)) if means > 0 else math.sqrt(ranks)

    def measure_(self, state: DriftState, own: float, mean: float) -> None:
        """Let the factor follow the latest step, given squares of all groups of an optimizer.

        Args:
            state: of one of these groups.
            own: of drifts that were averaged, the mean over ranks.
            mean: of their mean.
        """
        owns, means = state.squares[2:].tolist()
        new = [0.0, 0.0, FORGETS * owns + own, FORGETS * means + mean]
        state.squares.copy_(torch.tensor(new, dtype=torch.float64, device="cpu"))

    def absorb_(self, state: DriftState, grad: Gradient, ctx: Context) -> Absorbed:
        """Set ``acc = p - x``, given the weights of this rank in the place of a gradient."""
        work, pushed = state.work, state.pushed
        work.copy, work.away = grad, _room(state.agreed)
        work.factor = 1.0 if self.longer == "steps" else self.factor(state, ctx.world_size)
        work.steps, away = work.steps + 1, work.away[:-1]
        score = None if pushed is None else _room(away)
        sums = None if pushed is None else pushed[:-1]
        work.away[-1:].zero_()
        finite = part_(away, score, state.agreed[:-1], sums, grad.runs, ctx.candidates)
        if pushed is not None:
            work.totals = torch.stack([away.sum(), pushed.sum()]).double() if work.steps <= LOOKED_AT else None
        return Absorbed(work.away, finite, score)

    def settle_(self, state: DriftState, update: Update, rounding: Tensor | None = None) -> None:
        """Move p where averages arrived, and the copy with it, but for what this rank has not sent."""
        work, agreed, indices = state.work, state.agreed, update.indices
        away, work.away = work.away, None
        assert away is not None
        if indices is None:
            indices = torch.arange(agreed.numel() - 1, device=agreed.device)
        before = take(agreed, indices)
        if self.longer == "averages":
            once = _first_ones(indices, agreed.numel() - 1)
            state.squares[:2] = torch.stack([_square(take(away, indices), once), _square(update.values, once)])
        take_out_(away, update)
        after = torch.sub(before, update.values, alpha=work.factor)
        put_(agreed, indices, after)
        agreed[-1:].zero_()
        _put(self.copy(state), indices, after.sub_(take(away, indices)))
        if state.pushed is None:
            return
        if update.sent is not None:
            subtract_at_(state.pushed, update.sent, None)
        else:
            state.pushed.zero_()

    def skip_(self, state: DriftState) -> None:
        """Leave copies where they have moved to, and p as it was; what is not finite goes back to p."""
        state.work.away = None
        if bool(self.away(state).isfinite().all()):
            return
        for span, run in self.copy(state):
            run.copy_(torch.where(run.isfinite(), run, state.agreed[span].to(run.dtype)))
        if state.pushed is not None:
            state.pushed.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def meet_(self, state: DriftState, mean: Tensor, factor: float) -> None:
        """Let all ranks agree, between two steps.

        Args:
            state: of this group.
            mean: (numel,) float64 mean over ranks of their weights.
            factor: f.
        """
        agreed = state.agreed[:-1]
        agreed.copy_(mean if factor == 1.0 else agreed - factor * (agreed - mean))
        for span, run in self.copy(state):
            run.copy_(state.agreed[span])
        if state.pushed is not None:
            state.pushed.zero_()

    def vectors(self, state: DriftState) -> dict[str, Tensor]:
        """Return the weights that ranks agree on, and the gradients since coordinates were sent."""
        pushed = {} if state.pushed is None else {"pushed": state.pushed}
        return {"agreed": state.agreed, **pushed}

    def counters(self, state: DriftState) -> dict[str, Tensor]:
        """Return the sums that the factor is measured by."""
        return dict(zip(SQUARES, state.squares, strict=True)) if self.longer == "averages" else {}

    def residual(self, state: DriftState) -> Tensor | None:
        """Return the (numel,) drift, as it is now; not what is remembered."""
        return None if state.work.copy is None else self.away(state)

    def away(self, state: DriftState) -> Tensor:
        """Return (numel,) ``p - x``."""
        away = torch.empty_like(state.agreed[:-1])
        for span, run in self.copy(state):
            torch.sub(state.agreed[span], run, out=away[span])
        return away

    def for_dense(self) -> Memory:
        """Return none: gradients are averaged, so that steps are equal on all ranks."""
        return NoMemory()

    def for_whole(self) -> Memory:
        """Return none, likewise."""
        return NoMemory()


def _room(like: Tensor) -> Tensor:
    """Return a vector to be written to; on the CPU in large pages, which takes less time."""
    return torch.empty_like(like) if static_shapes(like.device) else zeros(like.numel(), like.device, like.dtype)


def _square(x: Tensor, once: Tensor) -> Tensor:
    return x.masked_fill(~once, 0.0).double().square().sum()


def _first_ones(indices: Tensor, padding: int) -> Tensor:
    """Return where each coordinate stands first."""
    ascending, order = indices.sort(stable=True)
    first = torch.ones_like(indices, dtype=torch.bool)
    first[order[1:]] = ascending[1:] != ascending[:-1]
    return first & (indices != padding)


def _put(copy: Gradient, indices: Tensor, values: Tensor) -> None:
    """Write weights at some coordinates."""
    values = values.to(copy.dtype)
    if not static_shapes(copy.device):
        put_in_runs_(copy.runs, indices, values)
        return
    [flat] = copy.runs  # one more slot for the padding index
    longer = torch.cat([flat, flat.new_zeros(1)])
    flat.copy_(longer.index_copy_(0, indices, values)[:-1])
