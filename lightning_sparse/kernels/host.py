"""CPU formulations: numpy over zero-copy views, in chunks that stay in cache.

Torch's own ``topk`` and ``nonzero`` take several times longer on a CPU: they allocate what they return and what they
compare with, and page faults double every pass. Buffers are reused per thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.candidates import Candidates
from lightning_sparse.kernels import native

CHUNK = 1 << 16
"""Elements per chunk: 256 KiB of float32, which fits into a second-level cache."""
LANES = 1 << 10
"""Sums are formed in as many parts: part j is that of elements j, j + LANES, ... of a chunk, in float64."""
NEXT = 1.5
"""Candidates that the next step should find, in multiples of what this one has picked."""

MARGIN = 0.9
"""The next step's threshold is expected above this multiple of this one's."""

Found = tuple[NDArray[np.int32], NDArray[np.floating]]
"""Ascending coordinates and their magnitudes."""

_buffers = threading.local()


@np.errstate(over="ignore", invalid="ignore", under="ignore")  # sums may leave the range, as torch's do
def accumulate(acc: Tensor, residual: Tensor, runs: Sequence[Tensor], bound: float) -> tuple[Found | None, bool]:
    """``acc = residual + grad`` and ``grad = 0``, in one pass.

    Args:
        acc: (numel,) float32 or float64, overwritten.
        residual: the same, not written to.
        runs: in which the gradient lies, numel coordinates in order, of the same dtype, or bfloat16 or float16; set to
            zero.
        bound: magnitude.

    Returns:
        What of acc reaches the bound, None if that is more than an eighth; and whether all of acc is finite.
    """
    written(acc, *runs)
    target, kept, zeroed = acc.numpy(), residual.numpy(), [_bits(run) for run in runs]
    room = target.size // Candidates.ROOM
    if compiled := _compiled(target, kept, *zeroed):
        return compiled.accumulate(target, kept, zeroed, float(bound), room)
    level = target.dtype.type(bound)
    widened = np.empty(0, dtype=np.uint32)
    if runs[0].dtype == torch.bfloat16:
        widened = _buffer("widened", np.dtype(np.uint32))
    hits = Hits(room)
    finite = True
    for span, piece in _chunks(zeroed):
        size, chunk = piece.size, target[span]
        if widened.size:
            np.left_shift(piece, 16, out=widened[:size], dtype=np.uint32)
            np.add(kept[span], widened[:size].view(np.float32), out=chunk)
        else:
            np.add(kept[span], piece, out=chunk)
        piece.fill(0)
        largest = hits.add(chunk, level, span.start)
        finite = finite and bool(largest < np.inf)
    return hits.found(target.dtype), finite


def _chunks(runs: Sequence[NDArray[Any]]) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Pieces of runs that stay in cache, and which coordinates they hold."""
    start = 0
    for run in runs:
        for at in range(0, run.size, CHUNK):
            piece = run[at : at + CHUNK]
            yield slice(start, start + piece.size), piece
            start += piece.size


class Hits:
    """What of the chunks of a vector reaches a bound.

    Args:
        room: for so many.
    """

    def __init__(self, room: int) -> None:
        self._room, self._total = room, 0
        self._indices: list[NDArray[np.int32]] = []
        self._magnitudes: list[NDArray[np.floating]] = []

    def add(self, chunk: NDArray[np.floating], bound: np.floating, start: int) -> np.floating:
        """A chunk that begins at a coordinate; its largest magnitude."""
        magnitudes, mask = _magnitudes(chunk)
        np.greater_equal(magnitudes, bound, out=mask)
        hits = np.flatnonzero(mask)
        self._total += hits.size
        if hits.size and self._total <= self._room:
            self._magnitudes.append(magnitudes.take(hits))
            hits += start
            self._indices.append(hits.astype(np.int32))
        largest: np.floating = magnitudes.max()
        return largest

    def found(self, dtype: np.dtype[Any]) -> Found | None:
        """All of them; None: there was no room."""
        if self._total > self._room:
            return None
        return _joined(self._indices, np.dtype(np.int32)), _joined(self._magnitudes, dtype)


class Weights(NamedTuple):
    """How :func:`weigh` forms second moments and scores."""

    keep: float
    """Of the second moment."""
    add: float
    """Of a squared gradient."""
    least: float
    """Added to roots."""
    quickest: float
    """What a magnitude is multiplied by, to be the least root that it is divided by."""


@np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore")
def weigh(
    acc: Tensor,
    second: Tensor,
    score: Tensor,
    residual: Tensor,
    now: Tensor,
    runs: Sequence[Tensor],
    by: Weights,
    bound: float,
) -> tuple[Found | None, bool]:
    """What :class:`~lightning_sparse.SecondMoment` forms of a gradient g, in one pass.

    ``acc = residual + g``, ``second = keep now + add g^2``, at most the largest number, and
    ``score = acc / sqrt(max(sqrt(second) + least, quickest |acc|))``.

    Args:
        acc: (numel,) float32 or float64, overwritten.
        second: the same.
        score: the same; may be the only run of the gradient. If it is not, the gradient is set to zero.
        residual: the same, not written to.
        now: the same.
        runs: in which the gradient lies, numel coordinates in order, of the same dtype, or bfloat16 or float16.
        by: numbers.
        bound: magnitude.

    Returns:
        What of the score reaches the bound, None if that is more than an eighth; and whether all of acc is finite.
    """
    clear = score.data_ptr() != runs[0].data_ptr()
    written(acc, second, score, *runs)
    out, kept, before = [x.numpy() for x in (acc, second, score)], residual.numpy(), now.numpy()
    room = score.numel() // Candidates.ROOM
    given = [_bits(run) for run in runs]
    if compiled := _compiled(*out, kept, before, *given):
        return compiled.weigh(kept, given, before, out, clear, by, float(bound), room)
    one = out[0].dtype.type
    keep, add, least, quickest = map(one, by)
    most, level = np.finfo(one).max, one(bound)
    wide, root, quick = (_buffer(use, out[0].dtype) for use in ("wide", "root", "magnitudes"))
    hits = Hits(room)
    finite = True
    for span, piece in _chunks(given):
        size = piece.size
        a, v, x = (vector[span] for vector in out)
        g, r, q = wide[:size], root[:size], quick[:size]
        if runs[0].dtype == torch.bfloat16:
            np.left_shift(piece, 16, out=g.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(g, piece)
        if clear:
            piece.fill(0)
        np.add(kept[span], g, out=a)
        np.multiply(before[span], keep, out=v)
        np.multiply(g, add, out=r)
        np.multiply(r, g, out=r)
        np.add(v, r, out=v)
        np.minimum(v, most, out=v)
        np.sqrt(v, out=r)
        np.add(r, least, out=r)
        np.abs(a, out=q)
        finite = finite and bool(q.max() < np.inf)
        np.multiply(q, quickest, out=q)
        np.maximum(r, q, out=r)
        np.sqrt(r, out=r)
        np.divide(a, r, out=x)
        hits.add(x, level, span.start)
    return hits.found(out[0].dtype), finite


def above(x: Tensor, threshold: float, first: int, last: int, candidates: Candidates | None = None) -> Tensor:
    """Ascending coordinates in [first, last) with ``|x| >= threshold``."""
    values = x.numpy()
    bound = values.dtype.type(threshold)
    known = None
    if candidates is not None:
        known = candidates.reaching(x, float(bound))
        candidates.expect(MARGIN * float(bound))
    if known is None:
        return torch.from_numpy(_above(values[first:last], bound)[0].astype(np.int64) + first)
    if (first, last) != (0, values.size):
        inside = slice(*np.searchsorted(known[0], (first, last)))
        known = known[0][inside], known[1][inside]
    return torch.from_numpy(_reaching_of(known, float(bound)))


def top_k(x: Tensor, k: int, candidates: Candidates | None = None) -> Tensor:
    """Ascending coordinates of the k largest magnitudes, ``0 < k < numel``; of equal ones the lower coordinates."""
    return torch.from_numpy(_top_k(x.numpy(), k, x, candidates))


def top_k_and_stripe(
    x: Tensor, share: int, spare: int, turn: int, n: int, candidates: Candidates | None = None
) -> tuple[Tensor, Tensor]:
    """The ``share`` largest and ``spare`` others of the stripe, ascending; and which are the latter.

    One pass over the group finds what both are chosen from: among the largest, stripes have about equal parts.
    """
    values, expected = x.numpy(), share + n * spare
    if not expected:
        return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.bool, device="cpu")
    enough = min(values.size, expected + math.ceil(4 * math.sqrt(expected)))
    known = _enough(values, enough, x, candidates)
    more = _more(enough)
    if compiled := _compiled(known[1]):
        made = compiled.largest(known, share, spare, turn, n, more if more < known[0].size else enough)
        if made is not None:
            if candidates is not None:
                candidates.expect(made[2] if more < known[0].size else MARGIN * made[2])
            return torch.from_numpy(made[0]), torch.from_numpy(made[1])
    keep, following = _best(known[1], enough, more)
    if candidates is not None:
        candidates.expect(following)
    indices, magnitudes = known[0][keep].astype(np.int64), known[1][keep]
    first = np.zeros(enough, dtype=bool)
    if share:
        first[_best(magnitudes, share, share)[0]] = True
    inside = indices % n == turn
    own = np.flatnonzero(inside & ~first)
    if own.size < spare and enough < values.size:
        chosen, mine = indices[first], indices[first & inside]
        stripe = np.ascontiguousarray(values[turn::n])
        others = _top_k(stripe, min(stripe.size, spare + mine.size)) * n + turn
        others = others[~np.isin(others, mine, assume_unique=True)]
        if others.size > spare:
            others = others[_best(np.abs(values[others]), spare, spare)[0]] if spare else others[:0]
        keys = np.sort(np.concatenate([2 * chosen, 2 * others + 1]))
        return torch.from_numpy(keys >> 1), torch.from_numpy((keys & 1).astype(bool))
    if own.size > spare:
        own = own[_best(magnitudes[own], spare, spare)[0]] if spare else own[:0]
    other = np.zeros(enough, dtype=bool)
    other[own] = True
    picked = np.flatnonzero(first | other)
    return torch.from_numpy(indices[picked]), torch.from_numpy(other[picked])


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
    places, magnitudes = _above_in_blocks(whole, rest, _bound_from(np.abs(sample).reshape(-1), share, stride))
    if places.size < k:
        places, magnitudes = _above_in_blocks(whole, rest, values.dtype.type(0))
    picked = _picked((places, magnitudes), k, k)[0]
    # In the rest, places continue after the last complete round as they do from round to round.
    return torch.from_numpy(picked // block * period + first + picked % block)


def many_of_largest(
    x: Tensor, k: int, first: int, last: int, candidates: Candidates | None = None
) -> tuple[Tensor, Tensor]:
    """Ascending int32 coordinates of the k largest in [first, last) and maybe of more, and their magnitudes."""
    values = x.numpy()[first:last]
    k = min(k, last - first)
    if candidates is None or values.size < x.numel():
        indices, magnitudes = _enough(values, k)
        indices += np.int32(first)
        return torch.from_numpy(indices), torch.from_numpy(magnitudes)
    indices, magnitudes = _enough(values, k, x, candidates)
    more = _more(k)
    candidates.expect(_reached_by(magnitudes, min(more, magnitudes.size)) * (1.0 if more < magnitudes.size else MARGIN))
    return torch.from_numpy(indices), torch.from_numpy(magnitudes)


def reached(magnitudes: Tensor, threshold: float) -> int:
    """How many magnitudes reach a threshold."""
    values = magnitudes.numpy()
    if compiled := _compiled(values):
        return compiled.reached(values, threshold)
    return int(np.count_nonzero(values >= values.dtype.type(threshold)))


def reaching_of(indices: Tensor, magnitudes: Tensor, threshold: float) -> Tensor:
    """The coordinates whose magnitudes reach a threshold."""
    return torch.from_numpy(_reaching_of((indices.numpy(), magnitudes.numpy()), threshold))


def _reaching_of(known: Found, threshold: float) -> NDArray[np.int64]:
    indices, magnitudes = known
    if compiled := _compiled(magnitudes):
        return compiled.reaching(known, threshold)
    return indices.take(np.flatnonzero(magnitudes >= magnitudes.dtype.type(threshold))).astype(np.int64)


def _reached_by(magnitudes: NDArray[np.floating], k: int) -> float:
    """A magnitude that k of these reach, and hardly more."""
    if compiled := _compiled(magnitudes):
        return compiled.reached_by(magnitudes, k)
    return float(np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k])


def largest_of(indices: Tensor, magnitudes: Tensor, k: int) -> Tensor:
    """Ascending int64 coordinates of the k largest; of equal ones the lower ones."""
    return torch.from_numpy(_picked((indices.numpy(), magnitudes.numpy()), k, k)[0])


def largest(x: Tensor, k: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Coordinates and magnitudes of the k largest in [first, last), largest first, lower coordinate first."""
    values = x.numpy()[first:last]
    k = min(k, last - first)
    picked = _top_k(values, k)
    magnitudes = np.abs(values.take(picked))
    order = _descending(magnitudes)
    return torch.from_numpy(picked[order] + first), torch.from_numpy(magnitudes[order])


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def excess(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Number, sum and sum of squares of ``|x| - threshold`` where that is not negative and x is not zero."""
    values = x.numpy()
    bound, level = _lowest(values.dtype, threshold), np.float64(threshold)
    if compiled := _compiled(values):
        made = torch.tensor(compiled.excess(values, threshold, float(bound)), dtype=torch.float64, device="cpu")
        return made[0], made[1], made[2]
    count, total, squares = 0, _Sum(), _Sum()
    for start in range(0, values.size, CHUNK):
        magnitudes, mask = _magnitudes(values[start : start + CHUNK])
        count += int(np.count_nonzero(np.greater_equal(magnitudes, bound, out=mask)))
        beyond = _buffer("wide", np.dtype(np.float64))[: magnitudes.size]
        np.subtract(magnitudes, level, out=beyond)
        np.maximum(beyond, 0.0, out=beyond)
        total.add(beyond)
        np.multiply(beyond, beyond, out=beyond)
        squares.add(beyond)
    return _scalar(count), _scalar(total.value()), _scalar(squares.value())


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, from sums in float64."""
    values = x.numpy()
    compiled = _compiled(values)
    total, squares = compiled.moments(values) if compiled else _moments(values)
    count, mean = values.size, total / values.size
    variance = (squares - total * mean) / (count - 1) if count > 1 else math.nan
    deviation = variance if math.isnan(variance) else math.sqrt(max(variance, 0.0))
    return _scalar(mean), _scalar(deviation)


def mean_and_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of magnitudes, from a sum in float64."""
    values = x.numpy()
    compiled = _compiled(values)
    total, largest = compiled.sum_and_maximum(values) if compiled else _sum_and_maximum(values)
    return _scalar(min(total / values.size, largest)), _scalar(largest)  # also where the sum overflows


def log_sum(x: Tensor) -> Tensor:
    """Sum of ``ln |x|`` over the x that are not zero."""
    values = x.numpy()
    bound, total = _lowest(values.dtype, 0.0), 0.0
    for start in range(0, values.size, CHUNK):
        magnitudes, mask = _magnitudes(values[start : start + CHUNK])
        np.less(magnitudes, bound, out=mask)
        np.copyto(magnitudes, 1, where=mask)
        total += float(np.log(magnitudes, out=magnitudes).sum(dtype=np.float64))
    return _scalar(total)


def tail(x: Tensor, threshold: float, candidates: Candidates | None = None) -> Tensor:
    """The magnitudes that reach a threshold, without zeros."""
    values = x.numpy()
    bound = _lowest(values.dtype, threshold)
    if candidates is not None:
        known = candidates.reaching(x, float(bound))
        candidates.expect(MARGIN * float(bound))
        values = values if known is None else known[1]
    if compiled := _compiled(values):
        return torch.from_numpy(compiled.tail(values, float(bound)))
    return torch.from_numpy(_above(values, bound)[1])


def all_finite(x: Tensor) -> bool:
    """No NaN and no infinity in x."""
    if x.dtype == torch.float32 and x.is_contiguous() and (compiled := _compiled(values := x.detach().numpy())):
        return compiled.all_finite(values)
    low, high = torch.aminmax(x)
    return math.isfinite(low) and math.isfinite(high)


def take(x: Tensor, indices: Tensor) -> Tensor:
    """``x[indices]``."""
    if not indices.numel():
        return x.new_empty(0)  # of an empty array, torch makes a vector that it cannot look at as another dtype
    values, places = x.numpy(), indices.numpy()
    compiled = _plain_places(places) and _compiled(values)
    return torch.from_numpy(compiled.take(values, places) if compiled else values.take(places))


def under(mask: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """``x[mask]`` for each of them; an index of booleans takes several times as long."""
    places = np.flatnonzero(mask.numpy())
    return tuple(torch.from_numpy(x.numpy().take(places)) for x in vectors)


def put_(x: Tensor, indices: Tensor, values: Tensor | float) -> None:
    """``x[indices] = values``, of equal dtypes."""
    places, target = indices.numpy(), _bits(x)
    _put(target, places, _bits(values) if isinstance(values, Tensor) else np.full(places.shape, values, target.dtype))
    written(x)


def _put(target: NDArray[Any], places: NDArray[Any], new: NDArray[Any]) -> None:
    fitting = _plain_places(places) and new.dtype == target.dtype and new.size == places.size
    if compiled := fitting and _compiled(target, new):
        compiled.put(target, places, new)
    else:
        target[places] = new


def put_in_runs_(runs: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """``x[indices] = values``, where x lies in runs."""
    if len(runs) == 1:
        put_(runs[0], indices, values)
        return
    new = _bits(values)
    for run, chosen, places in _by_run(runs, indices.numpy()):
        _put(_bits(run), places, new[chosen])
    written(*runs)


def take_from_runs(runs: Sequence[Tensor], indices: Tensor) -> Tensor:
    """``x[indices]``, where x lies in runs."""
    taken = torch.empty(len(indices), dtype=runs[0].dtype, device="cpu")
    bits = _bits(taken)
    for run, chosen, places in _by_run(runs, indices.numpy()):
        bits[chosen] = _bits(run)[places]
    return taken


def _by_run(
    runs: Sequence[Tensor], indices: NDArray[np.int64]
) -> Iterator[tuple[Tensor, slice | NDArray[np.int64], NDArray[np.int64]]]:
    """Of each run that some indices fall into: it, which ones these are, and where they lie in it."""
    starts = np.cumsum([0, *(len(run) for run in runs)])
    if indices.size and not 0 <= indices.min() <= indices.max() < starts[-1]:
        raise IndexError(f"an index is outside of a vector of {starts[-1]}")
    order = None if (indices[1:] >= indices[:-1]).all() else indices.argsort(kind="stable")
    ordered = indices if order is None else indices[order]
    ends = np.searchsorted(ordered, starts)
    for run, start, first, last in zip(runs, starts, ends, ends[1:], strict=False):
        if first < last:
            chosen = slice(first, last)
            yield run, chosen if order is None else order[chosen], ordered[chosen] - start


def _plain_places(places: NDArray[Any]) -> bool:
    """Whether the library can read these indices."""
    return places.dtype == np.int64 and places.ndim == 1 and places.flags.c_contiguous


def written(*tensors: Tensor) -> None:
    """Let torch count that these were written to, past it."""
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def distinct(indices: Tensor, padding: int) -> Tensor:
    """Ascending different values below ``padding``."""
    ordered = np.sort(indices.numpy())
    first = np.empty(ordered.shape, dtype=bool)
    first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    first &= ordered < padding
    return torch.from_numpy(ordered[first])


def unite(keys: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ascending different coordinates below ``padding`` of keys ``coordinate, 1 bit, 20 bits``."""
    ordered = np.sort(keys.numpy())
    ordered = ordered[: np.searchsorted(ordered, padding << 21)]
    coordinates = ordered >> 21
    starts = np.flatnonzero(np.concatenate([[True], coordinates[1:] != coordinates[:-1]])[: ordered.size])
    levels = ordered & 0xFFFFF
    if starts.size:
        levels = np.maximum.reduceat(levels, starts)
    spare = (ordered[starts] >> 20 & 1).astype(bool)  # the lowest key of each coordinate comes first
    union = torch.from_numpy(coordinates[starts])
    return union, torch.from_numpy(spare), torch.from_numpy(levels), torch.tensor(starts.size, device="cpu")


def expand(words: Tensor, slots: int, blocks: int, padding: int) -> Tensor:
    """Coordinates from 16-bit offsets: each block's first coordinate, as often as it has offsets, and these."""
    rows = np.ascontiguousarray(words.numpy().reshape(-1, words.shape[-1]))
    made = np.empty((len(rows), slots), dtype=np.int64)
    firsts = np.arange(blocks + 1) << 16
    for row, places in zip(rows, made, strict=True):
        low, high = row[blocks:] & 0xFFFF, row[blocks:] >> 16 & 0xFFFF
        high += low >> 15  # what the first of the two had borrowed, where it is negative as a 16-bit integer
        high &= 0xFFFF
        counts = np.diff(row[:blocks], prepend=0, append=slots)
        places[:] = np.repeat(firsts, counts)
        places[0::2] += low[: (slots + 1) // 2]
        places[1::2] += high[: slots // 2]
    np.minimum(made, padding, out=made)
    return torch.from_numpy(made.reshape(*words.shape[:-1], slots))


def locate(ordered: Tensor, values: Tensor) -> Tensor:
    """Positions of ascending values in an ascending tensor that holds them."""
    return torch.from_numpy(np.searchsorted(ordered.numpy(), values.numpy()))


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def add_up(parts: Sequence[tuple[Tensor, Tensor]], padding: int) -> tuple[Tensor, Tensor]:
    """Ascending different coordinates below ``padding``, and the sums of their values in the order of the parts.

    One sort of ``coordinate, place`` brings what belongs together side by side, in the order of the parts; looking each
    coordinate up in the union takes several times longer.
    """
    coordinates = np.concatenate([indices.numpy() for indices, _ in parts])
    values = np.concatenate([part.numpy() for _, part in parts])
    if compiled := _compiled(values):
        made = compiled.add_up(coordinates, values, np.array([len(part) for part, _ in parts]), padding)
        if made is not None:
            return torch.from_numpy(made[0]), torch.from_numpy(made[1])
    keys = coordinates << 32
    keys |= np.arange(keys.size)
    keys.sort()
    keys = keys[: np.searchsorted(keys, padding << 32)]
    ordered = keys >> 32
    values = values[keys & 0xFFFFFFFF]
    first = np.empty(ordered.size, dtype=bool)
    first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    totals = values[starts] + values.dtype.type(0)  # as every sum begins: -0 becomes 0
    repeated = np.flatnonzero(np.diff(starts, append=ordered.size) > 1)
    ends = np.append(starts[1:], ordered.size)
    place = 1
    while repeated.size:
        totals[repeated] += values[starts[repeated] + place]
        place += 1
        repeated = repeated[starts[repeated] + place < ends[repeated]]
    return torch.from_numpy(ordered[starts]), torch.from_numpy(totals)


def _above(values: NDArray[np.floating], bound: np.floating) -> Found:
    """What of a vector reaches a bound, with magnitudes."""
    if compiled := _compiled(values):
        return compiled.above(values[None], float(bound))
    indices: list[NDArray[np.int32]] = []
    found: list[NDArray[np.floating]] = []
    for start in range(0, values.size, CHUNK):
        magnitudes, mask = _magnitudes(values[start : start + CHUNK])
        np.greater_equal(magnitudes, bound, out=mask)
        hits = np.flatnonzero(mask)
        if hits.size:
            found.append(magnitudes.take(hits))  # a boolean index takes ten times as long
            hits += start
            indices.append(hits.astype(np.int32))
    return _joined(indices, np.dtype(np.int32)), _joined(found, values.dtype)


def _above_in_blocks(whole: NDArray[np.floating], rest: NDArray[np.floating], bound: np.floating) -> Found:
    """As :func:`_above`, of the rows of a matrix, one after another, and of what follows them."""
    compiled = whole.strides[1] == whole.itemsize and _compiled(rest)
    if compiled:
        first, more = compiled.above(whole, float(bound)), compiled.above(rest[None], float(bound))
        return np.concatenate([first[0], more[0] + np.int32(whole.size)]), np.concatenate([first[1], more[1]])
    rounds, block = whole.shape
    rows = max(1, CHUNK // block)
    parts = [whole[row : row + rows] for row in range(0, rounds, rows)] if block <= CHUNK else [*whole]
    indices: list[NDArray[np.int32]] = []
    found: list[NDArray[np.floating]] = []
    start = 0
    for part in [*parts, rest]:
        if block <= CHUNK:
            magnitudes, mask = _magnitudes(part)
            hits = np.flatnonzero(np.greater_equal(magnitudes, bound, out=mask))
            places, reached = hits.astype(np.int32), magnitudes.take(hits)
        else:
            places, reached = _above(part, bound)
        places += start
        indices.append(places)
        found.append(reached)
        start += part.size
    return np.concatenate(indices), np.concatenate(found)


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
        known = _above(values, _bound_from(sample, k / values.size, stride))
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
    if compiled := _compiled(magnitudes):
        made = compiled.largest(known, k, 0, 0, 1, more if more < magnitudes.size else k)
        assert made is not None
        return made[0], made[2] if more < magnitudes.size else MARGIN * made[2]
    keep, reached = _best(magnitudes, k, more)
    return indices[keep].astype(np.int64), reached


def _more(k: int) -> int:
    """How many the next step should find, for k picks."""
    return math.ceil(NEXT * k) + 64


def _best(magnitudes: NDArray[np.floating], k: int, more: int) -> tuple[NDArray[np.integer], float]:
    """Places of the k largest, ascending, of equal ones the first; and the magnitude that ``more`` of them reach.

    Where there are fewer than ``more``, somewhat less than that of the k-th.
    """
    count = magnitudes.size
    ranks = (count - k,) if more >= count else (count - more, count - k)
    ordered = np.partition(magnitudes, ranks)
    kth = ordered[count - k]
    keep = np.flatnonzero(magnitudes >= kth)
    if keep.size > k:  # of those that are equal to the k-th, the last ones are too many
        equal = np.flatnonzero(magnitudes[keep] == kth)
        keep = np.delete(keep, equal[k - keep.size :])
    return keep, float(ordered[ranks[0]]) if more < count else MARGIN * float(kth)


def _descending(magnitudes: NDArray[np.floating]) -> NDArray[np.int64]:
    """Stable order from the largest on.

    The bits of a non-negative float32 order like the number; with the position below them one sort of integers does,
    which takes a tenth of a stable argsort.
    """
    if magnitudes.dtype != np.float32:
        return np.argsort(-magnitudes, kind="stable")
    keys = (~magnitudes.view(np.uint32)).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(magnitudes.size, dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _bound_from(sample: NDArray[np.floating], share: float, stride: int) -> np.floating:
    """A magnitude that a share of all very probably reaches, from a sample of magnitudes; 0 from all or few of them."""
    rank = math.ceil(sample.size * share * 1.3 + 4 * math.sqrt(sample.size * share) + 1)
    if stride == 1 or rank >= sample.size:
        return sample.dtype.type(0)
    bound: np.floating = np.partition(sample, sample.size - rank)[sample.size - rank]
    return bound


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def _lowest(dtype: np.dtype[np.floating], threshold: float) -> np.floating:
    """The threshold in this precision, raised above zero."""
    lowest: np.floating = max(dtype.type(threshold), np.finfo(dtype).smallest_normal)
    return lowest


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _moments(values: NDArray[np.floating]) -> tuple[float, float]:
    total, squares = _Sum(), _Sum()
    for start in range(0, values.size, CHUNK):
        chunk = values[start : start + CHUNK]
        wide = _buffer("wide", np.dtype(np.float64))[: chunk.size]
        np.copyto(wide, chunk)
        total.add(wide)
        np.multiply(wide, wide, out=wide)
        squares.add(wide)
    return total.value(), squares.value()


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _sum_and_maximum(values: NDArray[np.floating]) -> tuple[float, float]:
    """Of magnitudes."""
    total, largest = _Sum(), 0.0
    for start in range(0, values.size, CHUNK):
        magnitudes, _ = _magnitudes(values[start : start + CHUNK])
        largest = max(largest, float(magnitudes.max()))
        wide = _buffer("wide", np.dtype(np.float64))[: magnitudes.size]
        np.copyto(wide, magnitudes)
        total.add(wide)
    return total.value(), largest


class _Sum:
    """A sum of float64 vectors, in an order that compiled code can follow."""

    def __init__(self) -> None:
        self._lanes = np.zeros(LANES)

    def add(self, values: NDArray[np.float64]) -> None:
        """All elements of a vector of at most a chunk."""
        whole = values.size // LANES
        if whole:
            self._lanes += np.add.reduce(values[: whole * LANES].reshape(whole, LANES), axis=0)
        rest = values[whole * LANES :]
        self._lanes[: rest.size] += rest

    def value(self) -> float:
        """The sum."""
        lanes = self._lanes
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        return float(lanes[0])


def _magnitudes(chunk: NDArray[np.floating]) -> tuple[NDArray[np.floating], NDArray[np.bool_]]:
    """The magnitudes of at most a chunk, one after another, and as many places for flags; in buffers of this thread."""
    magnitudes = _buffer("magnitudes", chunk.dtype)[: chunk.size]
    np.abs(chunk, out=magnitudes.reshape(chunk.shape))
    return magnitudes, _buffer("mask", np.dtype(bool))[: chunk.size]


def _buffer(use: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    buffers: dict[str, NDArray[Any]] = _buffers.__dict__
    key = dtype.char + use
    if key not in buffers:
        buffers[key] = np.empty(CHUNK, dtype=dtype)
    return buffers[key]


def _joined(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _compiled(first: NDArray[Any], *others: NDArray[Any]) -> native.Native | None:
    """The compiled kernels, where there are some for these vectors."""
    if native.library is None or first.dtype != np.float32 or not first.flags.c_contiguous:
        return None
    if any(x.dtype not in native.KINDS or not x.flags.c_contiguous for x in others):
        return None
    return native.library


def _bits(x: Tensor) -> NDArray[Any]:
    """A view of a vector; bfloat16, which numpy does not know, as integers."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()
