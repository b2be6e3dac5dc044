"""The CPU formulations against numpy on whole vectors."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sparse import ops
from lightning_sparse.ops import host
from tests.covering import covering, in_one_test

# Around a chunk (65536), and where sampling begins (a stride of 2 from 8192 elements on) and is sparsest (97).
SIZES = [1, 2, 7, 8191, 8192, 12_289, 65_535, 65_536, 65_537, 131_073, 400_000]
DTYPES = [np.float32, np.float64]


def values(numel: int, dtype: type, kind: str = "normal", seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=numel)
    if kind == "ties":
        x = np.round(x * 2) / 2
    elif kind == "equal":
        x[:] = -3.0
    elif kind == "zeros":
        x[:] = 0.0
    elif kind == "sparse":
        x *= generator.random(numel) < 0.001
    return x.astype(dtype)


def slow_largest(x: np.ndarray, k: int, first: int, last: int) -> np.ndarray:
    """The k largest magnitudes, of equal ones the lower coordinate first: a stable sort of all of them."""
    return np.argsort(-np.abs(x[first:last]), kind="stable")[:k] + first


@in_one_test("numel, kind, dtype", covering(product(SIZES, ["normal", "ties", "equal", "zeros", "sparse"], DTYPES)))
def test_top_k_is_a_stable_sort(numel: int, kind: str, dtype: type) -> None:
    x = values(numel, dtype, kind)
    order = slow_largest(x, numel, 0, numel)
    for k in {1, 2, numel // 1000 + 1, numel // 3 + 1, numel - 1, numel, numel + 5} - {0}:
        found = ops.top_k(torch.from_numpy(x), k)
        assert found.dtype == torch.int64
        assert np.array_equal(found, np.sort(order[:k])), k


@in_one_test("numel, kind", product(SIZES, ["normal", "ties", "sparse"]))
def test_the_largest_of_many_are_a_stable_sort_of_a_span(numel: int, kind: str) -> None:
    x = values(numel, np.float32, kind)
    for first, last in {(0, numel), (numel // 3, numel), (0, numel // 2 + 1), (numel // 4, numel // 4 + 1)}:
        order = slow_largest(x, numel, first, last)
        for k in (1, 3, numel // 50 + 1):
            indices, magnitudes = host.many_of_largest(torch.from_numpy(x), k, (first, last))
            assert magnitudes.tolist() == np.abs(x[indices.numpy()]).tolist()
            found = host.largest_of(indices, magnitudes, min(k, last - first))
            assert found.dtype == torch.int64
            assert np.array_equal(found, np.sort(order[:k])), (first, last, k)
    indices, magnitudes = host.many_of_largest(torch.from_numpy(x), min(3, numel))
    assert np.array_equal(host.largest_of(indices, magnitudes, min(3, numel)), np.sort(slow_largest(x, 3, 0, numel)))


def test_the_largest_of_an_empty_span_are_none() -> None:
    indices, magnitudes = host.many_of_largest(torch.ones(10), 3, (4, 4))
    assert (indices.tolist(), magnitudes.tolist()) == ([], [])
    assert host.largest_of(indices, magnitudes, 0).tolist() == []


@in_one_test("numel, kind, dtype", covering(product(SIZES, ["normal", "ties", "equal", "sparse"], DTYPES)))
def test_above_is_a_comparison_of_the_whole_vector(numel: int, kind: str, dtype: type) -> None:
    x = values(numel, dtype, kind)
    for threshold in (0.0, 0.5, 2.5, 3.0, 100.0):
        for first, last in ((0, numel), (numel // 3, numel // 3), (numel // 3, numel)):
            bound = torch.tensor(threshold, dtype=torch.float64)
            indices, count = ops.above(torch.from_numpy(x), bound, (first, last))
            expected = np.flatnonzero(np.abs(x[first:last]) >= threshold) + first
            assert np.array_equal(indices, expected), (threshold, first, last)
            assert int(count) == expected.size
            assert indices.dtype == count.dtype == torch.int64


def test_above_has_no_capacity_on_the_cpu() -> None:
    indices, count = ops.above(torch.ones(100), torch.tensor(0.5), capacity=3, phase=2)
    assert (indices.tolist(), int(count)) == (list(range(100)), 100)


def test_a_threshold_is_rounded_to_the_precision_of_the_values() -> None:
    # The float32 nearest to 0.7 lies below the float64 0.7, the one nearest to 0.1 above.
    for number in (0.7, 0.1):
        x = torch.full((3,), number, dtype=torch.float32)
        assert ops.above(x, torch.tensor(number, dtype=torch.float64))[0].tolist() == [0, 1, 2]


def test_nan_never_reaches_a_threshold() -> None:
    x = torch.tensor([float("nan"), 1.0, float("inf"), -float("inf"), float("nan")])
    assert ops.above(x, torch.tensor(0.0))[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("stride", [2, 5, 97])
def test_top_k_is_exact_where_the_sample_misleads(stride: int) -> None:
    # All large magnitudes lie where the sample looks, or none of them do: the bound from it is far too high, or 0.
    numel = 4096 * stride
    seen, unseen = np.zeros(numel, dtype=np.float32), np.full(numel, 2.0, dtype=np.float32)
    seen[::stride] = np.arange(1, 4097)
    unseen[::stride] = 0.0
    for x in (seen, unseen, -seen, seen + 1):
        for k in (1, 100, 4000, 4096, 4097, numel // 2):
            found = host.top_k(torch.from_numpy(x), k)
            assert np.array_equal(found, np.sort(slow_largest(x, k, 0, numel)))


def test_buffers_do_not_leak_from_one_call_or_dtype_into_another() -> None:
    x = torch.from_numpy(values(70_000, np.float32))
    first = ops.above(x, torch.tensor(1.0))[0]
    kept = first.clone()
    ops.above(x.double() * 100, torch.tensor(1.0))
    ops.above(-x * 100, torch.tensor(1.0))
    assert torch.equal(first, kept)
    assert torch.equal(ops.above(x, torch.tensor(1.0))[0], kept)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 31))
def test_distinct_is_numpys_unique_without_padding(numbers: list[int], padding: int) -> None:
    indices, count = ops.distinct(torch.tensor(numbers, dtype=torch.int64), padding)
    expected = [int(i) for i in np.unique(np.array(numbers, dtype=np.int64)) if i < padding]
    assert indices.tolist() == expected
    assert int(count) == len(expected)


@pytest.mark.parametrize("static", [False, True])
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.integers(0, 20), max_size=12), min_size=1, max_size=12), st.integers(0, 99))
def test_sparse_vectors_are_added_up_one_after_another(
    static: bool, monkeypatch: pytest.MonkeyPatch, places: list[set[int]], seed: int
) -> None:
    monkeypatch.setattr(ops, "static_shapes", lambda device: static)
    padding, generator = 21, np.random.default_rng(seed)
    expected = np.zeros(padding, dtype=np.float32)
    parts = []
    for part in places:
        indices = np.sort(np.array([*part], dtype=np.int64))
        # Rounding makes every other order visible; zeros of both signs.
        values = (generator.normal(size=indices.size) * 10.0 ** generator.integers(-3, 4, indices.size)).astype("f4")
        values[generator.random(indices.size) < 0.2] = -0.0
        for j, value in zip(indices, values, strict=True):
            expected[j] += value
        slots = padding - len(part)
        parts.append(
            (
                torch.from_numpy(np.concatenate([indices, np.full(slots, padding)])),
                torch.from_numpy(np.concatenate([values, np.zeros(slots, dtype=np.float32)])),
            )
        )
    union, totals, count = ops.add_up(parts, padding)
    named = sorted(set().union(*places))
    assert union[: int(count)].tolist() == named
    assert totals[: int(count)].numpy().tobytes() == expected[named].tobytes()
    assert len(union) == (padding * len(parts) if static else len(named))
    assert bool((union[int(count) :] == padding).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 2, 65_537])
def test_all_finite_finds_a_single_bad_value_anywhere(numel: int, dtype: torch.dtype) -> None:
    x = torch.ones(numel, dtype=dtype)
    x[0] = torch.finfo(dtype).max
    assert bool(ops.all_finite(x))
    for place in {0, numel // 2, numel - 1}:
        for bad in (float("nan"), float("inf"), -float("inf")):
            spoilt = x.clone()
            spoilt[place] = bad
            assert not bool(ops.all_finite(spoilt))


def test_all_finite_is_true_of_nothing() -> None:
    assert bool(ops.all_finite(torch.empty(0)))
