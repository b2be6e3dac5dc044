"""What should be left of sparse vectors that ranks merge on the way? Slow transcriptions with dictionaries.

A sparse vector is a dictionary from coordinates to values. These functions follow the papers' descriptions, with the
choices that the papers leave open written next to them, and share nothing with the library.

References:
    A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks (gTop-k),
    arXiv 1901.04359.

    Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk), arXiv 2201.07598.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Sparse = dict[int, float]


class MergedStep(NamedTuple):
    """What one step left behind."""

    counts: list[int]
    indices: list[int]  # sorted coordinates of the update
    update: Array  # (numel,)
    residual: Array  # (n, numel)
    thresholds: list[float] | None


def strongest(vector: Sparse, k: int) -> Sparse:
    """The k largest magnitudes; of equal ones the lower coordinates."""
    order = sorted(vector, key=lambda j: (-abs(vector[j]), j))
    return {j: vector[j] for j in sorted(order[:k])}


def added(a: Sparse, b: Sparse) -> Sparse:
    """Sum of two, the left operand first."""
    total = dict(a)
    for j, value in b.items():
        total[j] = total[j] + value if j in total else value
    return total


def merge_up_a_tree(offers: list[Sparse], keep: int) -> tuple[Sparse, list[Sparse]]:
    """gTop-k: pairs of ranks at distance 1, 2, 4, ... merge; what a merging rank drops stays with it.

    Returns:
        The result, not yet divided by n, and what each rank dropped in all its rounds.
    """
    n = len(offers)
    held, dropped = list(offers), [Sparse() for _ in range(n)]
    distance = 1
    while distance < n:
        for receiver in range(0, n, 2 * distance):
            sender = receiver + distance
            if sender >= n:
                continue  # nobody there: on to the next round as it is
            both = added(held[receiver], held[sender])
            held[receiver] = strongest(both, keep)
            lost = {j: value for j, value in both.items() if j not in held[receiver]}
            dropped[receiver] = added(dropped[receiver], lost)
        distance *= 2
    return held[0], dropped


def boundaries_of_regions(offers: list[Sparse], numel: int) -> list[int]:
    """Where rank i's j-th of n equal shares of its picks begins, averaged over ranks, rounded down.

    A rank without picks does not vote, and without votes all is in the last region.
    """
    n = len(offers)
    inner = []
    for j in range(1, n):
        votes = []
        for offer in offers:
            picks = sorted(offer)
            if picks:
                votes.append(picks[j * len(picks) // n])
        inner.append(sum(votes) // len(votes) if votes else 0)
    return [0, *inner, numel]


def thinned(picks: list[int], slots: int, step: int) -> list[int]:
    """At most `slots` of the picks at equal distances; which ones, moves with the step."""
    total = len(picks)
    if total <= slots:
        return picks
    return [picks[math.ceil(((s + 1) * total - step % total) / slots) - 1] for s in range(slots)]


def split_and_reduce(offers: list[Sparse], numel: int, k: int, step: int) -> tuple[Sparse, list[list[int]]]:
    """Ok-Topk: one rank adds up each region, and the k largest sums of all regions are the result.

    Returns:
        The result, not yet divided by n, and the coordinates that each rank gave to it.
    """
    n = len(offers)
    slots = min(numel, math.ceil(3 * k / (2 * n)))
    bounds = boundaries_of_regions(offers, numel)
    brought: list[list[int]] = [[] for _ in range(n)]
    sums: Sparse = {}
    for region in range(n):
        owned: Sparse = {}
        for rank, offer in enumerate(offers):
            picks = [j for j in sorted(offer) if bounds[region] <= j < bounds[region + 1]]
            going = thinned(picks, slots, step)
            brought[rank] += going
            owned = added(owned, {j: offer[j] for j in going})
        sums.update(strongest(owned, slots))
    result = strongest(sums, k)
    return result, [[j for j in going if j in result] for going in brought]


def reference_gtop_k(gradients: Iterable[Array], density: float) -> list[MergedStep]:
    """Top-k on each rank, merged up a tree; residuals with what was dropped."""
    records: list[MergedStep] = []
    residual = np.empty(0)
    for t, gradient in enumerate(gradients):
        n, numel = gradient.shape
        k = max(1, int(density * numel))
        acc = gradient + (residual if t else 0)
        offers = [strongest(dict(enumerate(row)), k) for row in acc]
        result, dropped = merge_up_a_tree(offers, k)
        residual = acc.copy()
        for rank in range(n):
            residual[rank, list(offers[rank])] = 0
            for j, value in dropped[rank].items():
                residual[rank, j] += value
        records.append(_record([k] * n, result, residual, None))
    return records


def reference_ok_top_k(gradients: Iterable[Array], density: float, *, interval: int, gain: float) -> list[MergedStep]:
    """Thresholds of the ranks' own, followed by one factor and estimated every `interval` steps or when far off."""
    records: list[MergedStep] = []
    residual = np.empty(0)
    for t, gradient in enumerate(gradients):
        n, numel = gradient.shape
        k = max(1, int(density * numel))
        if t == 0:
            thresholds: list[float | None] = [None] * n
        acc = gradient + (residual if t else 0)
        offers, applied = [], []
        for rank, row in enumerate(acc):
            magnitudes = np.abs(row)
            delta = thresholds[rank]
            if t % interval == 0 or delta is None:
                delta = float(np.sort(magnitudes)[numel - k])
            reach = max(delta, float(np.finfo(row.dtype).tiny))
            offer = {j: row[j] for j in range(numel) if magnitudes[j] >= row.dtype.type(reach)}
            offers.append(offer)
            applied.append(reach)
            picked = len(offer)
            if picked < 2 * k / 3:
                thresholds[rank] = delta / gain
            elif picked > 5 * k / 4:
                thresholds[rank] = delta * gain
            else:
                thresholds[rank] = delta
            if delta == 0 or picked < k / 2 or picked >= 2 * k:
                thresholds[rank] = None
        result, taken = split_and_reduce(offers, numel, k, t)
        residual = acc.copy()
        for rank in range(n):
            residual[rank, taken[rank]] = 0
        records.append(_record([len(offer) for offer in offers], result, residual, applied))
    return records


def _record(counts: list[int], result: Sparse, residual: Array, thresholds: list[float] | None) -> MergedStep:
    update = np.zeros_like(residual[0])
    for j, value in result.items():
        update[j] = value / len(residual)
    return MergedStep(counts, sorted(result), update, residual.copy(), thresholds)
