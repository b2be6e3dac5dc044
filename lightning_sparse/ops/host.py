"""Passes over whole vectors, and work on selected coordinates, on the CPU: in C where it takes the vectors.

Else they are operations of torch, most of them those of the reference, and of numpy where torch takes several times
as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.layout import InRuns
from lightning_sparse.core.step import Candidates, Found
from lightning_sparse.ops import reference
from lightning_sparse.ops.c import native
from lightning_sparse.ops.c.native import compiled_on, written
from lightning_sparse.ops.reference import Weights

LINE = 64
"""Bytes of a line of the cache."""
MARGIN = 0.9
"""The next step's threshold is expected above this multiple of this one's."""
NEXT = 1.5
"""The factor over its need up to which a step lets the next one collect."""
SAMPLE = 1 << 13
"""Magnitudes from which torch takes the bound of the next step, about."""


def zeros(size: int, dtype: torch.dtype) -> Tensor:
    """(size,) that begins with a line of the cache, in large pages where the system has some: numpy asks for them.

    Places all over a vector are then reached faster, and all of it, too. Torch does not ask.
    """
    kind = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    room = np.zeros(size + LINE // kind.itemsize, kind)
    first = -room.ctypes.data % LINE // kind.itemsize
    return torch.from_numpy(room[first : first + size])


def kth(magnitudes: Tensor, k: int) -> float:
    """Return the magnitude that k reach, itself among them; in numpy, since torch takes four times as long."""
    return float(np.partition(magnitudes.numpy(), -k)[-k])


def places_of(flags: Tensor) -> Tensor:
    """Return which of a vector of flags are set, ascending int64; in numpy, since torch takes four times as long."""
    return torch.from_numpy(flags.numpy().nonzero()[0])


def above(x: Tensor, threshold: float, first: int, last: int, candidates: Candidates | None = None) -> Tensor:
    """Return ascending coordinates in [first, last) with ``|x| >= threshold``."""
    bound = _number(x, threshold)
    known: Found | None = None
    if candidates is not None:
        known = candidates.reaching(x, bound)
        candidates.expect(MARGIN * bound)
    if known is None:
        return reaching(x[first:last], bound)[0].long() + first
    found = reaching_of(*known, bound)
    return found if (first, last) == (0, x.numel()) else found[(found >= first) & (found < last)]


def tail(x: Tensor, threshold: float) -> Tensor:
    """Return the magnitudes that reach a threshold, without zeros."""
    return reaching(x, max(_number(x, threshold), torch.finfo(x.dtype).tiny))[1]


def reached(magnitudes: Tensor, threshold: float) -> int:
    """Return how many magnitudes reach a threshold, compared in their precision; torch takes seven times as long."""
    return int(np.greater_equal(magnitudes.numpy(), _number(magnitudes, threshold)).sum())


def reaching_of(indices: Tensor, magnitudes: Tensor, threshold: float) -> Tensor:
    """Return the int32 coordinates whose magnitudes reach a threshold, as int64."""
    return indices[_reaching(magnitudes, threshold)[0]].long()


def reaching(x: Tensor | InRuns, bound: float) -> Found:
    """Return what of a vector reaches a bound, NaN never: ascending int32 coordinates, and magnitudes."""
    if isinstance(x, InRuns):
        return _joined(x, [reaching(run, bound) for run in x.runs])
    if compiled := compiled_on(x):
        return compiled.above(x, bound)
    return _reaching(x, bound)


def _joined(x: InRuns, found: Sequence[Found]) -> Found:
    """Return what was found in runs as coordinates of all of them."""
    for start, (indices, _) in zip(x.place.starts, found, strict=True):
        indices.add_(start)
    return torch.cat([indices for indices, _ in found]), torch.cat([magnitudes for _, magnitudes in found])


def _every(x: Tensor | InRuns, step: int, first: int = 0) -> Tensor:
    """Return ``x[first::step]``, contiguous if x lies in runs."""
    return x.every(step, first) if isinstance(x, InRuns) else x[first::step]


def _reaching(x: Tensor | InRuns, bound: float) -> Found:
    """Do the work of :func:`reaching` in numpy, since torch takes three times as long."""
    if isinstance(x, InRuns):
        return _joined(x, [_reaching(run, bound) for run in x.runs])
    magnitudes = np.abs(x.numpy())
    places = np.greater_equal(magnitudes, _number(x, bound)).nonzero()[0]
    return torch.from_numpy(places.astype(np.int32)), torch.from_numpy(magnitudes[places])


def _number(x: Tensor, threshold: float) -> float:
    """Round to the precision of a vector."""
    return float(torch.tensor(threshold, dtype=x.dtype, device="cpu"))


def top_k(x: Tensor | InRuns, k: int, candidates: Candidates | None = None) -> Tensor:
    """Ascending coordinates of the k largest magnitudes, ``0 < k < numel``; of equal ones the lower coordinates.

    From few that reach a lower bound, the exact k-th magnitude is taken. The bound is that of what was collected
    beforehand, else one from a sample, else zero.
    """
    picked, following = _picked(_enough(x, k, candidates), k, _more(k))
    if candidates is not None and k:
        candidates.expect(following)
    return picked


def top_k_and_stripe(
    x: Tensor | InRuns, share: int, spare: int, turn: int, n: int, candidates: Candidates | None = None
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


def _with_whole_stripe(
    x: Tensor | InRuns, first: Tensor, mine: Tensor, spare: int, turn: int, n: int
) -> tuple[Tensor, Tensor]:
    """Return :func:`top_k_and_stripe`, where the largest of all are known, and which of them are of the stripe."""
    stripe = _every(x, n, turn).contiguous()
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


def _enough(x: Tensor | InRuns, k: int, candidates: Candidates | None = None) -> Found:
    """All that reach a bound, and at least k of them."""
    numel = x.numel()
    if k < numel:
        known = None if candidates is None else candidates.reaching(x, math.inf)
        if known is None or known[0].numel() < k:
            known = reaching(x, _bound_of_sample(x, k / numel))
        if known[0].numel() >= k:
            return known
    return torch.arange(numel, dtype=torch.int32, device="cpu"), _every(x, 1).abs()


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
    return torch.from_numpy(np.sort(np.argsort(-magnitudes.numpy(), kind="stable")[:k]))


def _next_bound(magnitudes: Tensor, k: int, more: int) -> float:
    """A magnitude that about ``more`` of these reach; where there are not more, somewhat less than what k reach."""
    short = more >= magnitudes.numel()
    k, margin = (k, MARGIN) if short else (more, 1.0)
    stride = 1 + magnitudes.numel() // SAMPLE
    return margin * kth(magnitudes[::stride], max(1, k // stride))


def _bound_of_sample(x: Tensor | InRuns, share: float) -> float:
    """A magnitude that a share of all very probably reaches, from a sample; 0 from all or few of them."""
    stride = max(1, min(97, x.numel() // 4096))
    size = -(-x.numel() // stride)
    rank = math.ceil(size * share * 1.3 + 4 * math.sqrt(size * share) + 1)
    return 0.0 if stride == 1 or rank >= size else kth(_every(x, stride).abs(), rank)


def accumulate(acc: Tensor, runs: Sequence[Tensor], bound: float) -> tuple[Found | None, bool]:
    """``acc = acc + grad`` and ``grad = 0``, in one pass; a coordinate whose sum is not finite is left as it is.

    Args:
        acc: (numel,) float32 or float64.
        runs: in which the gradient lies, numel coordinates in order, of the same dtype, or bfloat16 or float16; set to
            zero.
        bound: magnitude.

    Returns:
        What of acc reaches the bound, None if that is more than an eighth or a sum was not finite; and whether all sums
        were finite.
    """
    if compiled := compiled_on(acc, *runs):
        written(acc, *runs)
        return compiled.form((acc, None, None), runs, True, (), bound, acc.numel() // Candidates.ROOM)
    finite = bool(reference.accumulate_(acc, runs, 1.0))
    return _collected(acc, finite, runs, bound)


def weigh(
    acc: Tensor, second: Tensor, score: Tensor | InRuns, runs: Sequence[Tensor], by: Weights, bound: float
) -> tuple[Found | None, bool]:
    """Form the sums that :func:`.ops.weigh_` says, in one pass but for factors that are not 1.

    The gradient is set to zero if the score is not in its place. Where acc is left as it is, the score is not defined.

    Returns:
        As :func:`accumulate`, but what of the score reaches the bound; and whether all of the new acc was finite.
    """
    take, carry, _ = by.units.tolist()
    for run in runs if take != 1 else ():
        run.mul_(take)
    if carry != 1:
        acc.mul_(carry)
        second.mul_(carry**2)
    own = score if isinstance(score, Tensor) else None
    start, clear = (1 - by.power).sqrt().item(), own is not None and own.data_ptr() != runs[0].data_ptr()
    numbers = by.beta2, 1 - by.beta2, by.eps * start, start * by.damping
    if compiled := compiled_on(acc, second, *runs, *([] if own is None else [own])):
        written(acc, second, *runs, *([] if own is None else [own]))
        room = score.numel() // Candidates.ROOM
        return compiled.form((acc, second, own), runs, clear, numbers, bound, room)
    by = by._replace(units=by.units.new_tensor([1, 1, by.beta2]))
    if own is None:
        lengths = [len(run) for run in runs]
        cut = zip(torch.split(acc, lengths), torch.split(second, lengths), runs, strict=True)
        each = [bool(reference.weigh_(kept, moments, run, [run], by)) for kept, moments, run in cut]
        finite = all(each)  # of all runs, also behind one that is not
    else:
        finite = bool(reference.weigh_(acc, second, own, runs, by))
    return _collected(score, finite, runs if clear else (), bound)


def part(
    away: Tensor, score: Tensor | None, agreed: Tensor, pushed: Tensor | None, runs: Sequence[Tensor], bound: float
) -> tuple[Found | None, bool]:
    """Form what :func:`.ops.part_` says, in one pass.

    Returns:
        As :func:`accumulate`, but what of the score reaches the bound, or of the drift where there is none.
    """
    formed = [away, *(x for x in (score, pushed) if x is not None)]
    if compiled := compiled_on(agreed, *formed, *runs):
        written(away, *([] if score is None else [score]))
        return compiled.part(away, score, agreed, pushed, runs, bound, agreed.numel() // Candidates.ROOM)
    finite = bool(reference.part_(away, score, agreed, pushed, runs))
    return _collected(away if score is None else score, finite, (), bound)


def _collected(x: Tensor | InRuns, finite: bool, cleared: Sequence[Tensor], bound: float) -> tuple[Found | None, bool]:
    """Set vectors to zero, and return what :func:`accumulate` does of a vector that operations of torch have formed."""
    for run in cleared:
        run.zero_()
    found = _reaching(x, bound) if finite else None
    few = found is not None and len(found[0]) <= x.numel() // Candidates.ROOM
    return found if few else None, finite


def under(mask: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Return ``x[mask]`` for each of some vectors."""
    places = places_of(mask)
    return tuple(x.index_select(0, places) for x in vectors)


def put_in_runs_(runs: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """Set ``x[indices] = values`` where x lies in several runs."""
    if len(runs) == 1:
        runs[0].index_copy_(0, indices, values)
        return
    starts = torch.tensor([0, *(len(run) for run in runs)], device="cpu").cumsum(0)
    if not bool((indices[1:] >= indices[:-1]).all()):
        indices, order = indices.sort(stable=True)
        values = values[order]
    if len(indices) and not 0 <= indices[0] <= indices[-1] < starts[-1]:
        raise IndexError(f"an index is outside of a vector of {int(starts[-1])}")
    ends = torch.searchsorted(indices, starts).tolist()
    for run, start, first, last in zip(runs, starts.tolist(), ends, ends[1:], strict=False):
        run.index_copy_(0, indices[first:last] - start, values[first:last])


def unite(
    picks: Sequence[Tensor],
    levels: Tensor,
    spare: Sequence[Tensor] | None,
    padding: int,
    limit: int | None,
    phase: int,
) -> tuple[Tensor, Tensor, int]:
    """The union of all picks below the padding index, thinned to a limit; see :func:`.reduce_union.union_of`.

    Args:
        picks: int64 coordinates below 2**31 of each rank, maybe with the padding index.
        levels: int64 in [0, 2**20) of all of them, one rank after another.
        spare: bool of each rank's: which are left out first.
        padding: the padding index.
        limit: of the union.
        phase: rotates which ones are left out.

    Returns:
        Ascending coordinates; the largest level of each; and how many there were before the limit.
    """
    if native.library and (made := native.library.unite(picks, levels, spare, padding, limit, phase)):
        return made
    more = torch.zeros(1, dtype=torch.int64, device="cpu")  # the reference needs a slot
    indices, told = torch.cat([*picks, more + padding]), torch.cat([levels, more])
    flags = None if spare is None else torch.cat([*spare, more.bool()])
    union, size, named, largest = reference.united(indices, flags, told, padding, None, limit, phase)
    return union[:size], largest[:size], int(named)
