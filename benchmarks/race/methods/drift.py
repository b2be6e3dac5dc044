"""Drift: each rank trains by itself, and the weights that have drifted most from the agreed ones are averaged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.race.flat import Flat
from benchmarks.race.methods.base import Place, Rate
from benchmarks.race.methods.optimizers import Optimized, Part
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Absorbed, Context, Update
from lightning_sparse.methods.memory.base import Feedback, FeedbackState
from lightning_sparse.ops import all_finite

FORGETS = 0.95
"""What is left, in each step, of the sums that the factor is measured by."""


@dataclass(frozen=True)
class DriftState(FeedbackState):
    """What a copy has drifted by, and the gradients that have pushed it."""

    gradients: Tensor
    """Of this rank, summed since a coordinate was averaged last."""
    remembered: ClassVar[tuple[str, ...]] = ("residual", "gradients")


@dataclass(frozen=True)
class DriftMemory(Feedback):
    """Takes the whole drift in each step, in place of adding to what waits: copies of weights keep it.

    Args:
        gain: select by drift times gradients, to first order what averaging gains; False: by the drift.
    """

    gain: bool = True
    state_class = DriftState

    def absorb_(self, state: DriftState, grad: Gradient, ctx: Context) -> Absorbed:  # type: ignore[override]
        drift = state.residual
        for span, run in grad:
            drift[span].copy_(run)
        score = (drift * state.gradients).abs_()[:-1] if self.gain else None
        return Absorbed(drift, all_finite(drift[:-1]), score)

    def settle_(  # type: ignore[override]
        self, state: DriftState, update: Update, rounding: Tensor | None = None
    ) -> None:
        super().settle_(state, update, rounding)
        state.gradients[slice(None) if update.indices is None else update.indices] = 0.0


class Drift(Optimized):
    """Each rank steps its own copy of the weights by its own gradients; p are the weights that all ranks agree on.

    After each step, the mean drift ``p - x`` at the coordinates that have drifted most moves p, and all copies go
    there, but for what the messages have rounded. Gradients of what the rule does not serve are averaged before the
    step, so that this has no copies.

    Means of n moves that agree little are shorter than those of the optimizer on the mean gradient. A factor makes up
    for that: measured, it is ``mean_i |d_i|^2 / |mean d|^2`` of the drifts d that were averaged, between 1 and n, from
    all steps before, and sqrt(n) in the first one. Weight decay of a rank is divided by the factor.

    Args:
        flat: of the model.
        at: this rank.
        optimizer: see :class:`~benchmarks.race.methods.optimizers.Optimized`.
        factor: `measured`, `root` for sqrt(n), or `one`.
        longer: what is multiplied by it: each `average`, or the rate of each rank's `steps`.
        score: `gain` or `drift`, see :class:`DriftMemory`.
        embeddings: see :class:`~benchmarks.race.methods.optimizers.Optimized`.
        decay: who decays weights: `ranks`, in their steps, or `agreed` for p and copies alike, with nothing to send.
        density: of the average.
        warm_up: steps in which the density falls from 1 to that.
        clipping: see :class:`~benchmarks.race.methods.optimizers.Optimized`.
    """

    kept: ClassVar[tuple[str, ...]] = ("groups", "agreed", "factor", "sums")
    waits = True

    def __init__(
        self,
        flat: Flat,
        at: Place,
        optimizer: str = "muon",
        factor: str = "measured",
        longer: str = "average",
        score: str = "gain",
        embeddings: str = "dense",
        decay: str = "ranks",
        density: float = 0.01,
        warm_up: int = 0,
        clipping: str = "rank",
    ) -> None:
        super().__init__(flat, at, optimizer, embeddings, density, warm_up, clipping)
        self.gain, self.measures = score == "gain", factor == "measured"
        self.by_steps, self.decays_agreed = longer == "steps", decay == "agreed"
        self.part = Part(self.served, flat, at, DriftMemory(self.gain), self.density)
        self.parts.append(self.part)
        self.agreed: Tensor = flat.matrices.data[self.served]
        """p, of what the rule serves."""
        self.factor = 1.0 if factor == "one" else math.sqrt(at.ranks)
        self.sums = (0.0, 0.0)
        """Squares of drifts that were averaged: the mean over ranks, and those of the mean."""

    def step(self, rate: Rate, step: int) -> Steps[None]:
        if self.gain:
            self.part.group.memory.gradients[:-1].add_(self.flat.matrices.grad[self.served])
        yield from self.average_others(rate, step)
        if self.decays_agreed:
            self._decay(rate)
        decays = 0.0 if self.decays_agreed else 1 / self.factor
        self.step_optimizers(rate, self.factor if self.by_steps else 1.0, decays)
        yield from self.meet(step)

    def meet(self, step: int) -> Steps[None]:
        """Average what has drifted most."""
        drift = self.agreed - self.flat.matrices.data[self.served]
        proposed = yield from self.matrices.watch(self.part.exchange(drift.clone(), step))
        if bool(proposed.skipped):
            return
        at, mean = proposed.update.indices, proposed.update.values
        if at is None:
            at = torch.arange(len(drift), device=drift.device)
        at, mean = at[at < len(drift)], mean[at < len(drift)]  # without padding, which devices have
        self.agreed[at] -= mean if self.by_steps else self.factor * mean
        self.flat.matrices.data[self.served[at]] = self.agreed[at] - self.part.group.memory.residual[at]
        if self.measures:
            yield from self._measure(drift[at], mean)

    def _decay(self, rate: Rate) -> None:
        """Decay p, and move this copy as far."""
        away = self.agreed * (rate * next(g["decay"] for g in self.optimizers[0].param_groups if g["served"]))
        self.flat.matrices.data[self.served] -= away
        self.agreed -= away

    def _measure(self, own: Tensor, mean: Tensor) -> Steps[None]:
        """Let the factor of the next step know how far ranks agreed, by a message of one number."""
        squares = yield from self.mean(own.double().square().sum().view(1), self.matrices)
        sums = float(squares), float(mean.double().square().sum())
        self.sums = FORGETS * self.sums[0] + sums[0], FORGETS * self.sums[1] + sums[1]
        if self.sums[1] > 0:
            self.factor = min(max(1.0, self.sums[0] / self.sums[1]), float(self.at.ranks))

    def shared(self) -> list[Tensor]:
        matrices = self.flat.matrices.data.clone()
        matrices[self.served] = self.agreed
        return [matrices, self.flat.vectors.data]
