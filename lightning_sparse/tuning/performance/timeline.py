"""Times of selections and exchanges in a step: the recurrence of the cost model.

One processor computes backward layer by layer, and selects in a group after the group's last gradient, so that a
selection delays all layers after it. One network carries one exchange after the other, while the processor continues::

    ready = done = 0
    for group in groups:
        ready = ready + backward_seconds(group) + select_seconds(group)
        done  = max(ready, done) + exchange_seconds(group)

This is the model of OMGS-SGD. If messages travel together, the exchange of a group is only its own work, and one
exchange for all comes at the end: it pays once for each collective, and for the bytes of all groups. Time counts from
the start of backward: the time before it is the same for all groups.

References:
    Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs
    (OMGS-SGD), INFOCOM 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_sparse.tuning.performance.cost import CostModel, Line

Timeline = tuple[Sequence[int], Sequence[float]]
"""Coordinates of each group, and the seconds of backward from one group to the next, in the order of backward."""


class Progress(NamedTuple):
    """Progress of a step, in seconds from the start of backward."""

    ready: float = 0.0
    """End of the latest group's selection."""
    done: float = 0.0
    """End of its exchange."""

    def after(self, numel: int, backward_seconds: float, cost: CostModel) -> Progress:
        """Return the progress after one more group."""
        ready = self.ready + backward_seconds + cost.select_seconds(numel)
        return Progress(ready, max(ready, self.done) + cost.exchange_seconds(numel))


def end_seconds(timeline: Timeline, costs: Iterable[CostModel], joined: Sequence[Line] = ()) -> float:
    """Return the end of the last exchange, in seconds.

    Args:
        timeline: numbers of each group.
        costs: of each group; with joined messages, of its own work.
        joined: messages of each group, by its coordinates, that are sent together when all groups are ready; empty if
            each group sends its own.
    """
    progress = Progress()
    for numel, backward_seconds, cost in zip(*timeline, costs, strict=True):
        progress = progress.after(numel, backward_seconds, cost)
    once = max((line.alpha for line in joined), default=0.0)
    return progress.done + once + sum(line.beta * numel for line, numel in zip(joined, timeline[0], strict=False))
