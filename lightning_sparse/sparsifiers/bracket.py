"""Pieces of methods that try a threshold, count what reaches it, and try another one (DGC, RedSync, GaussianK)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.candidates import Candidates
from lightning_sparse.core import Selection
from lightning_sparse.kernels import above, largest, reaching, static_shapes, take, top_k, under

CAPACITY = 4
"""Device slots, in multiples of k, where a rule picks all that a threshold lets through."""
MARGIN = 0.9
"""The next step's trials are expected above this multiple of this step's lowest one."""


class Bracket(NamedTuple):
    """What is known of the threshold that is looked for. It is found where both bounds are equal."""

    low: Tensor
    """() float64: enough coordinates reach it; 0 before the first such trial."""
    high: Tensor
    """() float64: not too many coordinates reach it; infinite before the first such trial."""


class Survivors:
    """The coordinates that reach a threshold.

    On the CPU, what reached the lowest threshold so far is kept, and higher ones are counted among that alone: only a
    trial below all earlier ones passes over the whole group. On a device, the largest magnitudes are found once, and
    all trials look at these alone.

    Args:
        acc: (numel,) finite accumulator.
        most: counts above this are not told apart.
        candidates: of the group.
    """

    def __init__(self, acc: Tensor, most: int, candidates: Candidates | None = None) -> None:
        self.acc, self.candidates = acc, candidates
        self.static = static_shapes(acc.device)
        self._bound = math.inf
        if self.static:
            self._indices, self._magnitudes = largest(acc, most + 1)
            return
        self._indices = torch.empty(0, dtype=torch.int32, device=acc.device)
        self._magnitudes = acc[:0]
        if candidates is not None:
            self._bound, self._indices, self._magnitudes = candidates.all(acc)

    def count(self, threshold: Tensor) -> Tensor:
        """() int64 number of coordinates that reach () ``threshold``, compared in the accumulator's precision.

        More than ``most`` may count as any larger number.
        """
        if not self.static and threshold <= 0:
            return torch.tensor(self.acc.numel(), device="cpu")
        self._descend(threshold)
        return (self._magnitudes >= threshold).sum()

    def beyond(self, threshold: Tensor, k: int, phase: int) -> Selection:
        """Pick everything strictly above a threshold, on a device at most ``CAPACITY * k``, thinned evenly."""
        bound = next_above(threshold, self.acc.dtype)
        if self.static:
            indices, picks = above(self.acc, bound, capacity=CAPACITY * k, phase=phase)
            return Selection(indices, picks, threshold, aligned=True)
        return self._reaching(bound)._replace(threshold=threshold)

    def trim(self, bracket: Bracket, k: int, most: int) -> Selection:
        """Pick what reaches the lower bound; where these are more than ``most``, the k largest of them.

        Args:
            bracket: where the search ended.
            k: picks where the bracket is still open, at most ``most``.
            most: picks that are allowed, as they were told apart.
        """
        if self.static:
            return self._trim_static(bracket, k, min(most, self.acc.numel()))
        if bracket.low == 0 < bracket.high:
            return picked(self.acc, top_k(self.acc, k, self.candidates))
        selection = self._reaching(bracket.low)
        if selection.count > most:
            return picked(self.acc, selection.indices[top_k(take(self.acc, selection.indices), k)])
        return selection

    def _reaching(self, threshold: Tensor) -> Selection:
        self._descend(threshold)
        indices = under(self._magnitudes >= threshold, self._indices)[0].long()
        return Selection(indices, torch.tensor(indices.numel(), device="cpu"), threshold)

    def _descend(self, threshold: Tensor) -> None:
        if self.static:
            return
        if self.candidates is not None:
            self.candidates.expect(MARGIN * float(threshold))
        if threshold < self._bound:
            self._bound = float(threshold)
            self._indices, self._magnitudes = reaching(self.acc, self._bound)

    def _trim_static(self, bracket: Bracket, k: int, most: int) -> Selection:
        found = self.count(bracket.low)
        excess = found > most
        picks = torch.where(excess, k, found)
        indices = self._indices[:most].masked_fill(torch.arange(most, device=picks.device) >= picks, self.acc.numel())
        threshold = torch.where(excess, self._magnitudes[k - 1].double(), bracket.low)
        return Selection(indices.sort().values, picks, threshold, aligned=True)


def narrow(survivors: Survivors, propose: Callable[[Bracket], Tensor], fewest: int, most: int, rounds: int) -> Bracket:
    """Look for a threshold that ``fewest`` to ``most`` coordinates reach.

    Args:
        survivors: who counts.
        propose: the next trial, () float64 within the bracket. Proposing the same again ends the search.
        fewest: coordinates that are enough.
        most: coordinates that are not too many, at least ``fewest``.
        rounds: trials at most; on a device, all of them are made.
    """
    low = torch.zeros((), dtype=torch.float64, device=survivors.acc.device)
    bracket, tried = Bracket(low, torch.full_like(low, math.inf)), None
    for _ in range(rounds):
        threshold = torch.where(bracket.low == bracket.high, bracket.low, propose(bracket))
        if not survivors.static and tried is not None and threshold == tried:
            break
        reached = survivors.count(threshold)
        bracket = Bracket(
            torch.where(reached >= fewest, threshold, bracket.low),
            torch.where(reached <= most, threshold, bracket.high),
        )
        tried = threshold
    return bracket


def next_above(threshold: Tensor, dtype: torch.dtype) -> Tensor:
    """Smallest number of ``dtype`` above a () threshold, as float64: ``x > threshold`` is ``x >= next_above``."""
    rounded = threshold.to(dtype)
    return torch.nextafter(rounded, torch.full_like(rounded, math.inf)).double()


def picked(acc: Tensor, indices: Tensor) -> Selection:
    """These coordinates; the threshold is the smallest magnitude among them."""
    picks = torch.full((), indices.numel(), device=acc.device)
    return Selection(indices, picks, take(acc, indices).abs().min().double())


def everything(acc: Tensor) -> Selection:
    """All coordinates, for a density of 1."""
    indices = torch.arange(acc.numel(), device=acc.device)
    nothing = torch.zeros((), dtype=torch.float64, device=acc.device)
    return Selection(indices, torch.full((), acc.numel(), device=acc.device), nothing, aligned=True)
