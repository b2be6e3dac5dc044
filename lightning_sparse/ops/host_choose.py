"""The largest magnitudes of a vector, on the CPU, exactly: from few that reach a lower bound.

Torch's own ``topk`` takes several times longer.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.core.candidates import Candidates
from lightning_sparse.ops.host_arrays import Found, compiled_for
from lightning_sparse.ops.host_reach import MARGIN, reaching, reaching_in_blocks

NEXT = 1.5
"""How many times more than it needs a step lets the next one collect."""


def top_k(x: Tensor, k: int, candidates: Candidates | None = None) -> Tensor:
    """Ascending coordinates of the k largest magnitudes, ``0 < k < numel``; of equal ones the lower coordinates."""
    return torch.from_numpy(_top_k(x.numpy(), k, x, candidates))


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
    values, expected = x.numpy(), share + n * spare
    if not expected:
        return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.bool, device="cpu")
    enough = min(values.size, expected + math.ceil(4 * math.sqrt(expected)))
    known = _enough(values, enough, x, candidates)
    more = _more(enough)
    if compiled := compiled_for(known[1]):
        made = compiled.largest(known, share, spare, turn, n, more if more < known[0].size else enough)
        if made is not None:
            if candidates is not None:
                candidates.expect(made[2] if more < known[0].size else MARGIN * made[2])
            return torch.from_numpy(made[0]), torch.from_numpy(made[1])
    indices, magnitudes = known
    if candidates is not None:
        candidates.expect(_next_bound(magnitudes, enough, more))
    first, spares = np.zeros(indices.size, dtype=bool), np.zeros(indices.size, dtype=bool)
    first[_best(magnitudes, share)] = True
    inside = indices // n * n + turn == indices  # divisions take a quarter of the time of remainders
    others = (inside & ~first).nonzero()[0]
    if others.size < spare and indices.size < values.size:
        return _with_whole_stripe(values, indices[first], indices[first & inside], spare, turn, n)
    spares[others.take(_best(magnitudes.take(others), min(spare, others.size)))] = True
    picked = (first | spares).nonzero()[0]
    return torch.from_numpy(indices.take(picked).astype(np.int64)), torch.from_numpy(spares.take(picked))


def _with_whole_stripe(
    values: NDArray[np.floating], first: NDArray[np.int32], mine: NDArray[np.int32], spare: int, turn: int, n: int
) -> tuple[Tensor, Tensor]:
    """What :func:`top_k_and_stripe` gives, where the largest of all are known, and which of them are of the stripe."""
    stripe = np.ascontiguousarray(values[turn::n])
    others = _top_k(stripe, min(stripe.size, spare + mine.size)) * n + turn
    others = others[~np.isin(others, mine, assume_unique=True)]
    keys = np.sort(np.concatenate([2 * first.astype(np.int64), 2 * others + 1]))
    return torch.from_numpy(keys >> 1), torch.from_numpy((keys & 1).astype(bool))


def top_k_of_blocks(x: Tensor, k: int, first: int, block: int, period: int) -> Tensor:
    """As :func:`top_k`, of the coordinates j with ``first <= j mod period < first + block``, of which there are k."""
    values = x.numpy()
    rounds = values.size // period
    end = rounds * period + first
    whole = values[: rounds * period].reshape(rounds, period)[:, first : first + block]
    rest = values[end : end + block]
    owned = whole.size + rest.size
    share, stride = k / owned, max(1, min(97, owned // 4096))
    sample = whole[:, ::stride] if stride <= block // 2 else whole[::stride]
    places, magnitudes = reaching_in_blocks(whole, rest, _bound_from(np.abs(sample).reshape(-1), share, stride))
    if places.size < k:
        places, magnitudes = reaching_in_blocks(whole, rest, values.dtype.type(0))
    picked = _picked((places, magnitudes), k, k)[0]
    # In the rest, places continue after the last complete round as they do from round to round.
    return torch.from_numpy(picked // block * period + first + picked % block)


def many_of_largest(
    x: Tensor, k: int, span: tuple[int, int] | None = None, candidates: Candidates | None = None
) -> tuple[Tensor, Tensor]:
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
    values = x.numpy()[first:last]
    k = min(k, last - first)
    if candidates is None or values.size < x.numel():
        indices, magnitudes = _enough(values, k)
        indices += np.int32(first)
        return torch.from_numpy(indices), torch.from_numpy(magnitudes)
    indices, magnitudes = _enough(values, k, x, candidates)
    candidates.expect(_next_bound(magnitudes, k, _more(k)))
    return torch.from_numpy(indices), torch.from_numpy(magnitudes)


def largest_of(indices: Tensor, magnitudes: Tensor, k: int) -> Tensor:
    """Ascending int64 coordinates of the k largest magnitudes; of equal ones the lower ones.

    Args:
        indices: (c,) int32, ascending.
        magnitudes: (c,) theirs.
        k: how many, from 0 to c.
    """
    return torch.from_numpy(_picked((indices.numpy(), magnitudes.numpy()), k, k)[0])


def _top_k(
    values: NDArray[np.floating], k: int, x: Tensor | None = None, candidates: Candidates | None = None
) -> NDArray[np.int64]:
    """Coordinates of the k largest magnitudes, ascending.

    From few that reach a lower bound, the exact k-th magnitude is taken. The bound is that of what was collected
    beforehand, else one from a sample, else zero.
    """
    picked, following = _picked(_enough(values, k, x, candidates), k, _more(k))
    if candidates is not None and k:
        candidates.expect(following)
    return picked


def _enough(
    values: NDArray[np.floating], k: int, x: Tensor | None = None, candidates: Candidates | None = None
) -> Found:
    """All that reach a bound, and at least k of them."""
    if k == values.size:
        return np.arange(k, dtype=np.int32), np.abs(values)
    known = None if candidates is None or x is None else candidates.reaching(x, math.inf)
    if known is None or known[0].size < k:
        stride = max(1, min(97, values.size // 4096))
        sample = np.abs(values[::stride]) if stride > 1 else values[:0]
        known = reaching(values, _bound_from(sample, k / values.size, stride))
    if known[0].size < k:
        known = np.arange(values.size, dtype=np.int32), np.abs(values)
    return known


def _picked(known: Found, k: int, more: int) -> tuple[NDArray[np.int64], float]:
    """Coordinates of the k largest of what is known, ascending; and a magnitude that at least ``more`` reach.

    Of equal ones, the first. Where there are fewer than ``more``, somewhat less than what k reach.
    """
    indices, magnitudes = known
    if k == 0:
        return indices[:0].astype(np.int64), math.inf
    if compiled := compiled_for(magnitudes):
        made = compiled.largest(known, k, 0, 0, 1, more if more < magnitudes.size else k)
        assert made is not None
        return made[0], made[2] if more < magnitudes.size else MARGIN * made[2]
    return indices.take(_best(magnitudes, k)).astype(np.int64), _next_bound(magnitudes, k, more)


def _more(k: int) -> int:
    """How many the next step should find, for k picks."""
    return math.ceil(NEXT * k) + 64


def _best(magnitudes: NDArray[np.floating], k: int) -> NDArray[np.intp]:
    """Places of the k largest, ascending, of equal ones the first."""
    if not k:
        return np.empty(0, dtype=np.intp)
    kth = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    keep: NDArray[np.intp] = (magnitudes >= kth).nonzero()[0]
    if keep.size > k:  # of those that are equal to the k-th, the last ones are too many
        equal = (magnitudes[keep] == kth).nonzero()[0]
        keep = np.delete(keep, equal[k - keep.size :])
    return keep


def _next_bound(magnitudes: NDArray[np.floating], k: int, more: int) -> float:
    """A magnitude that ``more`` of these reach; where there are not more, somewhat less than what k reach."""
    return _reached_by(magnitudes, more) if more < magnitudes.size else MARGIN * _reached_by(magnitudes, k)


def _reached_by(magnitudes: NDArray[np.floating], k: int) -> float:
    """A magnitude that k of these reach, and hardly more."""
    if compiled := compiled_for(magnitudes):
        return compiled.reached_by(magnitudes, k)
    return float(np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k])  # of two ranks at once, it is slow


def _bound_from(sample: NDArray[np.floating], share: float, stride: int) -> np.floating:
    """A magnitude that a share of all very probably reaches, from a sample of magnitudes; 0 from all or few of them."""
    rank = math.ceil(sample.size * share * 1.3 + 4 * math.sqrt(sample.size * share) + 1)
    if stride == 1 or rank >= sample.size:
        return sample.dtype.type(0)
    bound: np.floating = np.partition(sample, sample.size - rank)[sample.size - rank]
    return bound
