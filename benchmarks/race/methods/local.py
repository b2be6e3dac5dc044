"""Local steps: ranks train alone for H steps, and their parameters are averaged."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.race.flat import Flat
from benchmarks.race.methods.base import Method, Place, Rate, step_with
from lightning_sparse.core.messages import Steps


class Local(Method):
    """AdamW alone for H steps; then an outer step of SGD on the mean of what the ranks have gone.

    With an outer rate of 1 and no momentum this is averaging of parameters; with Nesterov momentum it is DiLoCo:
    Douillard et al., arXiv 2311.08105, algorithm 1. Inner states stay on their ranks.

    Args:
        flat: of the model.
        at: this rank.
        every: H.
        outer: rate of the outer step.
        momentum: of Nesterov's kind; 0: none.
        inner: makes the optimizer of local steps; None: the task's AdamW.
    """

    kept: ClassVar[tuple[str, ...]] = ("begin",)
    local = True

    def __init__(
        self, flat: Flat, at: Place, every: int = 30, outer: float = 1.0, momentum: float = 0.0, inner: str = "adamw"
    ) -> None:
        super().__init__(flat, at)
        self.every = every
        if inner == "adamw":
            self.optimizer: torch.optim.Optimizer = self.adamw(*flat.both)
        else:
            self.optimizer = torch.optim.SGD(flat.both, lr=1.0)
            self.optimizers.append(self.optimizer)
        self.begin: list[Tensor] = [p.data.clone() for p in flat.both]
        """Where the round began, equal on all ranks."""
        self._outer = [nn.Parameter(begin) for begin in self.begin]
        nesterov = momentum > 0
        self.outer_step = torch.optim.SGD(self._outer, lr=outer, momentum=momentum, nesterov=nesterov)
        self.optimizers.append(self.outer_step)

    def step(self, rate: Rate, step: int) -> Steps[None]:
        step_with(self.optimizer, rate)
        if (step + 1) % self.every == 0 or step + 1 == self.at.steps:
            yield from self.meet()

    def meet(self) -> Steps[None]:
        """The end of a round."""
        for outer, parameter, meter in zip(self._outer, self.flat.both, (self.matrices, self.vectors), strict=True):
            outer.grad = yield from self.mean(outer.data - parameter.data, meter)
        self.outer_step.step()
        self.flat.load([outer.data for outer in self._outer])

    def shared(self) -> list[Tensor]:
        return [outer.data for outer in self._outer]

    def load(self, state: dict) -> None:
        super().load(state)
        for outer, begin in zip(self._outer, self.begin, strict=True):
            outer.data.copy_(begin)
        self.begin = [outer.data for outer in self._outer]
