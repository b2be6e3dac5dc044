"""The passes over whole groups, one dispatching name each.

Two formulations of every kernel, chosen by device and equal in what they return up to padding:

- :mod:`~lightning_sparse.kernels.host` (CPU): numpy on zero-copy views in cache-sized chunks, results of exactly the
  size that was found.
- :mod:`~lightning_sparse.kernels.static` (CUDA and everything else): torch operations of fixed output size, so that
  the host never waits for the device. Slots without a pick hold the padding index. On CUDA, kernels in Triton take
  their place where :mod:`~lightning_sparse.kernels.on_cuda` says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.candidates import Candidates
from lightning_sparse.kernels import device_flags, device_passes, host, native, static
from lightning_sparse.kernels.host import Weights

Span = tuple[int | Tensor, int | Tensor]
"""First and past-the-end coordinate of a contiguous range; tensors where only the device knows them."""


def static_shapes(device: torch.device) -> bool:
    """True if results on this device have a size that the host knows beforehand (everywhere but on the CPU)."""
    return device.type != "cpu"


def compiled(device: torch.device, dtype: torch.dtype = torch.float32) -> native.Native | None:
    """The compiled functions, where there are some for vectors of this device and dtype."""
    return native.library if dtype == torch.float32 and not static_shapes(device) else None


def accumulate_(
    acc: Tensor, residual: Tensor, runs: Sequence[Tensor], decay: float, candidates: Candidates | None
) -> None:
    """``acc = decay * residual + grad``.

    On the CPU, without a decay, one pass does this, sets the gradient to zero, and collects candidates.

    Args:
        acc: (numel,) float32 or float64, overwritten.
        residual: the same, not written to.
        runs: in which the gradient lies, numel coordinates in order, of the same dtype, or bfloat16 or float16; what
            they hold afterwards is not defined, but for :meth:`Candidates.cleared`.
        decay: of the residual.
        candidates: of the group; None: collect none, and leave the gradient as it is.
    """
    if candidates is None or decay != 1 or static_shapes(acc.device):
        lengths = [len(run) for run in runs]
        for run, kept, target in zip(runs, torch.split(residual, lengths), torch.split(acc, lengths), strict=True):
            if decay == 1:
                torch.add(run, kept, out=target)
            else:  # each rounded by itself, as kernels do; alpha= may round once
                torch.mul(kept, decay, out=target).add_(run)
    else:
        candidates.note(acc, runs, *host.accumulate(acc, residual, runs, candidates.bound))


def weigh_(
    acc: Tensor,
    second: Tensor,
    score: Tensor,
    residual: Tensor,
    now: Tensor,
    runs: Sequence[Tensor],
    by: Weights,
    candidates: Candidates,
) -> None:
    """What :class:`~lightning_sparse.SecondMoment` forms of a gradient, see :func:`.host.weigh`. On the CPU only.

    One pass does this, and collects candidates of the score.
    """
    found, finite = host.weigh(acc, second, score, residual, now, runs, by, candidates.bound)
    cleared = [] if score.data_ptr() == runs[0].data_ptr() else runs
    candidates.note(score, cleared, found, finite, formed=acc)


def largest(x: Tensor, k: int, span: Span | None = None) -> tuple[Tensor, Tensor]:
    """Coordinates of largest magnitude in a range, and their magnitudes, in descending order of magnitude.

    Args:
        x: (numel,) finite values.
        k: how many, at least 1.
        span: range to look at; None: everything.

    Returns:
        indices: int64, and magnitudes, both (min(k, length of the range),) on the CPU and (min(k, numel),) elsewhere,
        where missing ones are the padding index ``numel`` with magnitude -1. Ties: on the CPU the lower index.
    """
    k = min(k, x.numel())
    if static_shapes(x.device):
        return static.largest(x, k, span)
    first, last = _on_host(span, x)
    return host.largest(x, k, first, last)


def many_of_largest(
    x: Tensor, k: int, span: Span | None = None, candidates: Candidates | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest magnitudes of a range, and maybe more, for :func:`largest_of`. On the CPU only.

    Args:
        x: (numel,) finite values.
        k: how many, at least 1; fewer where the range is shorter.
        span: range to look at; None: everything.
        candidates: of the group, where x is its accumulator: they may save a pass, if everything is looked at.

    Returns:
        Ascending int32 coordinates, and magnitudes; no magnitude that is left out is larger than one of the k.
    """
    return host.many_of_largest(x, k, *_on_host(span, x), candidates)


def largest_of(indices: Tensor, magnitudes: Tensor, k: int) -> Tensor:
    """Ascending int64 coordinates of the k largest magnitudes; of equal ones the lower ones. On the CPU only.

    Args:
        indices: (c,) int32, ascending.
        magnitudes: (c,) theirs.
        k: how many, from 0 to c.
    """
    return host.largest_of(indices, magnitudes, k)


def reached(magnitudes: Tensor, threshold: float) -> int:
    """How many magnitudes reach a threshold, compared in their precision. On the CPU only."""
    return host.reached(magnitudes, threshold)


def reaching_of(indices: Tensor, magnitudes: Tensor, threshold: float) -> Tensor:
    """The int32 coordinates whose magnitudes reach a threshold, as int64. On the CPU only."""
    return host.reaching_of(indices, magnitudes, threshold)


def top_k(x: Tensor, k: int, candidates: Candidates | None = None) -> Tensor:
    """Coordinates of the k largest magnitudes, ascending: (min(k, numel),) int64, no padding on any device.

    Args:
        x: (numel,) finite values.
        k: how many, at least 1.
        candidates: of the group, where x is its accumulator: they may save a pass.
    """
    k = min(k, x.numel())
    if k == x.numel():
        return torch.arange(k, device=x.device)
    if static_shapes(x.device):
        return device_passes.top_k(x, k)
    return host.top_k(x, k, candidates)


def strongest(x: Tensor, k: int, left_out: Tensor | None = None, most: int = 0) -> tuple[Tensor, Tensor]:
    """The k largest magnitudes and their places, in descending order, without some elements. Not on the CPU.

    Args:
        x: (c,) finite values, which may lie apart.
        k: how many, from 0 to c.
        left_out: (c,) bool: elements that come last, with a magnitude of -1; None: there are none.
        most: how many elements are left out, at most.
    """
    return static.strongest(x, k, left_out, most)


def top_k_and_stripe(
    x: Tensor, share: int, spare: int, turn: int, n: int, candidates: Candidates | None = None
) -> tuple[Tensor, Tensor]:
    """The largest of all, and the largest others of a stripe. On the CPU only.

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
    return host.top_k_and_stripe(x, share, spare, turn, n, candidates)


def top_k_of_blocks(x: Tensor, k: int, first: int, block: int, period: int) -> Tensor:
    """As :func:`top_k`, of the coordinates j with ``first <= j mod period < first + block``.

    Args:
        x: (numel,) finite values.
        k: how many, at least 1 and at most as many as there are.
        first: where the block lies in each period.
        block: its length.
        period: distance of the blocks.

    Example:
        >>> top_k_of_blocks(torch.tensor([9.0, 1, 2, 9, 3, 4, 9, 5]), 3, first=1, block=2, period=3)
        tensor([4, 5, 7])
    """
    if static_shapes(x.device):
        return static.top_k_of_blocks(x, k, first, block, period)
    return host.top_k_of_blocks(x, k, first, block, period)


def above(
    x: Tensor,
    threshold: Tensor,
    span: Span | None = None,
    *,
    capacity: int | None = None,
    phase: int = 0,
    candidates: Candidates | None = None,
) -> tuple[Tensor, Tensor]:
    """Coordinates whose magnitude reaches a threshold, ascending.

    Args:
        x: (numel,) values. NaN never reaches a threshold.
        threshold: () magnitude, compared in x's precision.
        span: range to look at; None: everything.
        capacity: slots of a static result. When more coordinates qualify they are thinned evenly over the range.
            On the CPU there is no limit and this is ignored.
        phase: rotates which ones an overfull range gives up.
        candidates: of the group, where x is its accumulator: they may save a pass.

    Returns:
        indices: (c,) int64, and count: () int64. On the CPU ``c == count``, elsewhere ``c == capacity``.
    """
    if static_shapes(x.device):
        return device_passes.above(x, threshold, span, min(capacity or x.numel(), x.numel()), phase)
    first, last = _on_host(span, x)
    indices = host.above(x, float(threshold), first, last, candidates)
    return indices, torch.tensor(indices.numel(), device="cpu")


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, () float64 each; infinite or NaN where squares or their sum overflow."""
    return device_passes.moments(x) if static_shapes(x.device) else host.moments(x)


def mean_and_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and maximum of magnitudes, () float64 each, of (numel,) finite values."""
    return device_passes.mean_and_maximum(x) if static_shapes(x.device) else host.mean_and_maximum(x)


def excess(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number, sum and sum of squares of what magnitudes have beyond a threshold; zeros are left out.

    Args:
        x: (numel,) finite values.
        threshold: () float64 magnitude, at least 0, compared in x's precision.

    Returns:
        Of ``z = |x| - threshold`` over the x with ``x != 0`` and ``|x| >= threshold``: their number, ``sum z`` and
        ``sum z ** 2``, each () float64, summed in float64.
    """
    if static_shapes(x.device):
        return device_passes.excess(x, threshold)
    return host.excess(x, float(threshold))


def log_sum(x: Tensor) -> Tensor:
    """() float64: sum of ``ln |x|`` over the x that are not zero."""
    return device_passes.log_sum(x) if static_shapes(x.device) else host.log_sum(x)


def tail(x: Tensor, threshold: Tensor, candidates: Candidates | None = None) -> Tensor:
    """Something shorter than x that has the same :func:`excess` over this threshold and higher ones.

    On the CPU the magnitudes that reach the threshold, without zeros; elsewhere x itself, since nobody knows how many
    these are.

    Args:
        x: (numel,) values.
        threshold: () float64.
        candidates: of the group, where x is its accumulator: they may save a pass.
    """
    return x if static_shapes(x.device) else host.tail(x, float(threshold), candidates)


def distinct(indices: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Sort coordinates and drop repetitions.

    Returns:
        indices: int64 ascending, and count: (). On the CPU exactly the different ones without the padding index;
        elsewhere as long as the input, repetitions replaced by the padding index and moved to the end.
    """
    if static_shapes(indices.device):
        return static.distinct(indices, padding)
    found = host.distinct(indices, padding)
    return found, torch.tensor(found.numel(), device="cpu")


def unite(indices: Tensor, spare: Tensor, levels: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`distinct`, with what was said of each coordinate. On the CPU only, see :func:`united`.

    Args:
        indices: (c,) int64 coordinates below 2**31, and maybe the padding index.
        spare: (c,) bool.
        levels: (c,) int64 in [0, 2**20).
        padding: the padding index.

    Returns:
        indices as :func:`distinct`; for each of them whether ``spare`` was said every time, and the largest level; and
        count: () int64. Behind the count, where there are slots, the two in the middle have no meaning.
    """
    return host.unite(indices << 21 | spare.long() << 20 | levels, padding)


def united(
    indices: Tensor,
    spare: Tensor | None,
    levels: Tensor | None,
    padding: int,
    total: int | None,
    limit: int | None,
    phase: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The union of picks in slots of a number that the host knows. Not on the CPU.

    Args:
        indices: (c,) int32 or int64 coordinates of all ranks, and maybe the padding index.
        spare: (c,) bool: picks that are left out first where there are too many; None: none.
        levels: (c,) integers at least 0; None: all 0.
        padding: the padding index.
        total: there are not more different coordinates than this; None: unknown.
        limit: more than this are thinned to it: those that :func:`thin` keeps, first of the coordinates that some rank
            did not call spare, then of the others. None: there is no limit.
        phase: rotates which ones are left out.

    Returns:
        indices: (u,) int64, the different coordinates that are left, ascending, then padding; u is c, or the smaller
        one of total and limit. Their number, and that of all different ones: () int64. And for each the largest
        level, (u,); behind the number they have no meaning.
    """
    return static.united(indices, spare, levels, padding, total, limit, phase)


def pad(x: Tensor, slots: int, value: float) -> Tensor:
    """A vector, lengthened with a value to ``slots`` places.

    Example:
        >>> pad(torch.tensor([3, 5]), 4, 9).tolist()
        [3, 5, 9, 9]
    """
    missing = slots - x.numel()
    return torch.cat([x, x.new_full((missing,), value)]) if missing else x


def thin(candidates: Tensor, room: Tensor, phase: int) -> Tensor:
    """At most ``room`` of the candidates, evenly spread over them.

    Args:
        candidates: (c,) bool.
        room: () int64, at least 0.
        phase: rotates which ones are given up.

    Returns:
        (c,) bool: all candidates if there is room, else exactly ``room`` of them, those that :func:`spread` names.

    Example:
        >>> thin(torch.ones(6, dtype=torch.bool), torch.tensor(2), phase=0).nonzero().flatten().tolist()
        [2, 5]
        >>> thin(torch.ones(6, dtype=torch.bool), torch.tensor(2), phase=2).nonzero().flatten().tolist()
        [1, 4]
    """
    ordinals = candidates.cumsum(0)
    total = ordinals[-1:].sum()  # of nothing, 0
    room = torch.minimum(room, total)
    return candidates & (torch.remainder(ordinals * room + phase, total.clamp(min=1)) < room)


def spread(total: Tensor, slots: int, phase: int) -> Tensor:
    """Which ones of ``total`` things in a row get a slot: all, or as many as there are slots, evenly spread.

    Of ``total > c`` things for c slots, slot s (from 0) holds the one of ordinal
    ``ceil(((s + 1) total - phase mod total) / c)``: every part of the row loses the same share. Cutting off at c would
    starve its end for ever. These are the ones that :func:`thin` keeps.

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
    return static.spread(total, slots, phase)


def add_up(parts: Sequence[tuple[Tensor, Tensor]], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of sparse vectors; each sum is formed from zero in the order of the parts, so that ranks agree on it.

    Args:
        parts: int64 coordinates, different ones within a part but for the padding index, and values of equal length.
        padding: the padding index, at most 2**31.

    Returns:
        indices as :func:`distinct`; their sums; and count: () int64.

    Example:
        >>> first = torch.tensor([1, 4]), torch.tensor([0.5, 2.0])
        >>> second = torch.tensor([0, 4]), torch.tensor([1.0, 3.0])
        >>> add_up([first, second], padding=9)
        (tensor([0, 1, 4]), tensor([1.0000, 0.5000, 5.0000]), tensor(3))
    """
    if static_shapes(parts[0][0].device):
        return static.add_up(parts, padding)
    union, totals = host.add_up(parts, padding)
    return union, totals, torch.tensor(union.numel(), device="cpu")


def all_finite(x: Tensor, candidates: Candidates | None = None) -> Tensor:
    """() bool: no NaN and no infinity in x. One pass, nothing allocated; True for an empty x.

    Args:
        x: any shape.
        candidates: of the group, where x is its accumulator: they may save the pass.
    """
    known = True if x.numel() == 0 else candidates.all_finite(x) if candidates else None
    if known is None and not static_shapes(x.device):
        known = host.all_finite(x)
    if known is not None:
        return torch.full((), known, device=x.device)
    low, high = torch.aminmax(x)  # both NaN where any of x is
    return torch.maximum(-low, high) < math.inf


def locate(ordered: Tensor, values: Tensor) -> Tensor:
    """int64 positions of ascending values in an ascending tensor that holds each of them; the first of equal ones."""
    return torch.searchsorted(ordered, values) if static_shapes(ordered.device) else host.locate(ordered, values)


def expand(words: Tensor, slots: int, blocks: int, padding: int) -> Tensor:
    """Coordinates from 16-bit offsets in blocks of 65 536. On the CPU only.

    Args:
        words: (..., blocks + (slots + 1) // 2) int32: the slot at which each block ends, ascending; then offsets, two
            in each word, of which the first may have borrowed from the second.
        slots: number of offsets.
        blocks: number of blocks.
        padding: what slots behind the last block hold, and what coordinates are limited to.

    Returns:
        (..., slots) int64.

    Example:
        >>> expand(torch.tensor([1, 2, 7 + (3 << 16)], dtype=torch.int32), slots=2, blocks=2, padding=100_000)
        tensor([    7, 65539])
    """
    return host.expand(words, slots, blocks, padding)


def take(x: Tensor, indices: Tensor) -> Tensor:
    """``x[indices]`` for a float32 or float64 vector."""
    return x[indices] if static_shapes(x.device) else host.take(x, indices)


def under(mask: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """``x[mask]`` for each of some vectors. On the CPU only."""
    return host.under(mask, *vectors)


def put_(x: Tensor, indices: Tensor, values: Tensor | float) -> None:
    """``x[indices] = values`` for vectors of equal dtypes; where a coordinate is repeated, so is its value."""
    if not static_shapes(x.device):
        host.put_(x, indices, values)
    elif isinstance(values, Tensor):
        x.index_copy_(0, indices, values)
    else:
        x.index_fill_(0, indices, values)


def put_in_runs_(runs: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """As :func:`put_`, where x lies in several runs. On the CPU only."""
    host.put_in_runs_(runs, indices, values)


def take_from_runs(runs: Sequence[Tensor], indices: Tensor) -> Tensor:
    """``x[indices]`` where x lies in several runs. On the CPU only."""
    return host.take_from_runs(runs, indices)


def scatter_(x: Tensor, indices: Tensor | None, values: Tensor, void: Tensor) -> None:
    """``x = 0``, and ``x[indices] = values``; NaN everywhere if the flag is set. Not on the CPU.

    Args:
        x: (numel,) or (numel + 1,), overwritten; what a spare slot holds afterwards is not defined.
        indices: (u,) int64 coordinates, and maybe the padding index, whose values are 0; None: all in order.
        values: (u,) in x's dtype; where a coordinate is repeated, so is its value.
        void: () bool.
    """
    static.scatter_(x, indices, values, void)


def fill_if_(x: Tensor, flag: Tensor, value: float) -> Tensor:
    """Fill all of x if the flag is set; the host does not wait for a flag on a device."""
    if not static_shapes(flag.device):
        return x.fill_(value) if flag else x
    return x if device_flags.fill_if_(x, flag, value) else x.masked_fill_(flag, value)


def copy_if_(x: Tensor, source: Tensor, flag: Tensor) -> None:
    """Copy all of a vector if the flag is set; the host does not wait for a flag on a device."""
    if not static_shapes(flag.device):
        x.copy_(source if flag else x)
    elif not device_flags.copy_if_(x, source, flag):
        torch.where(flag, source, x, out=x)


def choose(flag: Tensor, yes: Any, no: Any) -> Any:
    """``yes if flag else no`` for (named) tuples of tensors of equal shapes; what is no tensor is taken from ``no``.

    On the CPU whole objects are chosen and shapes need not be equal.
    """
    if not static_shapes(flag.device):
        return yes if flag else no
    if (chosen := device_flags.choose(flag, yes, no)) is not None:
        return chosen
    if isinstance(no, Tensor) and isinstance(yes, Tensor):
        return torch.where(flag, yes, no)
    if isinstance(no, tuple) and isinstance(yes, tuple):
        parts = [choose(flag, a, b) for a, b in zip(yes, no, strict=True)]
        return type(no)(*parts) if hasattr(no, "_fields") else tuple(parts)
    return no


def _on_host(span: Span | None, x: Tensor) -> tuple[int, int]:
    return (0, x.numel()) if span is None else (int(span[0]), int(span[1]))
