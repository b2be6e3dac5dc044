"""Functions that several methods share: a common threshold for all ranks, and the published controller."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.core.checks import expect
from lightning_sparse.core.layout import Span
from lightning_sparse.core.messages import AllGather, Steps
from lightning_sparse.core.step import Context, Selection
from lightning_sparse.ops import largest, largest_of, many_of_largest, pad, static_shapes

SHARE_LIMIT = 2
"""Multiple of k/n that a rank sends at most: bounds the padding ratio and the messages."""


CAPACITY = 4
"""Device slots per rank of the published variant, in multiples of k/n."""


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
    if not static_shapes(acc.device):
        return (yield from _pick_on_host(acc, spans.numpy(), k, ctx, most, points))
    # Made on the device: copying it there would make the host wait.
    grid = torch.linspace(1, most, points, dtype=torch.float64, device=acc.device).round().long()
    candidates, magnitudes = largest(acc, most, own or (spans[ctx.rank, 0], spans[ctx.rank, 1]))
    survey = magnitudes.new_zeros(most)
    # If only the device knows that a value is not finite, the others must still find a threshold.
    survey[: magnitudes.numel()] = magnitudes.nan_to_num(0.0).clamp_(min=0)
    received = yield AllGather(survey[grid - 1])
    sizes = (spans[:, 1] - spans[:, 0]).clamp(max=most)
    shares, threshold = split(received.double(), grid.double(), sizes.double(), k)
    share = shares[ctx.rank]
    indices = torch.full((most,), numel, device=acc.device)
    indices[: candidates.numel()] = candidates
    indices = indices.masked_fill(torch.arange(most, device=acc.device) >= share, numel).sort().values
    return Selection(indices, share, threshold, aligned=True, total=min(k, numel))


def _pick_on_host(
    acc: Tensor, spans: NDArray[np.int64], k: int, ctx: Context, most: int, points: int
) -> Steps[Selection]:
    """Do the same as :func:`pick_jointly` on the host, which knows all sizes; only magnitudes are sorted."""
    numel, (first, last) = acc.numel(), spans[ctx.rank].tolist()
    candidates, magnitudes = many_of_largest(acc, most, (first, last))
    ordered, grid = np.sort(magnitudes.numpy()), _ranks(most, points)
    told = np.zeros(points, ordered.dtype)
    known = grid <= ordered.size
    told[known] = ordered[ordered.size - grid[known]]
    received = yield AllGather(torch.from_numpy(told))
    sizes = np.minimum(spans[:, 1] - spans[:, 0], most)
    shares, threshold = _split_on_host(received.numpy().astype(np.float64), grid, sizes, k)
    share, slots = int(shares[ctx.rank]), int(shares.max())
    indices = pad(largest_of(candidates, magnitudes, share), slots, numel)
    count, level = torch.tensor(share, device="cpu"), torch.tensor(threshold, dtype=torch.float64, device="cpu")
    return Selection(indices, count, level, aligned=True, total=min(k, numel))


@lru_cache(maxsize=256)
def _ranks(most: int, points: int) -> NDArray[np.int64]:
    """Return (points,) positions from 1 to ``most`` in equal steps."""
    return np.linspace(1, most, points).round().astype(np.int64)


def split(received: Tensor, grid: Tensor, sizes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Split k coordinates between ranks by order statistics of their magnitudes.

    ``N_i(x)``, the number of candidates of rank i that reach x, is known at the order statistics and taken as linear in
    between. The threshold solves ``sum_i N_i(x) = k``; shares are rounded to integers by the largest remainder, the
    lower rank first.

    Args:
        received: (n, p) magnitudes by rank, descending, zero if a rank has no such candidate.
        grid: (p,) positions of the order statistics, ascending from 1.
        sizes: (n,) number of candidates of each rank.
        k: number of coordinates to select.

    Returns:
        shares: (n,) int64, summing to k, or to all candidates if there are fewer; and the threshold, ().
    """
    if static_shapes(received.device):
        return _split_on_device(received, grid, sizes, k)
    shares, threshold = _split_on_host(received.numpy(), grid.numpy(), sizes.numpy(), k)
    return torch.from_numpy(shares), torch.tensor(threshold, dtype=torch.float64, device="cpu")


def _split_on_host(
    received: NDArray[np.float64], grid: NDArray[Any], sizes: NDArray[Any], k: int
) -> tuple[NDArray[np.int64], float]:
    """Compute :func:`split` in numpy, whose small operations take a third of the time of torch's."""
    knots = np.sort(np.append(received.ravel(), 0.0))
    grid = np.append(grid.astype(np.float64), 0.0)  # knots that no statistic reaches count 0
    points = received.shape[1]
    reached = np.zeros((len(received), len(knots) + 1))
    for own, size, made in zip(received, sizes, reached, strict=True):
        beyond = points - np.searchsorted(own[::-1], knots)  # statistics that reach the knot
        upper, lower = beyond - 1, np.minimum(beyond, points - 1)
        high, gap = own[upper], own[upper] - own[lower]
        between = np.where(gap > 0, (high - knots) / np.where(gap > 0, gap, 1), 0)
        counted = grid[upper] + (grid[lower] - grid[upper]) * between
        made[:-1] = np.minimum(np.where(beyond > 0, counted, 0), size)
    # Above the highest knot the count is 0: the last column saves a special case for k below the count at it.
    knots = np.append(knots, knots[-1])
    totals = np.minimum.accumulate(reached.sum(0))  # descending except for rounding
    wanted = min(float(totals[0]), k)
    low = int(np.count_nonzero(totals >= wanted)) - 1  # the highest knot that is reached often enough
    high = low + 1
    step = (wanted - totals[high]) / (totals[low] - totals[high])
    exact = reached[:, high] + step * (reached[:, low] - reached[:, high])
    threshold = float(knots[high] + step * (knots[low] - knots[high]))
    shares = np.floor(exact + 1e-9)
    missing = wanted - shares.sum()
    extra = np.zeros_like(shares)
    extra[np.argsort(shares - exact, kind="stable")] = np.arange(len(shares)) < missing
    return np.minimum(shares + extra, sizes).astype(np.int64), threshold


def _split_on_device(received: Tensor, grid: Tensor, sizes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    knots = torch.cat([received.new_zeros(1), received.flatten()]).sort().values
    reached = torch.minimum(_reaching(received, grid, knots), sizes.unsqueeze(1))
    # Above the highest knot the count is 0: the extra column saves a special case for k below the count at it.
    reached = torch.cat([reached, torch.zeros_like(reached[:, :1])], dim=1)
    knots = torch.cat([knots, knots[-1:]])
    totals = reached.sum(0).cummin(0).values  # descending except for rounding
    wanted = totals[:1].clamp(max=k)
    low = (totals >= wanted).sum().view(1) - 1  # the highest knot that is reached often enough
    high = low + 1
    step = (wanted - totals[high]) / (totals[low] - totals[high])
    exact = (reached[:, high] + step * (reached[:, low] - reached[:, high])).squeeze(1)
    threshold = (knots[high] + step * (knots[low] - knots[high])).squeeze(0)
    shares = torch.floor(exact + 1e-9)
    missing = wanted - shares.sum()
    order = torch.argsort(exact - shares, descending=True, stable=True)
    extra = torch.zeros_like(shares)
    extra[order] = (torch.arange(len(shares), device=shares.device) < missing).double()
    return torch.minimum(shares + extra, sizes).long(), threshold


def _reaching(received: Tensor, grid: Tensor, knots: Tensor) -> Tensor:
    """Return (n, q) numbers of candidates of each rank with a magnitude of at least each knot."""
    n, points = received.shape
    ascending = received.flip(1).contiguous()
    beyond = points - torch.searchsorted(ascending, knots.expand(n, -1).contiguous())  # statistics that reach the knot
    upper = (beyond - 1).clamp(min=0)
    lower = beyond.clamp(max=points - 1)
    high, low = received.gather(1, upper), received.gather(1, lower)
    gap = high - low
    between = (grid[lower] - grid[upper]) * torch.where(gap > 0, (high - knots) / gap.where(gap > 0, 1), 0)
    return torch.where(beyond > 0, grid[upper] + between, 0)


def follow(threshold: Tensor, counts: Tensor | None, k: int, beta: float, gamma: float) -> Tensor:
    """Return the next threshold of the published controller of MiCRO and ExDyna, from the previous step's counts.

    ``threshold *= 1 + gamma`` if ``k'/k > beta``, ``1 + gamma/4`` if ``1/beta < k'/k <= beta``, else ``1 - gamma``,
    where k' is the number of coordinates selected by all ranks. There is no dead zone: the threshold rises
    inside the band, too, so that k' stays at the lower edge of the band (about 0.94 k). It moves by at most gamma a
    step.

    Args:
        threshold: () float64 of the previous step.
        counts: (n,) of the previous step; None or -1 before the first one, which leaves the threshold as it is.
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
    moved = torch.where(ratio > beta, threshold * (1 + gamma), inside)
    return torch.where(ratio < 0, threshold, moved)


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


def force_one(
    indices: Tensor, count: Tensor, first: int | Tensor, last: int | Tensor, step: int
) -> tuple[Tensor, Tensor]:
    """Replace an empty selection by coordinate ``first + step mod (last - first)``, as the released code does."""
    place = first + step % (last - first)
    forced = place if isinstance(place, Tensor) else torch.full((), place, device=indices.device)
    if static_shapes(indices.device):
        indices = indices.clone()
        indices[0] = torch.where(count == 0, forced, indices[0])
        return indices, count.clamp(min=1)
    return (indices, count) if count else (forced.view(1), torch.ones_like(count))


def check_variant(variant: str) -> None:
    """Raise a ValueError unless the variant is "corrected" or "published"."""
    expect(variant in ("corrected", "published"), "variant", "'corrected' or 'published'", variant)


def check_controller(beta: float, gamma: float) -> None:
    """Raise a ValueError unless ``beta > 1`` and ``0 < gamma < 1``, for the published controller."""
    expect(beta > 1, "beta, the width of the density band,", "above 1", beta)
    expect(0 < gamma < 1, "gamma, the gain per step,", "in (0, 1)", gamma)
