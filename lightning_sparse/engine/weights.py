"""Whether ranks have the same weights: a few sums of them travel in the words of a backward now and then.

Gradients are a rank's own until an optimizer of torch steps. Whoever applies them by hand lets ranks drift apart, in
silence, and no step is there in which that could be noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_sparse.core.hashing import outputs
from lightning_sparse.engine.calls import SUMS

SAMPLED = 4096
"""Weights that are looked at, at most; as many of each parameter."""
EVERY, OFTEN = 20, 10
"""Of first backwards after a step, and of backwards without a step, those at whose end weights are compared."""
TOLERANCE = 1e-4
"""Difference of weights, relative to their length, up to which they are equal."""


class Weights:
    """Finds weights that differ between ranks that should have the same; equal calls are made on all of them.

    Weights may rightly differ between backward and step: SAM moves them once, and puts them back. So they have to be
    equal at the first backward after a step. Without a step, ranks drift apart where weights differ, move, and differ.

    Args:
        parameters: names of those of the model.
        weights: returns the flat weights of one, which should be equal on all ranks.
    """

    def __init__(self, parameters: Sequence[str], weights: Callable[[str], Tensor]) -> None:
        self._weights = weights
        self._parameters = parameters[:: max(1, math.ceil(len(parameters) / SAMPLED))]
        self._signs: Tensor | None = None
        self._backwards = self._firsts = 0
        """Backwards since the latest step, and backwards that were the first after one."""
        self._differed: Sequence[Sequence[float]] | None = None
        """Sums of all ranks where weights were compared last since the latest step, if they differed."""

    def is_due(self) -> bool:
        """Note a backward, and return whether weights are compared at its end."""
        self._backwards += 1
        if self._backwards > 1:
            return self._backwards % OFTEN == 0
        self._firsts += 1
        return self._firsts % EVERY == 0

    @property
    def is_first(self) -> bool:
        """True if the latest backward was the first one since a step."""
        return self._backwards == 1

    def stepped(self) -> None:
        """Note a step of an optimizer."""
        self._backwards, self._differed = 0, None

    def sums(self) -> Tensor:
        """Return (SUMS,) float64 sums of sampled weights with random signs, which are fixed; the host does not wait."""
        each = SAMPLED // len(self._parameters)
        runs = [self._weights(name) for name in self._parameters]
        sampled = torch.cat([run[:: max(1, run.numel() // each)][:each] for run in runs]).double()
        if self._signs is None:
            words = outputs(0, torch.arange(1, sampled.numel() + 1, device=sampled.device))
            self._signs = torch.stack([1 - 2 * (words >> bit & 1) for bit in range(SUMS)]).double()
        return (self._signs * sampled).sum(1)

    def drift_apart(self, rows: Sequence[Sequence[float]]) -> bool:
        """Return whether ranks drift apart, given the sums of all ranks at the end of a backward."""
        before, self._differed = self._differed, rows if differ(rows) else None
        return self._differed is not None and (self._backwards == 1 or before not in (None, rows))


def differ(rows: Sequence[Sequence[float]]) -> bool:
    """Return whether ranks have other weights, given the sums of each of them.

    Example:
        >>> differ([[1.0, 2.0], [1.0, 2.0001]]), differ([[1.0, 2.0], [1.0, 2.01]])
        (False, True)
    """
    finite = [all(map(math.isfinite, row)) for row in rows]
    if not all(finite):
        return any(finite)
    furthest = max(math.dist(row, rows[0]) for row in rows)
    return furthest > TOLERANCE * max(math.hypot(*row) for row in rows)
