"""The formulations of fixed size, run on the CPU against those of exact size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse import ops
from lightning_sparse.ops import reference

SIZES = [1, 2, 7, 257, 65_537]


def values(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different magnitudes, so that there are no ties to break."""
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(numel))
    return (order + 1).to(dtype) * (1 - 2 * (order % 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", SIZES)
def test_top_k_equals_that_of_the_host(numel: int, dtype: torch.dtype) -> None:
    x = values(numel, dtype)
    for k in {1, numel // 10 + 1, max(1, numel - 1)}:
        assert torch.equal(reference.top_k(x, k), ops.top_k(x, k))


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("numel", SIZES)
def test_largest_is_a_sort_of_the_span_and_then_padding(numel: int, as_tensors: bool) -> None:
    x = values(numel)
    spans = [(0, numel), (numel // 3, numel), (numel // 2, numel // 2), (0, 1)]
    for first, last in spans:
        span = (torch.tensor(first), torch.tensor(last)) if as_tensors else (first, last)
        for k in {1, min(5, numel), numel}:
            indices, magnitudes = reference.largest(x, k, span)
            expected = first + torch.argsort(x[first:last].abs(), descending=True)[:k]
            found = expected.numel()
            assert torch.equal(indices[:found], expected)
            assert torch.equal(magnitudes[:found], x[expected].abs())
            assert indices.shape == magnitudes.shape == (k,)
            assert bool((indices[found:] == numel).all())
            assert bool((magnitudes[found:] == -1).all())


def test_largest_counts_zeros_inside_the_span_as_candidates() -> None:
    indices, magnitudes = reference.largest(torch.zeros(6), 4, (2, 4))
    assert sorted(indices.tolist()) == [2, 3, 6, 6]
    assert magnitudes.tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", SIZES)
def test_above_equals_that_of_the_host_while_there_is_room(numel: int, dtype: torch.dtype) -> None:
    x = values(numel, dtype)
    for span in (None, (numel // 3, numel), (torch.tensor(0), torch.tensor(numel // 2)), (1, 1)):
        for threshold in (0.0, numel / 2, numel - 0.5, 2.0 * numel):
            bound = torch.tensor(threshold, dtype=torch.float64)
            expected, total = ops.above(x, bound, span)
            for capacity in {numel, int(total)} - {0}:
                indices, count = reference.above(x, bound, span, capacity, phase=5)
                assert indices.shape == (capacity,)
                assert int(count) == int(total)
                assert torch.equal(indices[: int(count)], expected)
                assert bool((indices[int(count) :] == numel).all())


def test_a_threshold_is_rounded_to_the_precision_of_the_values_here_too() -> None:
    for number in (0.7, 0.1):
        x = torch.full((3,), number, dtype=torch.float32)
        assert reference.above(x, torch.tensor(number, dtype=torch.float64), None, 3, 0)[0].tolist() == [0, 1, 2]


def test_nan_never_reaches_a_threshold_here_either() -> None:
    x = torch.tensor([float("nan"), 1.0, float("inf"), float("nan")])
    indices, count = reference.above(x, torch.tensor(0.0), None, 4, 0)
    assert indices.tolist() == [1, 2, 4, 4]
    assert int(count) == 2


@settings(deadline=None, max_examples=150)
@given(numel=st.integers(1, 400), capacity=st.integers(1, 60), phase=st.integers(0, 10**6), share=st.floats(0.05, 1.0))
def test_an_overfull_range_is_thinned_evenly(numel: int, capacity: int, phase: int, share: float) -> None:
    capacity = min(capacity, numel)
    mask = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < share
    candidates = mask.nonzero().flatten()
    indices, count = reference.above(mask.float(), torch.tensor(0.5), None, capacity, phase)
    kept = indices[: int(count)]
    assert int(count) == min(capacity, candidates.numel())
    assert bool((kept[1:] > kept[:-1]).all())
    assert set(kept.tolist()) <= set(candidates.tolist())
    assert bool((indices[int(count) :] == numel).all())
    if candidates.numel() > capacity:
        # Every quarter of the candidates keeps its share of the slots, up to one slot at either end.
        ordinals = torch.searchsorted(candidates, kept)
        for quarter in range(4):
            low, high = quarter * candidates.numel() / 4, (quarter + 1) * candidates.numel() / 4
            held = int(((ordinals >= low) & (ordinals < high)).sum())
            assert abs(held - capacity / 4) <= 2


def test_which_candidates_an_overfull_range_gives_up_rotates_with_the_phase() -> None:
    # 10 candidates for 3 slots: within 10 steps each of them is kept 3 times.
    kept = torch.zeros(10, dtype=torch.int64)
    seen = set()
    for phase in range(10):
        indices, count = reference.above(torch.ones(10), torch.tensor(0.5), None, 3, phase)
        assert int(count) == 3
        kept[indices] += 1
        seen.add(tuple(indices.tolist()))
    assert kept.tolist() == [3] * 10
    assert len(seen) > 3
    # Far out in training the phase is taken modulo the number of candidates.
    late, _ = reference.above(torch.ones(10), torch.tensor(0.5), None, 3, 10**9 + 3)
    assert torch.equal(late, reference.above(torch.ones(10), torch.tensor(0.5), None, 3, 3)[0])


def test_thinning_looks_at_the_span_only() -> None:
    indices, count = reference.above(torch.ones(100), torch.tensor(0.5), (torch.tensor(40), torch.tensor(60)), 5, 0)
    assert int(count) == 5
    assert 40 <= int(indices.min()) <= 44
    assert 56 <= int(indices.max()) <= 59


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(0, 31))
def test_distinct_equals_that_of_the_host_and_then_padding(numbers: list[int], padding: int) -> None:
    given_ = torch.tensor(numbers).clamp(max=padding)
    indices, count = reference.distinct(given_, padding)
    expected, _ = ops.distinct(given_, padding)
    assert indices.shape == given_.shape
    assert int(count) == expected.numel()
    assert torch.equal(indices[: int(count)], expected)
    assert bool((indices[int(count) :] == padding).all())
