"""The judge: training with n simulated ranks, every method allowed the same number of bytes.

What a method captures of a gradient in one step does not tell how it trains. Here the next gradient is computed at the
parameters that the last update made, and methods are compared by the loss that they reach with equal traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from lightning_sparse.bench.methods import Method
from lightning_sparse.bench.tasks import Task
from lightning_sparse.simulation import simulate

WINDOW = 20
"""Training losses are means over this many steps."""


class Point(NamedTuple):
    """A run after some steps."""

    step: int
    megabytes: float
    """Sent by each rank so far, mean over ranks."""
    loss: float
    """Mean training loss of the latest steps."""
    quality: float
    """Accuracy in percent or perplexity on the validation data."""


class Run(NamedTuple):
    """One training."""

    method: str
    density: float
    """That the method was given."""
    points: list[Point]
    actual_density: float
    """Mean share of coordinates in the updates."""

    @property
    def last(self) -> Point:
        """Where it ended."""
        return self.points[-1]


def train(task: Task, method: Method, density: float, *, steps: int, every: int = 50) -> Run:
    """Train a task behind a sparsified exchange of simulated ranks.

    Args:
        task: fresh; trained in place.
        method: what exchanges the gradients.
        density: target for the method.
        steps: length of the training.
        every: steps between the points that are kept; the last step always is.

    Raises:
        FloatingPointError: if the loss is not finite any more.
    """
    points: list[Point] = []
    losses: list[float] = []
    sent = updated = 0.0

    def gradients() -> Iterator[Tensor]:
        for _ in range(steps):
            yield task.gradients()

    traces = simulate(
        gradients(),
        sparsifier=method.sparsifier,
        density=density,
        memory=method.memory,
        exchange=method.exchange,
    )
    for trace in traces:
        task.apply(trace.update)
        losses.append(task.loss)
        if not math.isfinite(task.loss):
            raise FloatingPointError(f"{method.name} diverged at step {trace.step}.")
        sent += float(trace.bytes_sent.mean()) / 1e6
        updated += trace.density
        if (trace.step + 1) % every == 0 or trace.step + 1 == steps:
            recent = losses[-WINDOW:]
            points.append(Point(trace.step + 1, sent, sum(recent) / len(recent), task.evaluate()))
    return Run(method.name, density, points, updated / steps)
