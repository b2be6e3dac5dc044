"""Search for a threshold by trials and counts, for DGC, RedSync and GaussianK."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.step import Candidates, Selection
from lightning_sparse.methods.sparsifiers.estimation import reaching
from lightning_sparse.ops import (
    Number,
    at_most,
    either,
    known,
    leaders,
    pick_leaders,
    ranked_leaders,
    reaching_leaders,
    take,
    tensor,
)

CAPACITY = 4
"""Device slots, in multiples of k, if a rule selects all coordinates above a threshold."""


class Bracket(NamedTuple):
    """Bounds of the threshold that is searched for. It is found if both bounds are equal."""

    low: Number
    """Largest trial that enough coordinates reach; 0 before the first one."""
    high: Number
    """Smallest trial that not too many coordinates reach; infinite before the first one."""


class Survivors:
    """The coordinates that reach a threshold.

    Trials count among some of the largest magnitudes, more than ``most``: a threshold that all of them reach is reached
    by too many. On the CPU they are collected by the pass that forms the accumulator, or else by one pass over it.

    Args:
        acc: (numel,) finite accumulator.
        most: counts above this are not distinguished.
        candidates: of the group.
    """

    def __init__(self, acc: Tensor, most: int, candidates: Candidates | None = None) -> None:
        self.acc, self.most = acc, most
        self._candidates = candidates
        self._leaders = leaders(acc, most + 1, candidates=candidates)

    def count(self, threshold: Number) -> Any:
        """Return the number of coordinates that reach a threshold, compared in the accumulator's precision.

        More than ``most`` may count as any larger number.
        """
        return reaching_leaders(self._leaders, threshold)

    def beyond(self, threshold: Number, k: int, phase: int) -> Selection:
        """Select all coordinates strictly above a threshold, on a device at most ``CAPACITY * k``, thinned evenly."""
        bound = next_above(threshold, self.acc.dtype)
        picked = reaching(self.acc, tensor(bound), CAPACITY * k, phase, candidates=self._candidates)
        return picked._replace(threshold=tensor(threshold))

    def trim(self, bracket: Bracket, k: int, most: int) -> Selection:
        """Select the coordinates that reach the lower bound; the k largest if these are more than ``most``.

        Args:
            bracket: result of the search.
            k: number to select if the bracket is still open, at most ``most``.
            most: largest number to select, at most :attr:`most`.
        """
        numel, found = self.acc.numel(), self.count(bracket.low)
        excess = found > most
        if numel <= most:  # then zeros do not exceed it
            excess = excess | ((bracket.low == 0) & (bracket.high > 0))
        picks, threshold = either(excess, k, found), bracket.low
        if excess is not False:
            threshold = either(excess, known(ranked_leaders(self._leaders, k).double()), threshold)
        indices = pick_leaders(self._leaders, picks, at_most(tensor(picks), min(most, numel)), numel)
        count = tensor(picks, torch.int64)
        return Selection(indices, count, tensor(threshold), aligned=isinstance(picks, Tensor))


def narrow(survivors: Survivors, propose: Callable[[Bracket], Number], fewest: int, most: int, rounds: int) -> Bracket:
    """Search for a threshold that ``fewest`` to ``most`` coordinates reach.

    Args:
        survivors: counts coordinates.
        propose: returns the next trial, within the bracket. The same trial again ends the search.
        fewest: least number of coordinates.
        most: largest number of coordinates, at least ``fewest``.
        rounds: largest number of trials; on a device, all of them are made.
    """
    zero = known(torch.zeros((), dtype=torch.float64, device=survivors.acc.device))
    bracket, tried = Bracket(zero, zero + math.inf), None
    for _ in range(rounds):
        threshold = either(bracket.low == bracket.high, bracket.low, propose(bracket))
        if not isinstance(threshold, Tensor) and threshold == tried:
            break
        found = survivors.count(threshold)
        bracket = Bracket(
            either(found >= fewest, threshold, bracket.low),
            either(found <= most, threshold, bracket.high),
        )
        tried = threshold
    return bracket


def next_above(threshold: Number, dtype: torch.dtype) -> Number:
    """Return the smallest number of ``dtype`` above a threshold: ``x > threshold`` is ``x >= next_above``."""
    rounded = tensor(threshold).to(dtype)
    above: Number = known(torch.nextafter(rounded, torch.full_like(rounded, math.inf)).double())
    return above


def picked(acc: Tensor, indices: Tensor) -> Selection:
    """Return a selection of these coordinates; its threshold is their smallest magnitude."""
    picks = torch.full((), indices.numel(), device=acc.device)
    return Selection(indices, picks, take(acc, indices).abs().min().double())
