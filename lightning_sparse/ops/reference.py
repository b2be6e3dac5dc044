"""Plain operations of torch, which say what every op gives: used where neither C nor Triton takes the tensors.

Any device and dtype. Results have a fixed size, slots without a pick hold the padding index, and no operation makes the
host wait for a device: there is no ``nonzero``, ``unique``, boolean indexing or ``.item()``. A test runs this file on
meta tensors, where each of them raises. On the CPU, where the host knows all sizes, ``host.py`` cuts off the padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.layout import InRuns, Span

ROW = 1 << 12
"""Elements that are summed in their own precision."""
PIECE = 1 << 24
"""Elements worked on at once: of float32, 64 MiB for each vector that is only needed on the way."""
CHUNK = 1 << 18
"""The same on the CPU: few enough to stay in cache, and so many that what Python does for each hardly counts."""


class Weights(NamedTuple):
    """Numbers by which :func:`.ops.weigh_` forms residuals, second moments and scores."""

    units: Tensor
    """(3,) float64 ``take``, ``carry`` and ``keep``: factors of gradient, residual and second moment."""
    power: Tensor
    """() float64 ``beta2^t``, with t the number of the step from 1."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Adam's."""
    damping: float
    """Factor of a sum before its square is added to the second moment, a number of float32."""


def static_shapes(device: torch.device) -> bool:
    """True if results on this device have a size that the host knows beforehand (everywhere but on the CPU)."""
    return device.type != "cpu"


def at_once(device: torch.device) -> int:
    """Return how many elements to work on at once, at most."""
    return PIECE if static_shapes(device) else CHUNK


def pieces(runs: Sequence[Tensor], vectors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Cut a gradient that lies in runs, and vectors as long as all of it, into pieces to work on."""
    lengths, size = [len(run) for run in runs], at_once(runs[0].device)
    for parts in zip(runs, *(torch.split(x, lengths) for x in vectors), strict=True):
        yield from zip(*(torch.split(part, size) for part in parts), strict=True)


def accumulate_(acc: Tensor, runs: Sequence[Tensor], decay: float) -> Tensor:
    """``acc = decay * acc + grad`` where that is finite; () whether all was. See :func:`.ops.accumulate_`."""
    finite = []
    for given, kept in pieces(runs, [acc]):
        # Each rounded by itself, as kernels do; alpha= may round once.
        formed = torch.add(given, kept) if decay == 1 else torch.mul(kept, decay).add_(given)
        finite.append(advance_([kept], [formed]))
    return reduce(torch.logical_and, finite)


def weigh_(acc: Tensor, second: Tensor, score: Tensor | InRuns, runs: Sequence[Tensor], by: Weights) -> Tensor:
    """Form residual, second moment and score; () whether the new acc was finite. See :func:`.ops.weigh_`."""
    take, carry, keep = by.units.to(acc.dtype).unbind()
    start, most, finite = (1 - by.power).sqrt(), torch.finfo(acc.dtype).max, []
    # Made once: memory that the system gives anew costs more than the operations.
    room = acc.new_empty(3, min(at_once(acc.device), acc.numel()))
    lengths = [len(run) for run in runs]
    places = score.runs if isinstance(score, InRuns) else torch.split(score, lengths)
    parts = zip(runs, torch.split(acc, lengths), torch.split(second, lengths), places, strict=True)
    for run, residual, moments, scores in (piece for part in parts for piece in pieces(part[:1], part[1:])):
        a, v, within = room[:, : len(run)]
        g = (run * take.to(run.dtype)).to(acc.dtype)
        torch.mul(residual, carry, out=a).add_(g)
        torch.mul(g, 1 - by.beta2, out=within).mul_(g)  # each operation rounded by itself, as in C
        torch.mul(moments, keep, out=v).add_(within).clamp_(max=most)  # squares overflow where gradients do not
        finite.append(advance_([residual, moments], [a, v], judged=[a]))
        torch.mul(residual, start * by.damping, out=within).square_().add_(moments).clamp_(max=most)
        within = sqrt_(sqrt_(within).add_(by.eps * start))
        torch.div(residual, within, out=scores)  # last, since it may take the gradient's place
    return reduce(torch.logical_and, finite)


def part_(away: Tensor, score: Tensor | None, agreed: Tensor, pushed: Tensor | None, runs: Sequence[Tensor]) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.part_`, and collect nothing."""
    for run, of_agreed, out in pieces(runs, [agreed, away]):
        torch.sub(of_agreed, run, out=out)
    if score is not None and pushed is not None:
        torch.mul(away, pushed, out=score)
    return all_finite(away)


def advance_(vectors: Sequence[Tensor], values: Sequence[Tensor], judged: Sequence[Tensor] = ()) -> Tensor:
    """Replace vectors by values at the coordinates where all values are finite.

    Args:
        vectors: of one length, changed in place.
        values: one for each vector, of its dtype.
        judged: those of the values that may not be finite, if the others are wherever these are.

    Returns:
        () bool: True if all values are finite.

    Example:
        >>> momentum, residual = torch.zeros(2, 2).unbind()
        >>> advance_([momentum, residual], [torch.tensor([1.0, 2.0]), torch.tensor([3.0, torch.inf])])
        tensor(False)
        >>> momentum, residual
        (tensor([1., 0.]), tensor([3., 0.]))
    """
    judged = judged or values
    # Flags take much longer on a CPU; a sum that overflows only leads to them.
    if not static_shapes(vectors[0].device) and all(math.isfinite(value.sum()) for value in judged):
        for vector, value in zip(vectors, values, strict=True):
            vector.copy_(value)
        return torch.ones((), dtype=torch.bool, device="cpu")
    finite = reduce(torch.logical_and, [value.abs() < math.inf for value in judged])
    for vector, value in zip(vectors, values, strict=True):
        torch.where(finite, value, vector, out=vector)
    return finite.all()


def sqrt_(x: Tensor) -> Tensor:
    """Take roots in place, rounded alike on all processors: those of torch on CPUs may differ in the last bit."""
    if x.device.type != "cpu":
        return x.sqrt_()
    np.sqrt(x.numpy(), out=x.numpy())
    return x


def all_finite(x: Tensor) -> Tensor:
    """() bool: no NaN and no infinity in x, of any shape. One pass, nothing allocated; True for an empty x."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = torch.aminmax(x)  # both NaN where any of x is
    return torch.maximum(-low, high) < math.inf


def top_k(x: Tensor, k: int) -> Tensor:
    """Ascending coordinates of the k largest magnitudes."""
    return strongest(x, k)[1].sort().values


def strongest(x: Tensor, k: int, left_out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest magnitudes, in descending order, and their places.

    Args:
        x: (c,) values, which may lie apart: a pass over them then reads what lies between, too.
        k: how many.
        left_out: (c,) bool: elements that come last, with a magnitude of -1.
    """
    magnitudes = x.abs()
    if left_out is not None:
        magnitudes.masked_fill_(left_out, -1)
    top = torch.topk(magnitudes, k)
    return top.values, top.indices


def largest(x: Tensor, k: int, span: Span | None = None) -> tuple[Tensor, Tensor]:
    """Coordinates of largest magnitude in a range, and their magnitudes, in descending order of magnitude.

    Args:
        x: (numel,) finite values.
        k: how many, at least 1.
        span: range to look at; None: everything.

    Returns:
        indices: int64, and magnitudes, both (min(k, numel),); missing ones are the padding index ``numel`` with
        magnitude -1.
    """
    k = min(k, x.numel())
    if span is None:
        magnitudes, indices = strongest(x, k)
        return indices.masked_fill(~(magnitudes >= 0), x.numel()), magnitudes
    if isinstance(span[0], int) and isinstance(span[1], int):
        inside = x[span[0] : span[1]]
        length = min(k, inside.numel())
        indices, magnitudes = largest(inside, length, None) if length else (inside[:0].long(), inside[:0])
        indices = torch.where(indices < inside.numel(), indices + span[0], x.numel())
        missing = k - length
        return torch.cat([indices, indices.new_full((missing,), x.numel())]), torch.cat(
            [magnitudes, magnitudes.new_full((missing,), -1)]
        )
    magnitudes = x.abs()
    magnitudes.masked_fill_(~_inside(x, span), -1)
    top = torch.topk(magnitudes, k, sorted=True)
    return torch.where(top.values >= 0, top.indices, x.numel()), top.values


def above(x: Tensor, threshold: Tensor, span: Span | None, capacity: int, phase: int) -> tuple[Tensor, Tensor]:
    """Ascending coordinates, at most ``capacity`` of them, see :func:`spread`."""
    if span is not None and all(isinstance(end, int) for end in span):
        first, last = map(int, span)
        if last <= first:
            return torch.full((capacity,), x.numel(), device=x.device), torch.zeros(
                (), dtype=torch.int64, device=x.device
            )
        indices, count = above(x[first:last], threshold, None, capacity, phase)
        return torch.where(indices < last - first, indices + first, x.numel()), count
    mask = x.abs() >= threshold
    if span is not None:
        mask &= _inside(x, span)
    ordinals = mask.cumsum(0, dtype=torch.int32)  # the n-th candidate is the first place where this reaches n
    total = ordinals[-1].long()
    wanted = spread(total, capacity, phase).clamp_(max=2**31 - 1).int()
    indices = torch.searchsorted(ordinals, wanted)  # numel, the padding index, where there is no such candidate
    return indices, total.clamp(max=capacity)


def spread(total: Tensor, slots: int, phase: int) -> Tensor:
    """Which ones of ``total`` things in a row get a slot: all, or as many as there are slots, evenly spread.

    Of ``total > c`` things for c slots, slot s (from 0) holds the one of ordinal
    ``ceil(((s + 1) total - phase mod total) / c)``: every part of the row loses the same share. Cutting off at c would
    starve its end for ever.

    Args:
        total: () or (..., 1) int64.
        slots: c.
        phase: rotates which ones are left out.

    Returns:
        (..., c) int64 ordinals, ascending from 1; above ``total`` where there are more slots than things.

    Example:
        >>> spread(torch.tensor(6), 2, phase=0).tolist(), spread(torch.tensor(1), 2, phase=0).tolist()
        ([3, 6], [1, 2])
    """
    slot = torch.arange(1, slots + 1, device=total.device)
    shift = torch.remainder(torch.full_like(total, phase), total.clamp(min=1))
    return torch.where(total > slots, (slot * total - shift + slots - 1) // slots, slot)


def excess(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number, sum and sum of squares of what magnitudes have beyond a threshold; zeros are left out.

    Args:
        x: (numel,) finite values.
        threshold: () float64 magnitude, at least 0, compared in x's precision.

    Returns:
        Of ``z = |x| - threshold`` over the x with ``x != 0`` and ``|x| >= threshold``: their number, ``sum z`` and
        ``sum z ** 2``, each () float64, summed in float64.
    """
    found, least = [], threshold.clamp(min=torch.finfo(x.dtype).tiny)
    for part in torch.split(x, at_once(x.device)):
        magnitudes = part.abs()
        beyond = (magnitudes.double() - threshold).clamp_(min=0)
        found.append(((magnitudes >= least).sum().double(), beyond.sum(), beyond.dot(beyond)))
    number, total, squares = (_in_all(parts) for parts in zip(*found, strict=True))
    return number, total, squares


def _in_all(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of () numbers: whole vectors in a wider dtype take many times as long as their parts."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum()


def log_sum(x: Tensor) -> Tensor:
    """Sum of ``ln |x|`` over the x that are not zero."""
    found = []
    for part in torch.split(x, at_once(x.device)):
        magnitudes = part.abs()
        counted = torch.where(magnitudes < torch.finfo(x.dtype).tiny, 1, magnitudes)
        found.append(counted.log().sum(dtype=torch.float64))
    return _in_all(found)


def distinct(indices: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Ascending different coordinates first, the padding index in the slots that are left."""
    union, count, _, _ = united(indices, None, None, padding, None, None, 0)
    return union, count


def united(
    indices: Tensor,
    spare: Tensor | None,
    levels: Tensor | None,
    padding: int,
    total: int | None,
    limit: int | None,
    phase: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The union of picks in slots of a number that the host knows.

    Args:
        indices: (c,) int32 or int64 coordinates of all ranks, and maybe the padding index.
        spare: (c,) bool: picks that are left out first where there are too many; None: none.
        levels: (c,) integers at least 0; None: all 0.
        padding: the padding index.
        total: there are not more different coordinates than this; None: unknown.
        limit: more than this are thinned to it: those that :func:`spread` names, first of the
            coordinates that some rank did not call spare, then of the others. None: there is no limit.
        phase: rotates which ones are left out.

    Returns:
        indices: (u,) int64, the different coordinates that are left, ascending, then padding; u is c, or the smaller
        one of total and limit. Their number, and that of all different ones: () int64. And for each the largest
        level, (u,); behind the number they have no meaning.
    """
    slots, keys = indices.numel(), indices
    # Sorting takes a pass over keys and places for each byte of a key.
    keys = keys.int() if (padding if spare is None else 2 * padding + 1) < 2**31 else keys.long()
    keys, order = torch.sort(keys if spare is None else torch.add(spare, keys, alpha=2))
    coordinates = keys if spare is None else keys >> 1
    first = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(coordinates[1:], coordinates[:-1], out=first[1:])
    kept = first & (coordinates < padding)
    if limit is None or limit >= slots:
        ordinals = kept.cumsum(0)
        named, size = ordinals[-1], min(slots, total or slots)
    else:
        if spare is None:
            rows = kept.unsqueeze(0)
        else:  # of equal coordinates, those that are not spare come first
            spares = kept & (keys & 1).bool()
            rows = torch.stack([kept ^ spares, spares])
        kept, named = thinned(rows, limit, phase)
        ordinals, size = kept.cumsum(0), limit
    chosen = torch.searchsorted(ordinals, torch.arange(1, size + 1, device=keys.device))
    # Slots that are left take the padding index from the slot behind the picks.
    union = torch.cat([coordinates, coordinates.new_full((1,), padding)])[chosen].long()
    if levels is None:
        return union, ordinals[-1], named, torch.zeros_like(union)
    runs = first.cumsum(0) - 1
    largest = levels.new_zeros(slots).scatter_reduce_(0, runs, levels[order], "amax")
    return union, ordinals[-1], named, largest[runs[chosen.clamp(max=slots - 1)]]


def thinned(rows: Tensor, limit: int, phase: int) -> tuple[Tensor, Tensor]:
    """Return the part that :func:`spread` leaves of each of (1 or 2, c) rows, the second in the room that is left.

    Returns:
        (c,) bool: what is left of any row; and () how many there were.
    """
    ordinals = rows.cumsum(1)
    totals = ordinals[:, -1:]
    room = totals[:1].clamp(max=limit)
    if len(rows) > 1:
        room = torch.cat([room, torch.minimum(totals[1:], limit - room)])
    left = rows & (torch.remainder(ordinals * room + phase, totals.clamp(min=1)) < room)
    return left.any(0), totals.sum()


def add_up(parts: Sequence[tuple[Tensor, Tensor]], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Different coordinates, ascending, then padding, and the sums of their values in the order of the parts."""
    indices = torch.cat([indices for indices, _ in parts])
    union, count = distinct(indices, padding)
    return union, sums_at(union, indices, [values for _, values in parts], padding), count


def sums_at(union: Tensor, indices: Tensor, parts: Sequence[Tensor], padding: int) -> Tensor:
    """The sums of values in the order of the parts, at a union that holds all coordinates but for the padding index."""
    # One more slot: padding finds a place even where the union has none.
    slots = torch.cat([union, union.new_full((1,), padding)])
    totals = parts[0].new_zeros(slots.shape)
    places = torch.split(torch.searchsorted(slots, indices), [len(values) for values in parts])
    for place, values in zip(places, parts, strict=True):  # one after the other: sums are formed in this order
        totals.index_add_(0, place, values)
    return totals[:-1]


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of (numel,) finite values, () float64 each; on the CPU of sums in float64."""
    if static_shapes(x.device):
        return x.mean().double(), x.std(correction=min(1, x.numel() - 1)).double()
    parts = torch.split(x, at_once(x.device))
    mean = _in_all([part.sum(dtype=torch.float64) for part in parts]) / x.numel()
    squares = _in_all([(part.double() - mean).square().sum() for part in parts])
    return mean, (squares / max(1, x.numel() - 1)).sqrt()


def norm(x: Tensor) -> Tensor:
    """Euclidean norm; torch makes a copy in float64 on the way."""
    return torch.linalg.vector_norm(x, dtype=torch.float64)  # type: ignore[no-any-return]


def mean_and_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and maximum of magnitudes of (numel,) finite values, () float64 each; sums of rows are added in float64."""
    if static_shapes(x.device):
        whole = x.numel() // ROW * ROW
        rows = torch.linalg.vector_norm(x[:whole].view(-1, ROW), 1, dim=1)
        total = rows.double().sum() + torch.linalg.vector_norm(x[whole:], 1).double()
    else:
        total = _in_all([part.double().abs().sum() for part in torch.split(x, at_once(x.device))])
    low, high = torch.aminmax(x)
    largest = torch.maximum(-low, high).double()
    return torch.minimum(total / x.numel(), largest), largest  # also where the sum overflows


def scatter_(x: Tensor, indices: Tensor | None, values: Tensor, skipped: Tensor) -> None:
    """``x = 0``, and ``x[indices] = values``; NaN everywhere if the flag is set.

    Args:
        x: (numel,) or (numel + 1,), overwritten; what a spare slot holds afterwards is not defined.
        indices: (u,) int64 coordinates, and maybe the padding index, whose values are 0; None: all in order.
        values: (u,) in x's dtype; where a coordinate is repeated, so is its value.
        skipped: () bool.
    """
    if indices is None:  # a product, unlike a sum, leaves the sign of zero
        torch.mul(values, torch.where(skipped, torch.nan, 1.0).to(values.dtype), out=x[: values.numel()])
        return
    x.copy_(torch.where(skipped, torch.nan, 0.0))
    values = values.masked_fill(skipped, torch.nan)
    # There may be no spare slot. Padding then goes where some value goes, with that value; or to the end, with its own.
    place, first = indices.min(0)
    no_pick = indices >= x.numel()
    value = values.index_select(0, first.view(1))
    places = torch.where(no_pick, place.clamp(max=x.numel() - 1), indices)
    x.index_copy_(0, places, torch.where(no_pick, value, values))


def subtract_at_(x: Tensor, indices: Tensor, values: Tensor | None) -> None:
    """Let values leave a vector with a spare slot, see :func:`.ops.subtract_at_`."""
    indices = indices.long()
    if values is None:
        x.index_fill_(0, indices, 0.0)
        return
    # Not index_add_: a repeated coordinate must count once.
    x.index_copy_(0, indices, x[indices].sub_(values))
    x[-1:].zero_()


def top_k_and_stripe(
    x: Tensor, share: int, spare: Tensor, turn: int, n: int, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates, which ones are of the stripe, and their number, see :func:`.ops.top_k_and_stripe`."""
    numel, room = x.numel(), slots - share
    first = strongest(x, share)[1] if share else torch.empty(0, dtype=torch.int64, device=x.device)
    stripe = x[turn::n]
    owned = stripe.numel()
    taken = torch.zeros(owned + 1, dtype=torch.bool, device=x.device)  # one more slot for indices of other stripes
    taken.index_fill_(0, torch.where(first % n == turn, first // n, owned), True)
    magnitudes, places = strongest(stripe, min(room, owned), taken[:owned])
    left_out = (torch.arange(places.numel(), device=x.device) >= spare) | (magnitudes < 0)
    others = torch.where(left_out, 2 * numel, places * (2 * n) + (2 * turn + 1))
    keys = torch.cat([2 * first, others, first.new_full((room - others.numel(),), 2 * numel)])
    keys = keys.int().sort().values.long() if 2 * numel < 2**31 else keys.sort().values
    indices = keys >> 1
    return indices, (keys & 1).bool(), (indices < numel).sum()


def divisors(second: Tensor, values: Tensor, power: Tensor, eps: float, damping: float) -> Tensor:
    """Divisors of averages, see :meth:`.SecondMoment.divisors`."""
    waited = values.abs().to(second.dtype).mul_(damping)
    # In a skipped step both may be NaN; a stored NaN would spoil a later gradient of zero.
    within = (second / (1 - power).to(second.dtype)).add_(waited.square()).nan_to_num_(nan=1.0)
    return torch.fmax(sqrt_(within), waited).add_(eps)  # squares overflow and underflow, the bound must not


def as_gradient(
    average: Tensor, dtype: torch.dtype, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The average in the gradient's dtype and scale, and what :func:`.on_device.hand_over_` returns.

    A value beyond the dtype's range is sent as far as the range goes: the step counts, and the rest follows.
    """
    values = average if scale is None else average * scale
    if dtype == average.dtype:
        return values, values if scale is None else values / scale, None, ~all_finite(values)
    limit = torch.finfo(dtype).max
    values = values.clamp(-limit, limit).to(dtype)
    handed = values if scale is None else values.to(average.dtype) / scale
    return values, handed, average - handed, ~all_finite(average)  # values are held in their range


def hand_over_(
    grad: Tensor, indices: Tensor | None, average: Tensor, scale: Tensor | None, cleared: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Put an average into the gradient's place, see :func:`.on_device.hand_over_`."""
    values, handed, rounding, skipped = as_gradient(average, grad.dtype, scale)
    scatter_(grad, indices, values, skipped)
    return handed, rounding, skipped


def _inside(x: Tensor, span: Span) -> Tensor:
    places = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    return (places >= span[0]) & (places < span[1])
