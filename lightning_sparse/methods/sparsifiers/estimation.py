"""Functions that several methods share: a common threshold for all ranks, and the published controller."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from lightning_sparse.core.checks import expect, is_number
from lightning_sparse.core.layout import Span
from lightning_sparse.core.messages import AllGather, Steps
from lightning_sparse.core.step import Candidates, Context, Selection
from lightning_sparse.ops import (
    above,
    at_most,
    known,
    leaders,
    pick_leaders,
    ranked_leaders,
    static_shapes,
    tensor,
    top_k,
)

SHARE_LIMIT = 2
"""Multiple of k/n that a rank sends at most: bounds the padding ratio and the messages."""


CAPACITY = 4
"""Device slots per rank of the published variant, in multiples of k/n."""


def reaching(
    acc: Tensor,
    threshold: Tensor,
    capacity: int,
    phase: int,
    span: Span | None = None,
    candidates: Candidates | None = None,
) -> Selection:
    """Select all coordinates of a range that reach a threshold; the arguments are those of :func:`.ops.above`."""
    indices, count = above(acc, threshold, span, capacity=capacity, phase=phase, candidates=candidates)
    return Selection(indices, count, threshold, aligned=static_shapes(acc.device))


def kth_magnitude(x: Tensor, k: int, candidates: Candidates | None = None) -> Tensor:
    """Return the k-th largest magnitude, () float64."""
    return x[top_k(x, k, candidates)].abs().min().double()


def pick_jointly(acc: Tensor, spans: Tensor, k: int, ctx: Context, own: Span | None = None) -> Steps[Selection]:
    """Select k coordinates in all from disjoint ranges, by one magnitude threshold that all ranks derive together.

    Every rank finds the ``m = min(k, ceil(2 k / n))`` largest magnitudes of its own range and sends a few of them: the
    order statistics at positions 1 .. m in equal steps (8 to 32 numbers, fewer the more ranks there are). From these,
    all ranks estimate the number of coordinates of each range above any threshold, solve for the threshold that k
    coordinates reach in all, and take their own part of the k, largest first. The counts of all ranks are then known,
    so that this message replaces the exchange of sizes.

    The approximation between order statistics affects only the split of the k between ranks; their sum is exactly k
    (or all candidates, if the ranges hold fewer).

    Args:
        acc: (numel,) finite accumulator.
        spans: (n, 2) int64, the range of every rank, disjoint.
        k: coordinates wanted from all ranks together, at least 1.
        ctx: the step.
        own: the range of this rank, if the host knows it.

    Returns:
        The selection of this rank with the common threshold, () float64.
    """
    numel, n = acc.numel(), ctx.world_size
    most = min(k, numel, math.ceil(SHARE_LIMIT * k / n))
    points = min(most, max(8, min(32, 256 // n)))
    grid = (_grid if static_shapes(acc.device) else _kept_grid)(most, points, acc.device)
    first, last = own or spans[ctx.rank]
    found = leaders(acc, most, (first, last))
    received = yield AllGather(ranked_leaders(found, grid))
    sizes = (spans[:, 1] - spans[:, 0]).clamp(max=most)
    shares, threshold = split(received.double(), grid, sizes, k)
    share = known(shares[ctx.rank])
    indices = pick_leaders(found, share, at_most(shares.max(), most), numel)
    return Selection(indices, tensor(share, torch.int64), tensor(threshold), aligned=True, total=min(k, numel))


def _grid(most: int, points: int, device: torch.device) -> Tensor:
    """Return (points,) positions from 1 to ``most`` in equal steps, made on the device: a copy makes the host wait."""
    steps = torch.arange(points, dtype=torch.float64, device=device)
    return (steps * ((most - 1) / max(1, points - 1)) + 1).round_().long()


_kept_grid = lru_cache(maxsize=256)(_grid)


def split(received: Tensor, grid: Tensor, sizes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Split k coordinates between ranks by order statistics of their magnitudes.

    ``N_i(x)``, the number of candidates of rank i that reach x, is known at the order statistics and taken as linear in
    between. The threshold solves ``sum_i N_i(x) = k``; shares are rounded to integers by the largest remainder, the
    lower rank first.

    Args:
        received: (n, p) float64 magnitudes by rank, descending, zero if a rank has no such candidate.
        grid: (p,) positions of the order statistics, ascending from 1.
        sizes: (n,) number of candidates of each rank.
        k: number of coordinates to select.

    Returns:
        shares: (n,) int64, summing to k, or to all candidates if there are fewer; and the threshold.
    """
    grid, zero = grid.double(), received.new_zeros(1)
    knots = torch.cat([zero, received.flatten(), zero + math.inf]).sort().values
    reached = torch.minimum(_reaching(received, grid, knots, zero), sizes.unsqueeze(1))
    knots = knots.clamp(max=knots[-2])  # nothing reaches the last one, which saves a special case if few are wanted
    totals = reached.sum(0).cummin(0).values  # descending except for rounding
    wanted = totals[0].clamp(max=k)
    # The highest knot that is reached often enough, and the next one.
    ends = (totals >= wanted).sum() + torch.arange(-1, 1, device=knots.device)
    low, high = torch.cat([reached, torch.stack([totals, knots])]).index_select(1, ends).unbind(1)
    rise = low - high
    step = (wanted - high[-2]) / rise[-2]
    found = high + step * rise
    exact = found[:-2]
    shares = torch.floor(exact + 1e-9)
    extra = (shares - exact).argsort(stable=True).argsort() < wanted - shares.sum()
    return torch.minimum(shares + extra, sizes).long(), found[-1]


def _reaching(received: Tensor, grid: Tensor, knots: Tensor, zero: Tensor) -> Tensor:
    """Return (n, q) numbers of candidates of each rank with a magnitude of at least each knot."""
    beyond = torch.searchsorted(-received, (-knots).repeat(len(received), 1), right=True)  # how many reach the knot
    counts = torch.cat([zero, grid, grid[-1:]])
    levels = torch.cat([received[:, :1], received, received[:, -1:]], dim=1)
    drop = levels.diff(dim=1).gather(1, beyond)
    between = torch.where(drop < 0, (knots - levels.gather(1, beyond)) / drop, zero)
    return counts.diff().take(beyond).mul_(between).add_(counts.take(beyond))


def follow(threshold: Tensor, counts: Tensor | None, k: int, beta: float, gamma: float) -> Tensor:
    """Return the next threshold of the published controller of MiCRO and ExDyna, from the previous step's counts.

    ``threshold *= 1 + gamma`` if ``k'/k > beta``, ``1 + gamma/4`` if ``1/beta < k'/k <= beta``, else ``1 - gamma``,
    where k' is the number of coordinates selected by all ranks. There is no dead zone: the threshold rises
    inside the band, too, so that k' stays at the lower edge of the band (about 0.94 k). It moves by at most gamma a
    step.

    Args:
        threshold: () float64 of the previous step.
        counts: (n,) of the previous step; None before the first one, which leaves the threshold as it is.
        k: target for all ranks together.
        beta: width of the band, above 1.
        gamma: gain per step, in (0, 1).
    """
    if counts is None:
        return threshold
    ratio = counts.sum().double() / k
    # The released code writes 0.909 for the lower edge. torch.where makes float32 of two Python numbers, hence the
    # products.
    inside = torch.where(ratio > round(1 / beta, 3), threshold * (1 + gamma / 4), threshold * (1 - gamma))
    return torch.where(ratio > beta, threshold * (1 + gamma), inside)


def initial_threshold(density: float, numel: int, device: torch.device, method: str) -> Tensor:
    """Return the published start, ``1 / (2 sqrt(k))`` with ``k = int(density * numel)``, () float64.

    Raises:
        ValueError: if k is 0, where the published rule divides by zero.
    """
    k = int(density * numel)
    if k == 0:
        raise ValueError(
            f"{method}(variant='published') needs density * numel >= 1, but got {density:g} * {numel}: the published "
            "start 1 / (2 sqrt(k)) divides by k = 0. Use larger groups or variant='corrected'."
        )
    return torch.full((), 1 / (2 * math.sqrt(k)), dtype=torch.float64, device=device)


def pick_by_controller(
    acc: Tensor, threshold: Tensor, span: Span, longest: int, ctx: Context, beta: float, gamma: float
) -> tuple[Selection, Tensor]:
    """Select in a range by the published rule of MiCRO and ExDyna.

    Args:
        acc: (numel,) finite accumulator.
        threshold: () float64 of the previous step.
        span: range of this rank.
        longest: coordinates of a range, at most; equal on all ranks, since messages must be equally long.
        ctx: the step.
        beta: see :func:`follow`.
        gamma: see there.

    Returns:
        The selection, of at least one coordinate, and the threshold of this step.
    """
    k = max(1, int(ctx.density * acc.numel()))
    kept = follow(threshold, ctx.counts, k, beta, gamma)
    capacity = min(longest, CAPACITY * -(-k // ctx.world_size))
    selection = reaching(acc, kept, capacity, ctx.step, span)
    return force_one(selection, *span, ctx.step), kept


def force_one(selection: Selection, first: int | Tensor, last: int | Tensor, step: int) -> Selection:
    """Replace an empty selection by coordinate ``first + step mod (last - first)``, as the released code does."""
    place, indices, count = first + step % (last - first), selection.indices, selection.count
    forced = place if isinstance(place, Tensor) else torch.full((), place, device=indices.device)
    chosen = torch.where(count == 0, forced, indices[:1] if len(indices) else forced).view(1)
    return selection._replace(indices=torch.cat([chosen, indices[1:]]), count=count.clamp(min=1))


def check_variant(variant: str) -> None:
    """Raise a ValueError unless the variant is "corrected" or "published"."""
    expect(variant in ("corrected", "published"), "variant", "'corrected' or 'published'", variant)


def check_controller(beta: float, gamma: float) -> None:
    """Raise a ValueError unless ``beta > 1`` and ``0 < gamma < 1``, for the published controller."""
    expect(is_number(beta) and beta > 1, "beta, the width of the density band,", "above 1", beta)
    expect(is_number(gamma) and 0 < gamma < 1, "gamma, the gain per step,", "in (0, 1)", gamma)
