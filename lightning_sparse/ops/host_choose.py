"""The largest magnitudes of a vector, on the CPU, exactly: from few that reach a lower bound.

Torch's own ``topk`` of the whole vector takes several times longer.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates, Found
from lightning_sparse.ops.host_arrays import compiled_on, kth, places_of, reach
from lightning_sparse.ops.host_reach import MARGIN, reaching

NEXT = 1.5
"""The factor over its need up to which a step lets the next one collect."""

SAMPLE = 1 << 13
"""Magnitudes from which torch takes the bound of the next step, about."""


def top_k(x: Tensor, k: int, candidates: Candidates | None = None) -> Tensor:
    """Ascending coordinates of the k largest magnitudes, ``0 < k < numel``; of equal ones the lower coordinates.

    From few that reach a lower bound, the exact k-th magnitude is taken. The bound is that of what was collected
    beforehand, else one from a sample, else zero.
    """
    picked, following = _picked(_enough(x, k, candidates), k, _more(k))
    if candidates is not None and k:
        candidates.expect(following)
    return picked


def top_k_and_stripe(
    x: Tensor, share: int, spare: int, turn: int, n: int, candidates: Candidates | None = None
) -> tuple[Tensor, Tensor]:
    """The largest of all, and the largest others of a stripe.

    Args:
        x: (numel,) finite values.
        share: how many of all, from 0 to numel.
        spare: how many of the coordinates j with ``j mod n == turn``; fewer where there are no more others.
        turn: which stripe.
        n: number of stripes.
        candidates: of the group, where x is its accumulator: they may save a pass.

    Returns:
        Their coordinates, int64, ascending; and whether each is one of the others.

    Example:
        >>> top_k_and_stripe(torch.tensor([1.0, -9, 3, 2, 8, 4]), 2, 1, turn=0, n=2)
        (tensor([1, 2, 4]), tensor([False,  True, False]))
    """
    expected = share + n * spare
    if not expected:
        return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.bool, device="cpu")
    enough = min(x.numel(), expected + math.ceil(4 * math.sqrt(expected)))
    indices, magnitudes = known = _enough(x, enough, candidates)
    more, size = _more(enough), indices.numel()
    if compiled := compiled_on(magnitudes):
        made = compiled.largest(known, share, spare, turn, n, more if more < size else enough)
        if made is not None:
            if candidates is not None:
                candidates.expect(made[2] if more < size else MARGIN * made[2])
            return made[0], made[1]
    if candidates is not None:
        candidates.expect(_next_bound(magnitudes, enough, more))
    first = torch.zeros(size, dtype=torch.bool, device="cpu")
    first.index_fill_(0, _best(magnitudes, share), True)
    inside = torch.from_numpy(np.equal(indices.numpy() - indices.numpy() // n * n, turn))  # torch divides one by one
    places = places_of(inside & ~first)
    if places.numel() < spare and size < x.numel():
        return _with_whole_stripe(x, indices[first].long(), indices[first & inside].long(), spare, turn, n)
    spares = torch.zeros_like(first)
    best = _best(magnitudes.index_select(0, places), min(spare, places.numel()))
    spares.index_fill_(0, places.index_select(0, best), True)
    picked = places_of(first | spares)
    return indices.index_select(0, picked).long(), spares.index_select(0, picked)


def _with_whole_stripe(x: Tensor, first: Tensor, mine: Tensor, spare: int, turn: int, n: int) -> tuple[Tensor, Tensor]:
    """Return :func:`top_k_and_stripe`, where the largest of all are known, and which of them are of the stripe."""
    stripe = x[turn::n].contiguous()
    others = top_k(stripe, min(stripe.numel(), spare + mine.numel())) * n + turn
    others = others[~torch.isin(others, mine, assume_unique=True)]
    indices, order = torch.cat([first, others]).sort()
    return indices, order >= first.numel()


def many_of_largest(
    x: Tensor, k: int, span: tuple[int, int] | None = None, candidates: Candidates | None = None
) -> Found:
    """The k largest magnitudes of a range, and maybe more, for :func:`largest_of`.

    Args:
        x: (numel,) finite values.
        k: how many, at least 1; fewer where the range is shorter.
        span: range to look at; None: everything.
        candidates: of the group, where x is its accumulator: they may save a pass, if everything is looked at.

    Returns:
        Ascending int32 coordinates, and magnitudes; no magnitude that is left out is larger than one of the k.
    """
    first, last = span or (0, x.numel())
    k = min(k, last - first)
    if candidates is None or last - first < x.numel():
        indices, magnitudes = _enough(x[first:last], k)
        return indices.add_(first), magnitudes
    indices, magnitudes = _enough(x, k, candidates)
    candidates.expect(_next_bound(magnitudes, k, _more(k)))
    return indices, magnitudes


def largest_of(indices: Tensor, magnitudes: Tensor, k: int) -> Tensor:
    """Ascending int64 coordinates of the k largest magnitudes; of equal ones the lower ones.

    Args:
        indices: (c,) int32, ascending.
        magnitudes: (c,) theirs.
        k: how many, from 0 to c.
    """
    return _picked((indices, magnitudes), k, k)[0]


def _enough(x: Tensor, k: int, candidates: Candidates | None = None) -> Found:
    """All that reach a bound, and at least k of them."""
    numel = x.numel()
    if k < numel:
        known = None if candidates is None else candidates.reaching(x, math.inf)
        if known is None or known[0].numel() < k:
            known = reaching(x, _bound_of_sample(x, k / numel))
        if known[0].numel() >= k:
            return known
    return torch.arange(numel, dtype=torch.int32, device="cpu"), x.abs()


def _picked(known: Found, k: int, more: int) -> tuple[Tensor, float]:
    """Coordinates of the k largest of what is known, ascending; and a magnitude that at least ``more`` reach.

    Of equal ones, the first. Where there are fewer than ``more``, somewhat less than what k reach.
    """
    indices, magnitudes = known
    if k == 0:
        return indices[:0].long(), math.inf
    if compiled := compiled_on(magnitudes):
        made = compiled.largest(known, k, 0, 0, 1, more if more < len(magnitudes) else k)
        assert made is not None
        return made[0], made[2] if more < len(magnitudes) else MARGIN * made[2]
    return indices[_best(magnitudes, k)].long(), _next_bound(magnitudes, k, more)


def _more(k: int) -> int:
    """Return the number that the next step should find, for k picks."""
    return math.ceil(NEXT * k) + 64


def _best(magnitudes: Tensor, k: int) -> Tensor:
    """Places of the k largest, ascending, of equal ones the first."""
    if not k:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    least = kth(magnitudes, k)
    keep = places_of(reach(magnitudes, least))
    if keep.numel() > k:  # of those that are equal to the k-th, the last ones are too many
        equal = places_of(magnitudes.index_select(0, keep) == least)
        stay = torch.ones(keep.numel(), dtype=torch.bool, device="cpu")
        stay[equal[k - keep.numel() :]] = False
        keep = keep.index_select(0, places_of(stay))
    return keep


def _next_bound(magnitudes: Tensor, k: int, more: int) -> float:
    """A magnitude that about ``more`` of these reach; where there are not more, somewhat less than what k reach."""
    short = more >= magnitudes.numel()
    k, margin = (k, MARGIN) if short else (more, 1.0)
    stride = 1 + magnitudes.numel() // SAMPLE
    return margin * kth(magnitudes[::stride], max(1, k // stride))


def _bound_of_sample(x: Tensor, share: float) -> float:
    """A magnitude that a share of all very probably reaches, from a sample; 0 from all or few of them."""
    stride = max(1, min(97, x.numel() // 4096))
    size = -(-x.numel() // stride)
    rank = math.ceil(size * share * 1.3 + 4 * math.sqrt(size * share) + 1)
    return 0.0 if stride == 1 or rank >= size else kth(x[::stride].abs(), rank)
