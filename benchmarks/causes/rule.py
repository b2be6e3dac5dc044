"""The rule for AdamW on all ranks in one process, in formulas of torch, with switches for its parts.

Matrices are sparse, vectors dense. Messages are exact, and lengths of gradients are not followed; the library itself is
the variant `library`, which shows what both of that makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.methods.memory.second_moment import longest

EPS = 1e-8
Clipping = Literal["own", "mean", "none"]


@dataclass(frozen=True)
class Variant:
    """What is switched.

    Attributes:
        clipping: by each rank's `own` norm, as a script does that clips before the step; by that of the `mean`, as the
            engine does; or `none`.
        second: `own`: the mean of the ranks' second moments, which are those of one rank's noise; `mean`: the second
            moment of the mean gradient, as dense training has it.
        selection: `union` of what each rank selects; `best`: the k largest scores of the mean, which no message tells;
            `named`: each rank names more coordinates than its share, with values, and the k largest sums are averaged.
        names: how many more.
        density: at the end.
        begin: density at the start.
        warm_up: share of the steps in which the density falls from that, geometrically.
        root: exponent of n in the rate.
        limit: whether quotients are limited as the library does it.
        power: exponent of the second moment in scores: 0.25 selects by gain, 0.5 by the length of the step.
        late: exponent of the time since a coordinate was sent that its average is divided by: 0, as built, applies
            sums; 0.5 applies them as if their gradients were noise.
    """

    clipping: Clipping = "mean"
    second: Literal["own", "mean"] = "own"
    selection: Literal["union", "best", "named"] = "union"
    names: float = 4.0
    density: float = 0.01
    begin: float = 0.0
    warm_up: float = 0.0
    root: float = 0.5
    limit: bool = True
    power: float = 0.25
    late: float = 0.0

    def density_at(self, step: int, steps: int) -> float:
        """Fall geometrically, then stay."""
        until = self.warm_up * steps
        if step >= until:
            return self.density
        return float(self.begin * (self.density / self.begin) ** (step / until))


class Rule:
    """States of all ranks.

    Args:
        variant: of the rule.
        ranks: n.
        numel: coordinates of the matrices.
        beta2: of AdamW.
        steps: of the training.
    """

    def __init__(self, variant: Variant, ranks: int, numel: int, beta2: float, steps: int) -> None:
        self.variant, self.beta2, self.steps = variant, beta2, steps
        self.residual = torch.zeros(ranks, numel)
        self.second = torch.zeros(ranks if variant.second == "own" else 1, numel)
        self.sent_at = torch.zeros(numel)
        self.more = 1.0
        """Of each rank's selection, as a multiple of its share."""
        self.sent = 0
        """Coordinates of unions so far."""

    def move(self, gradients: Tensor, step: int) -> Tensor:
        """Return (numel,) what the rate is multiplied by, given (n, numel) gradients."""
        variant, ranks = self.variant, len(gradients)
        density = variant.density_at(step, self.steps)
        given = gradients if variant.second == "own" else gradients.mean(0, keepdim=True)
        self.second.mul_(self.beta2).addcmul_(given, given, value=1 - self.beta2)
        second = self.second / (1 - self.beta2 ** (step + 1))
        acc = self.residual.add_(gradients)
        length = longest(density) if density < 1 and variant.limit else math.inf
        places = self._places(acc, second, density, length)
        mean, own = acc[:, places].mean(0), second[:, places].mean(0)
        acc[:, places] = 0
        self.sent += len(places)
        root = ((own + (mean / length).square()).sqrt() + EPS) if density < 1 else own.sqrt() + EPS
        age = (step + 1 - self.sent_at[places]) ** variant.late
        self.sent_at[places] = step + 1
        factor = ranks**variant.root if variant.second == "own" else 1.0
        moved = torch.zeros_like(acc[0])
        moved[places] = factor * mean / root / age
        return moved

    def _score(self, acc: Tensor, second: Tensor, length: float) -> Tensor:
        return acc.abs() / ((second + (acc / length).square()).sqrt() + EPS) ** (2 * self.variant.power)

    def _places(self, acc: Tensor, second: Tensor, density: float, length: float) -> Tensor:
        numel, ranks = acc.shape[1], len(acc)
        if density >= 1:
            return torch.arange(numel)
        k = max(1, int(density * numel))
        if self.variant.selection == "best":
            mean = acc.mean(0)
            return self._score(mean, second.mean(0), length).topk(k).indices.sort().values
        score = self._score(acc, second, length)
        if self.variant.selection == "named":
            named, picks = torch.zeros(numel), min(numel, round(self.variant.names * k / ranks))
            for row, values in zip(score, acc, strict=True):
                said = row >= float(np.partition(row.numpy(), numel - picks)[numel - picks])
                named[said] += values[said]
            return self._score(named / ranks, second.mean(0), length).topk(k).indices.sort().values
        chosen = torch.zeros(numel, dtype=torch.bool)
        for row in score:
            picks = min(numel, max(1, round(self.more * k / ranks)))
            chosen |= row >= float(np.partition(row.numpy(), numel - picks)[numel - picks])
        union = int(chosen.sum())  # ranks select some of the same: more of each in the next step, until the union has k
        self.more = min(float(ranks), max(1.0, self.more * (k / union) ** 0.5))
        return chosen.nonzero().flatten()
