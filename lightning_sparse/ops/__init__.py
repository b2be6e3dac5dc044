"""The passes over whole groups, work on picks, and arithmetic of single numbers, one name each.

Two formulations, chosen by device and equal in what they return up to padding:

- :mod:`~lightning_sparse.ops.host` (CPU): operations of torch, passes in cache-sized chunks, results of exactly the
  size that was found. numpy does, on zero-copy views, what takes torch several times as long: comparing with a bound,
  listing what is set, roots. For float32, functions in C take their place where they have been
  compiled (:mod:`~lightning_sparse.ops.c.native`).
- :mod:`~lightning_sparse.ops.reference` (CUDA and everything else): torch operations of fixed output size, so that
  the host never waits for the device. Slots without a pick hold the padding index. On CUDA, kernels in Triton take
  their place where :mod:`~lightning_sparse.ops.on_cuda` says so.

Names that only one of them has are listed as such in ``__all__``.

Arithmetic of single numbers is written once, too: with Python's numbers on the CPU, with () tensors on a device. There
the host must not wait for a number; here a number takes a tenth of the time of a () tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.core.layout import InRuns, Span
from lightning_sparse.core.step import Candidates, Found
from lightning_sparse.ops import host, on_device, reference
from lightning_sparse.ops.c import native
from lightning_sparse.ops.c.native import Native
from lightning_sparse.ops.host import put_in_runs_, under, unite
from lightning_sparse.ops.reference import (
    Weights,
    advance_,
    all_finite,
    mean_and_maximum,
    moments,
    scatter_,
    spread,
    static_shapes,
    united,
)

__all__ = [
    "Span", "Weights", "compiled", "static_shapes", "zeros",
    "accumulate_", "weigh_", "part_", "advance_", "subtract_at_", "all_finite", "divisors",
    "above", "tail", "top_k", "top_k_of_blocks", "top_k_and_stripe",
    "moments", "mean_and_maximum", "summed",
    "leaders", "reaching_leaders", "ranked_leaders", "pick_leaders",
    "distinct", "add_up", "take", "put_", "pad",
    # of single numbers
    "Flag", "Number", "known", "at_most", "tensor", "functions", "divisor", "either", "lesser", "greater",
    # on the CPU only
    "unite", "under", "put_in_runs_",
    # not on the CPU
    "united", "spread", "scatter_",
]  # fmt: skip

Number = Any
"""() float64 on a device; a Python number on the CPU."""
Flag = Any
"""() bool on a device; a Python bool on the CPU. ``flag is False`` holds only if the host knows it."""


def compiled(device: torch.device, dtype: torch.dtype = torch.float32) -> Native | None:
    """The compiled functions, where there are some for vectors of this device and dtype."""
    return native.library if dtype == torch.float32 and not static_shapes(device) else None


def zeros(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(size,) zeros that many steps will work with; float32 or float64."""
    if static_shapes(device):
        return torch.zeros(size, device=device, dtype=dtype)
    return host.zeros(size, dtype)


def accumulate_(acc: Tensor, runs: Sequence[Tensor], decay: float, candidates: Candidates | None) -> Tensor:
    """``acc = decay * acc + grad``; a coordinate where that is not finite is left as it is.

    With candidates, one pass does this, sets the gradient to zero, and collects candidates; on the CPU without a decay.

    Args:
        acc: (numel,) float32 or float64.
        runs: in which the gradient lies, numel coordinates in order, of the same dtype, or bfloat16 or float16; what
            they hold afterwards is not defined, but for :meth:`Candidates.cleared`.
        decay: of what acc holds.
        candidates: of the group; None: collect none, and leave the gradient as it is.

    Returns:
        () bool on acc's device: whether all of it was finite.

    Example:
        >>> acc = torch.tensor([1.0, 2.0])
        >>> accumulate_(acc, [torch.tensor([3.0, torch.inf])], 1.0, None), acc
        (tensor(False), tensor([4., 2.]))
    """
    if static_shapes(acc.device):
        return on_device.accumulate_(acc, runs, decay, candidates)
    if candidates is None or decay != 1:
        return reference.accumulate_(acc, runs, decay)
    found, finite = host.accumulate(acc, runs, candidates.bound)
    candidates.note(acc, runs, found, finite)
    return torch.tensor(finite, device="cpu")


def weigh_(
    acc: Tensor,
    second: Tensor,
    score: Tensor | InRuns,
    runs: Sequence[Tensor],
    by: Weights,
    candidates: Candidates | None,
) -> Tensor:
    """Form residual, second moment and score of :class:`.SecondMoment`.

    ``acc = carry acc + g`` and ``second = keep second + (1 - beta2) g^2``, at most the largest number, in place; the
    gradient, ``g = take grad``, is rounded to its own precision. A coordinate at which acc would not be finite is left
    as it is in both. Then ``score = acc / sqrt(sqrt(second + (acc s damping)^2) + eps s)`` with ``s = sqrt(1 -
    power)``. One pass does this, and collects candidates of the score.

    Args:
        acc: (numel,) float32 or float64.
        second: the same.
        score: the same, overwritten; the gradient's place, in runs if there are several, or another one.
        runs: in which the gradient lies, of the same dtype, or bfloat16 or float16; what they hold afterwards is not
            defined, but for :meth:`Candidates.cleared`.
        by: numbers.
        candidates: of the group; None: collect none.

    Returns:
        () bool on acc's device: whether all of the new acc was finite.
    """
    if static_shapes(acc.device):
        return on_device.weigh_(acc, second, score, runs, by, candidates)
    candidates = candidates or Candidates()
    found, finite = host.weigh(acc, second, score, runs, by, candidates.bound)
    in_place = isinstance(score, InRuns) or score.data_ptr() == runs[0].data_ptr()
    candidates.note(score, [] if in_place else runs, found, finite)
    return torch.tensor(finite, device="cpu")


def part_(
    away: Tensor,
    score: Tensor | None,
    agreed: Tensor,
    pushed: Tensor | None,
    runs: Sequence[Tensor],
    candidates: Candidates | None,
) -> Tensor:
    """Form the drift of :class:`.Drift`, ``away = agreed - own``, and ``score = away * pushed``.

    On the CPU, one pass does this, and collects candidates of the score, or of the drift where there is none.

    Args:
        away: (numel,) float32 or float64, overwritten.
        score: the same; None: none.
        agreed: the same, weights.
        pushed: the same, sums of gradients; None: none.
        runs: in which a rank's own weights lie, of the same dtype, or bfloat16 or float16.
        candidates: of the group; None: collect none.

    Returns:
        () bool: whether all of the drift is finite. If not, the others are not defined.

    Example:
        >>> agreed, away = torch.tensor([1.0, 2.0]), torch.empty(2)
        >>> part_(away, None, agreed, None, [torch.tensor([0.5, 4.0])], None), away
        (tensor(True), tensor([ 0.5000, -2.0000]))
    """
    if static_shapes(agreed.device):
        return reference.part_(away, score, agreed, pushed, runs)
    candidates = candidates or Candidates()
    found, finite = host.part(away, score, agreed, pushed, runs, candidates.bound)
    candidates.note(away if score is None else score, [], found, finite)
    return torch.tensor(finite, device="cpu")


def divisors(second: Tensor, values: Tensor, power: Tensor, eps: float, damping: float) -> Tensor:
    """Return what averages are divided by, see :meth:`.SecondMoment.divisors`.

    Args:
        second: (u,) float32 or float64, mean second moments at the coordinates of the averages.
        values: (u,) of the same dtype, the averages.
        power: () float64 ``beta2^t``.
        eps: Adam's.
        damping: what averages are multiplied by before their squares are added, a number of float32.
    """
    divide = on_device.divisors if static_shapes(second.device) else reference.divisors
    return divide(second, values, power, eps, damping)


def top_k(x: Tensor | InRuns, k: int, candidates: Candidates | None = None) -> Tensor:
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
        return on_device.top_k(x, k, candidates)
    return host.top_k(x, k, candidates)


def top_k_and_stripe(
    x: Tensor | InRuns, share: int, spare: int | Tensor, turn: int, n: int, candidates: Candidates | None, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates of the largest magnitudes of all, and of the largest others of a stripe.

    Args:
        x: (numel,) finite values.
        share: how many of all, from 0 to numel.
        spare: how many of the coordinates j with ``j mod n == turn``, fewer where there are no more others; a () int64
            tensor on a device.
        turn: which stripe.
        n: number of stripes.
        candidates: of the group, where x is its accumulator or score: they may save a pass.
        slots: of the results.

    Returns:
        indices: (slots,) int64, ascending, then the padding index numel; (slots,) bool, which ones are the stripe's
        others; and count: () int64.

    Example:
        >>> top_k_and_stripe(torch.tensor([1.0, -9, 3, 2, 8, 4]), 2, 1, turn=0, n=2, candidates=None, slots=4)
        (tensor([1, 2, 4, 6]), tensor([False,  True, False, False]), tensor(3))
    """
    if isinstance(spare, Tensor):
        return on_device.top_k_and_stripe(x, share, spare, turn, n, candidates, slots)
    indices, spares = host.top_k_and_stripe(x, share, int(spare), turn, n, candidates)
    picks = torch.tensor(indices.numel(), device="cpu")
    return pad(indices, slots, x.numel()), pad(spares, slots, False), picks


def top_k_of_blocks(x: Tensor, k: int, first: int, block: int, period: int) -> Tensor:
    """Return :func:`top_k` of the coordinates j with ``first <= j mod period < first + block``.

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
    rounds = x.numel() // period
    whole, rest = x[: rounds * period].view(rounds, period), x[rounds * period + first :][:block]
    places = top_k(torch.cat([whole[:, first : first + block].reshape(-1), rest]), k)
    # In the rest, places continue after the last complete round as they do from round to round.
    return places // block * period + first + places % block


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
        return reference.above(x, threshold, span, min(capacity or x.numel(), x.numel()), phase)
    first, last = _on_host(span, x)
    indices = host.above(x, float(threshold), first, last, candidates)
    return indices, torch.tensor(indices.numel(), device="cpu")


def tail(x: Tensor, threshold: Tensor | float) -> Tensor:
    """Something shorter than x that has the same :func:`.reference.excess` over this threshold and higher ones.

    On the CPU the magnitudes that reach the threshold, without zeros, maybe in a buffer that the next call writes to;
    elsewhere x itself, since nobody knows how many these are.

    Args:
        x: (numel,) values.
        threshold: () float64; or a number of Python's.
    """
    return x if static_shapes(x.device) else host.tail(x, float(threshold))


def distinct(indices: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Sort coordinates and drop repetitions.

    Returns:
        indices: int64 ascending, and count: (). On the CPU exactly the different ones without the padding index;
        elsewhere as long as the input, repetitions replaced by the padding index and moved to the end.
    """
    if static_shapes(indices.device):
        return reference.distinct(indices, padding)
    union, count = reference.distinct(pad(indices, indices.numel() + 1, padding), padding)
    return union[:count], count


def pad(x: Tensor, slots: int, value: float) -> Tensor:
    """A vector, lengthened with a value to ``slots`` places.

    Example:
        >>> pad(torch.tensor([3, 5]), 4, 9).tolist()
        [3, 5, 9, 9]
    """
    missing = slots - x.numel()
    return torch.cat([x, x.new_full((missing,), value)]) if missing else x


def add_up(parts: Sequence[tuple[Tensor, Tensor]], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of sparse vectors; each sum is formed from zero in the order of the parts, so that ranks agree on it.

    Args:
        parts: int64 coordinates, different ones within a part but for the padding index, and values of equal length.
        padding: the padding index, below 2**31.

    Returns:
        indices as :func:`distinct`; their sums; and count: () int64.

    Example:
        >>> first = torch.tensor([1, 4]), torch.tensor([0.5, 2.0])
        >>> second = torch.tensor([0, 4]), torch.tensor([1.0, 3.0])
        >>> add_up([first, second], padding=9)
        (tensor([0, 1, 4]), tensor([1.0000, 0.5000, 5.0000]), tensor(3))
    """
    if static_shapes(parts[0][0].device):
        return reference.add_up(parts, padding)
    if (library := compiled(parts[0][1].device, parts[0][1].dtype)) is not None:
        slots = max(indices.numel() for indices, _ in parts)
        rows = [_row(*part, slots) for part in parts]
        if made := library.add_pairs(torch.stack(rows), slots, padding, 1):
            return *made, torch.tensor(made[0].numel(), device="cpu")
    spare = torch.full((1,), padding, device="cpu"), parts[0][1].new_zeros(1)  # the reference needs a slot
    union, totals, count = reference.add_up([*parts, spare], padding)
    return union[:count], totals[:count], count


def _row(indices: Tensor, values: Tensor, slots: int) -> Tensor:
    """Return what :meth:`.Native.add_pairs` takes of a sparse vector."""
    words = [indices.new_full((1,), indices.numel()).int(), pad(indices, slots, 0).int()]
    return torch.cat([*words, pad(values, slots, 0).contiguous().view(torch.int32)])


def take(x: Tensor, indices: Tensor) -> Tensor:
    """``x[indices]`` for a float32 or float64 vector."""
    return x.index_select(0, indices)


def put_(x: Tensor, indices: Tensor, values: Tensor | float) -> None:
    """``x[indices] = values`` for vectors of equal dtypes; where a coordinate is repeated, so is its value."""
    if isinstance(values, Tensor):
        x.index_copy_(0, indices, values)
    else:
        x.index_fill_(0, indices, values)


def subtract_at_(x: Tensor, indices: Tensor, values: Tensor | None) -> None:
    """``x[indices] -= values``.

    Args:
        x: a float32 or float64 vector.
        indices: int64; where a coordinate is repeated, so is its value, which counts once. Where shapes are static,
            equal ones are neighbours, and the padding index is that of the last slot of x, which stays zero.
        values: of x's dtype; None: set what x has there to zero.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> subtract_at_(x, torch.tensor([2, 0, 2]), torch.tensor([0.5, 1.0, 0.5])), x
        (None, tensor([0.0000, 2.0000, 2.5000]))
    """
    if static_shapes(x.device):
        on_device.subtract_at_(x, indices, values)
    else:
        put_(x, indices, 0.0 if values is None else take(x, indices) - values)


def _on_host(span: Span | None, x: Tensor) -> tuple[int, int]:
    return (0, x.numel()) if span is None else (int(span[0]), int(span[1]))


def summed(x: Tensor, threshold: Any, logarithms: bool) -> tuple[Any, Any, Any, Any]:
    """Return :func:`.reference.excess`, and the sum of the logarithms if it is wanted.

    Args:
        x: (numel,) finite values.
        threshold: () float64 on a device, a number on the CPU; 0 if logarithms are wanted.
        logarithms: True: sum up ``ln |x|`` over the x that are not zero, too; else the last result has no meaning.

    Returns:
        Four () float64 on a device; four numbers on the CPU.
    """
    if static_shapes(x.device):
        number, total, squares = reference.excess(x, threshold)
        return number, total, squares, reference.log_sum(x) if logarithms else total
    beyond = map(float, reference.excess(x, tensor(threshold)))
    return (*beyond, float(reference.log_sum(x)) if logarithms else 0.0)  # type: ignore[return-value]  # of four


def leaders(x: Tensor, k: int, span: Span | None = None, candidates: Candidates | None = None) -> Found:
    """Find the k largest magnitudes of a range, and maybe more, for the functions below.

    Args:
        x: (numel,) finite values.
        k: how many, at least 1; fewer if the range is shorter.
        span: range to look at; None: everything.
        candidates: of the group, if x is its accumulator: they may save a pass, if everything is looked at.

    Returns:
        Coordinates and magnitudes. No magnitude that is left out is larger than one of the k.
    """
    if static_shapes(x.device):
        return reference.largest(x, k, span)
    return host.many_of_largest(x, k, _on_host(span, x), candidates)


def reaching_leaders(found: Found, threshold: Tensor | float) -> Any:
    """Count the :func:`leaders` that reach a threshold, a number or () tensor as :func:`summed` returns them."""
    return (found[1] >= threshold).sum() if isinstance(threshold, Tensor) else host.reached(found[1], threshold)


def ranked_leaders(found: Found, positions: Tensor | int) -> Tensor:
    """Return the magnitudes of :func:`leaders` at positions in descending order, from 1.

    Args:
        found: the leaders.
        positions: one, or (p,) int64; at most the k of these.

    Returns:
        () or (p,). Of several, 0 at positions that a range is too short for, and for NaN, that other ranks do not know.
    """
    if static_shapes(found[1].device):
        ranked = found[1][positions - 1]
        return ranked if isinstance(positions, int) else ranked.nan_to_num(0.0).clamp_(min=0)
    ordered = np.append(found[1].new_zeros(1), np.sort(found[1]))
    return torch.as_tensor(ordered[np.maximum(len(ordered) - np.asarray(positions), 0)], device="cpu")


def pick_leaders(found: Found, count: Tensor | int, slots: int, padding: int) -> Tensor:
    """Return the coordinates of the largest :func:`leaders`.

    Args:
        found: the leaders.
        count: how many, a number on the CPU and () on a device; at most the k of these, and at most ``slots``.
        slots: length of the result.
        padding: what fills it up.

    Returns:
        (slots,) int64, ascending, then the padding index.
    """
    if isinstance(count, int):
        return pad(host.largest_of(*found, count), slots, padding)
    indices = found[0][:slots]
    return indices.masked_fill(torch.arange(slots, device=indices.device) >= count, padding).sort().values


def known(x: Tensor) -> Any:
    """Convert a () tensor to a number or bool of Python's on the CPU; leave it as it is on a device."""
    return x if static_shapes(x.device) else x.item()


def at_most(x: Tensor, bound: int) -> int:
    """Return the number in a () tensor on the CPU, and on a device a bound that it does not exceed."""
    return bound if static_shapes(x.device) else int(x)


def tensor(x: Number, dtype: torch.dtype = torch.float64) -> Tensor:
    """Convert a :data:`Number` to a () tensor."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype, device="cpu")


def functions(x: Number) -> Any:
    """Return the module with functions of x: torch for tensors, math for numbers. They share names such as ``log``."""
    return torch if isinstance(x, Tensor) else math


def divisor(x: Number) -> Number:
    """Return x, and 1 in place of a number 0: Python raises where torch gives infinity or NaN."""
    return x if isinstance(x, Tensor) else x or 1.0


def either(flag: Flag, yes: Any, no: Any) -> Any:
    """Return ``yes if flag else no``."""
    return torch.where(flag, yes, no) if isinstance(flag, Tensor) else yes if flag else no


def lesser(x: Number, y: Number) -> Number:
    """Return the smaller number."""
    return torch.clamp(x, max=y) if isinstance(x, Tensor) else min(x, y)


def greater(x: Number, y: Number) -> Number:
    """Return the larger number."""
    return torch.clamp(x, min=y) if isinstance(x, Tensor) else max(x, y)
