"""Search for a threshold by trials and counts, for DGC, RedSync and GaussianK."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates
from lightning_sparse.core.step import Selection
from lightning_sparse.ops import above, largest, largest_of, many_of_largest, reached, reaching_of, static_shapes, take

CAPACITY = 4
"""Device slots, in multiples of k, if a rule selects all coordinates above a threshold."""

Number = Tensor | float
"""() float64 on a device; a Python number on the CPU, which takes a tenth of the time."""


class Bracket(NamedTuple):
    """Bounds of the threshold that is searched for. It is found if both bounds are equal."""

    low: Number
    """Largest trial that enough coordinates reach; 0 before the first one."""
    high: Number
    """Smallest trial that not too many coordinates reach; infinite before the first one."""


def number(x: Tensor) -> Number:
    """Convert a () tensor to a :data:`Number`."""
    return x if static_shapes(x.device) else float(x)


def either(flag: Tensor | bool, yes: Number, no: Number) -> Number:
    """Return ``yes if flag else no``."""
    return torch.where(flag, yes, no) if isinstance(flag, Tensor) else yes if flag else no


def root(x: Number) -> Number:
    """Return the square root."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def lesser(x: Number, y: Number) -> Number:
    """Return the smaller number."""
    return torch.minimum(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else min(x, y)


class Survivors:
    """The coordinates that reach a threshold.

    On the CPU, trials count among some of the largest magnitudes, more than ``most``: a threshold that all of them
    reach is reached by too many. They are collected by the pass that forms the accumulator, or else by one pass over
    it. On a device, the largest magnitudes are found once, and all trials use these.

    Args:
        acc: (numel,) finite accumulator.
        most: counts above this are not distinguished.
        candidates: of the group.
    """

    def __init__(self, acc: Tensor, most: int, candidates: Candidates | None = None) -> None:
        self.acc, self.most = acc, most
        self.static = static_shapes(acc.device)
        if self.static:
            self._indices, self._magnitudes = largest(acc, most + 1)
            return
        self._indices, self._magnitudes = many_of_largest(acc, most + 1, candidates=candidates)
        # Counts of thresholds above this are known.
        self._bound = float(self._magnitudes.min()) if self._magnitudes.numel() < acc.numel() else 0.0

    def count(self, threshold: Number) -> Any:
        """Return the number of coordinates that reach a threshold, compared in the accumulator's precision.

        More than ``most`` may count as any larger number.
        """
        if isinstance(threshold, Tensor):
            return (self._magnitudes >= threshold).sum()
        return self.acc.numel() if threshold <= self._bound else reached(self._magnitudes, threshold)

    def beyond(self, threshold: Number, k: int, phase: int) -> Selection:
        """Select all coordinates strictly above a threshold, on a device at most ``CAPACITY * k``, thinned evenly."""
        if isinstance(threshold, Tensor):
            indices, picks = above(self.acc, _next_above(threshold, self.acc.dtype), capacity=CAPACITY * k, phase=phase)
            return Selection(indices, picks, threshold, aligned=True)
        return self._reaching(float(next_above(threshold, self.acc.dtype)), threshold)

    def trim(self, bracket: Bracket, k: int, most: int) -> Selection:
        """Select the coordinates that reach the lower bound; the k largest if these are more than ``most``.

        Args:
            bracket: result of the search.
            k: number to select if the bracket is still open, at most ``most``.
            most: largest number to select, at most :attr:`most`.
        """
        if isinstance(bracket.low, Tensor):
            return self._trim_static(bracket, k, min(most, self.acc.numel()))
        if (bracket.low == 0 < bracket.high) or self.count(bracket.low) > most:
            return picked(self.acc, largest_of(self._indices, self._magnitudes, k))
        return self._reaching(bracket.low, bracket.low)

    def _reaching(self, bound: float, threshold: float) -> Selection:
        if bound < self._bound:
            indices, count = above(self.acc, _scalar(bound))
        else:
            indices = reaching_of(self._indices, self._magnitudes, bound)
            count = torch.tensor(indices.numel(), device="cpu")
        return Selection(indices, count, _scalar(threshold))

    def _trim_static(self, bracket: Bracket, k: int, most: int) -> Selection:
        found = self.count(bracket.low)
        excess = found > most
        picks = torch.where(excess, k, found)
        indices = self._indices[:most].masked_fill(torch.arange(most, device=picks.device) >= picks, self.acc.numel())
        threshold = torch.where(excess, self._magnitudes[k - 1].double(), bracket.low)
        return Selection(indices.sort().values, picks, threshold, aligned=True)


def narrow(survivors: Survivors, propose: Callable[[Bracket], Number], fewest: int, most: int, rounds: int) -> Bracket:
    """Search for a threshold that ``fewest`` to ``most`` coordinates reach.

    Args:
        survivors: counts coordinates.
        propose: returns the next trial, within the bracket. The same trial again ends the search.
        fewest: least number of coordinates.
        most: largest number of coordinates, at least ``fewest``.
        rounds: largest number of trials; on a device, all of them are made.
    """
    low = torch.zeros((), dtype=torch.float64, device=survivors.acc.device)
    bracket = Bracket(low, torch.full_like(low, math.inf)) if survivors.static else Bracket(0.0, math.inf)
    tried: Number | None = None
    for _ in range(rounds):
        threshold = either(bracket.low == bracket.high, bracket.low, propose(bracket))
        if not survivors.static and tried is not None and threshold == tried:
            break
        reached = survivors.count(threshold)
        bracket = Bracket(
            either(reached >= fewest, threshold, bracket.low),
            either(reached <= most, threshold, bracket.high),
        )
        tried = threshold
    return bracket


def next_above(threshold: Number, dtype: torch.dtype) -> Number:
    """Return the smallest number of ``dtype`` above a threshold: ``x > threshold`` is ``x >= next_above``."""
    if not isinstance(threshold, Tensor):
        threshold = torch.tensor(threshold, dtype=torch.float64, device="cpu")
    return number(_next_above(threshold, dtype))


def _next_above(threshold: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = threshold.to(dtype)
    return torch.nextafter(rounded, torch.full_like(rounded, math.inf)).double()


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def picked(acc: Tensor, indices: Tensor) -> Selection:
    """Return a selection of these coordinates; its threshold is their smallest magnitude."""
    picks = torch.full((), indices.numel(), device=acc.device)
    return Selection(indices, picks, take(acc, indices).abs().min().double())
