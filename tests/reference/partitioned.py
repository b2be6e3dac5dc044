"""What should every rank hold after each step of MiCRO, ExDyna, Top-k and hard-threshold?

These functions simulate all ranks in one process, one step after the other, with NumPy alone. They favour
being easy to check by eye over being fast, and they share nothing with the library.

The two partitioned methods follow the rule of the papers' released code, which settles what the papers
leave open: the constants, the forced index, the remainder, and which counts drive the threshold.

Symbols: `n` ranks, `numel` elements per gradient, `t` the step from 0, `k` the target number of selected
elements, `k'` the number selected by all ranks together in the previous step, `delta` the threshold.

Gradients must be finite. All arithmetic on them stays in their own dtype, float32 or float64; the
threshold is a Python float and is rounded to that dtype by the comparison.

References:
    MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN Training,
    arXiv 2310.00967, https://arxiv.org/abs/2310.00967.

    Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning (ExDyna),
    arXiv 2402.13781, https://arxiv.org/abs/2402.13781.
"""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Release = Literal["own", "union"]


class ReferenceStep(NamedTuple):
    """What one step selected and what it left behind."""

    step: int
    counts: list[int]  # selected elements of each rank, forced ones included
    threshold: float | None  # the one applied in this step; None for Top-k
    partition: list[tuple[int, int]] | None  # (first, past_end) searched by each rank; None if everything
    indices: list[int]  # sorted, without repeats: all elements that some rank selected
    update: Array  # (numel,) average over ranks of what was released
    residual: Array  # (n, numel) what each rank keeps


def reference_published_micro(gradients: Iterable[Array], density: float) -> list[ReferenceStep]:
    """Run the released MiCRO rule on `gradients`, one (n, numel) array per step.

    Args:
        gradients: local gradients, one row per rank; n >= 2 and the same shape and dtype at every step.
        density: wanted fraction of selected elements; `int(density * numel)` must be at least 1.

    Returns:
        One record per step.

    Raises:
        ZeroDivisionError: if the target count is 0, or if a partition is empty.
    """
    records: list[ReferenceStep] = []
    delta = math.nan  # set at the first step
    for t, gradient in enumerate(gradients):
        if t == 0:
            n, numel = _checked_shape(gradient)
            k = int(density * numel)
            k_prime = 0
            ranges = _element_ranges(numel, n)
            residual = np.zeros_like(gradient)
        acc = residual + gradient

        owned = []
        for rank in range(n):
            owned.append(ranges[(t + rank) % n])

        delta = 1.0 / (2.0 * math.sqrt(k)) if t == 0 else delta * _threshold_factor(k_prime / k)

        selected = _select_in_ranges(acc, owned, delta, t)
        union = _concatenate(selected)
        update, residual = _release_union(acc, union)
        k_prime = len(union)
        records.append(_record(t, selected, delta, owned, update, residual))
    return records


def reference_published_exdyna(
    gradients: Iterable[Array],
    density: float,
    *,
    blocks: int = 1024,
    alpha_low: float = 0.95238,
    alpha: float = 1.05,
    blk_move: int = 1,
) -> list[ReferenceStep]:
    """Run the released ExDyna rule on `gradients`, one (n, numel) array per step.

    Args:
        gradients: local gradients, one row per rank; n >= 2 and the same shape and dtype at every step.
        density: wanted fraction of selected elements; `int(density * numel)` must be at least 1.
        blocks: number of equal blocks the vector is cut into; what does not fit goes to the last partition.
        alpha_low: a partition whose load relative to the mean is below this is light; less than `alpha`.
        alpha: a partition whose load relative to the mean is above this is heavy.
        blk_move: blocks that a heavy partition hands to a light neighbour in one step.

    Returns:
        One record per step.

    Raises:
        ZeroDivisionError: if the target count is 0, or if a partition is empty; with fewer than
            `32 * blocks` elements the blocks have no elements, so all partitions but the last are empty.
    """
    records: list[ReferenceStep] = []
    delta = math.nan  # set at the first step
    for t, gradient in enumerate(gradients):
        if t == 0:
            n, numel = _checked_shape(gradient)
            k = int(density * numel)
            k_prime = 0
            counts = [0] * n
            b = 32 * (numel // blocks // 32)
            remainder = numel - b * blocks
            min_blk = blocks / (4 * n)
            num_blocks: list[int] = []
            position: list[int] = []
            for p in range(n):
                position.append(sum(num_blocks))
                num_blocks.append(blocks // n + (1 if p < blocks % n else 0))
            residual = np.zeros_like(gradient)
        acc = residual + gradient

        if t > 0:
            # The counts are those of the step before, so they follow the ownership of the step before.
            kp = [0] * n
            for rank in range(n):
                kp[(t - 1 + rank) % n] = counts[rank]
            avg = int(k_prime / n)
            rho = k_prime / numel
            kappa = int(blk_move * b * rho)
            for p in range(n - 1):
                # A move changes kp[p + 1], which the next pair reads.
                left = kp[p] / avg
                right = kp[p + 1] / avg
                if left > alpha and right < alpha_low:
                    if num_blocks[p] - blk_move >= min_blk:
                        num_blocks[p] -= blk_move
                        num_blocks[p + 1] += blk_move
                        position[p + 1] -= blk_move
                        kp[p] -= kappa
                        kp[p + 1] += kappa
                elif left < alpha_low and right > alpha and num_blocks[p + 1] - blk_move >= min_blk:
                    num_blocks[p] += blk_move
                    num_blocks[p + 1] -= blk_move
                    position[p + 1] += blk_move
                    kp[p] += kappa
                    kp[p + 1] -= kappa

        owned = []
        for rank in range(n):
            p = (t + rank) % n
            first = position[p] * b
            past_end = (position[p] + num_blocks[p]) * b
            if p == n - 1:
                past_end += remainder
            owned.append((first, past_end))

        delta = 1.0 / (2.0 * math.sqrt(k)) if t == 0 else delta * _threshold_factor(k_prime / k)

        selected = _select_in_ranges(acc, owned, delta, t)
        union = _concatenate(selected)
        update, residual = _release_union(acc, union)
        counts = [len(chosen) for chosen in selected]
        k_prime = len(union)
        records.append(_record(t, selected, delta, owned, update, residual))
    return records


def reference_top_k(gradients: Iterable[Array], density: float, *, release: Release) -> list[ReferenceStep]:
    """Run Top-k with error feedback on `gradients`, one (n, numel) array per step.

    Every rank selects the same number of elements from its whole vector; equal magnitudes go to the lower
    index. That number is `max(1, int(density * numel))` for "own". For "union" it is `int(density * numel)`,
    as in the code that publishes this variant, so it can be 0 and then nothing is ever sent.

    Args:
        gradients: local gradients, one row per rank, the same shape and dtype at every step.
        density: fraction of the elements that each rank selects.
        release: "own" if a rank sends and forgets only what it selected, "union" if it sends and forgets
            what any rank selected.

    Returns:
        One record per step, with `threshold` and `partition` None.
    """
    records: list[ReferenceStep] = []
    for t, gradient in enumerate(gradients):
        if t == 0:
            n, numel = gradient.shape
            k = int(density * numel)
            if release == "own":
                k = max(1, k)
            residual = np.zeros_like(gradient)
        acc = residual + gradient

        selected = []
        for rank in range(n):
            magnitudes = np.abs(acc[rank]).tolist()
            descending = sorted(range(numel), key=lambda j: (-magnitudes[j], j))
            selected.append(sorted(descending[:k]))

        update, residual = _release(acc, selected, release)
        records.append(_record(t, selected, None, None, update, residual))
    return records


def reference_hard_threshold(gradients: Iterable[Array], threshold: float, *, release: Release) -> list[ReferenceStep]:
    """Run a constant threshold with error feedback on `gradients`, one (n, numel) array per step.

    A step in which no rank reaches the threshold sends nothing and keeps everything.

    Args:
        gradients: local gradients, one row per rank, the same shape and dtype at every step.
        threshold: smallest magnitude that is selected, in the unit of the gradients.
        release: "own" if a rank sends and forgets only what it selected, "union" if it sends and forgets
            what any rank selected.

    Returns:
        One record per step, with `threshold` the given one and `partition` None.
    """
    records: list[ReferenceStep] = []
    for t, gradient in enumerate(gradients):
        if t == 0:
            n, numel = gradient.shape
            residual = np.zeros_like(gradient)
        acc = residual + gradient

        selected = []
        for rank in range(n):
            selected.append(_reaching(acc[rank], 0, numel, threshold))

        update, residual = _release(acc, selected, release)
        records.append(_record(t, selected, float(threshold), None, update, residual))
    return records


def _checked_shape(gradient: Array) -> tuple[int, int]:
    """The number of ranks and of elements; the released code of the partitioned methods needs two ranks."""
    n, numel = gradient.shape
    if n < 2:
        raise ValueError(f"Expected gradients of at least 2 ranks but got {n}.")
    return n, numel


def _element_ranges(numel: int, n: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into n consecutive ranges, the first `numel % n` of them one element longer."""
    ranges = []
    first = 0
    for p in range(n):
        size = numel // n
        if p < numel % n:
            size += 1
        ranges.append((first, first + size))
        first += size
    return ranges


def _threshold_factor(ratio: float) -> float:
    """How the threshold answers to `ratio`, the selected count over the target count."""
    if ratio > 1.1:
        return 1.005
    if ratio > 0.909:
        return 1.00125
    return 0.995


def _reaching(row: Array, first: int, past_end: int, threshold: float) -> list[int]:
    """Indices j in [first, past_end) with |row[j]| >= threshold, ascending."""
    reached = np.abs(row) >= float(threshold)
    return [j for j in range(first, past_end) if reached[j]]


def _select_in_ranges(acc: Array, owned: list[tuple[int, int]], delta: float, t: int) -> list[list[int]]:
    """Let each rank select in the range it owns; a rank that finds nothing gives one index, in turn."""
    selected = []
    for rank, (first, past_end) in enumerate(owned):
        chosen = _reaching(acc[rank], first, past_end, delta)
        if not chosen:
            chosen = [first + t % (past_end - first)]
        selected.append(chosen)
    return selected


def _concatenate(selected: list[list[int]]) -> list[int]:
    """All selections in rank order; the ranges are disjoint, so nothing repeats."""
    union = []
    for chosen in selected:
        union.extend(chosen)
    return union


def _release(acc: Array, selected: list[list[int]], release: Release) -> tuple[Array, Array]:
    """Apply one of the two release rules; see `_release_own` and `_release_union`."""
    if release == "own":
        return _release_own(acc, selected)
    if release == "union":
        return _release_union(acc, sorted(set(_concatenate(selected))))
    raise ValueError(f'Expected release to be "own" or "union" but got {release!r}.')


def _release_own(acc: Array, selected: list[list[int]]) -> tuple[Array, Array]:
    """Each rank sends, and forgets, the elements it selected itself."""
    n, numel = acc.shape
    total = np.zeros(numel, dtype=acc.dtype)
    residual = acc.copy()
    for rank in range(n):
        for j in selected[rank]:
            total[j] += acc[rank, j]
            residual[rank, j] = 0.0
    return total / n, residual


def _release_union(acc: Array, union: list[int]) -> tuple[Array, Array]:
    """Each rank sends, and forgets, every element of the union, also those it did not select."""
    n, numel = acc.shape
    total = np.zeros(numel, dtype=acc.dtype)
    residual = acc.copy()
    for rank in range(n):
        for j in union:
            total[j] += acc[rank, j]
            residual[rank, j] = 0.0
    return total / n, residual


def _record(
    t: int,
    selected: list[list[int]],
    threshold: float | None,
    partition: list[tuple[int, int]] | None,
    update: Array,
    residual: Array,
) -> ReferenceStep:
    """Describe a step by values that later steps cannot change."""
    counts = [len(chosen) for chosen in selected]
    indices = sorted(set(_concatenate(selected)))
    return ReferenceStep(t, counts, threshold, partition, indices, update, residual.copy())
