"""Sums over what lies beyond a threshold, in both formulations, against whole vectors in float64."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from lightning_sparse import ops
from lightning_sparse.ops import host, reference
from tests.covering import in_one_test

SIZES = [1, 7, 65_535, 65_536, 65_537, 200_003]


def double(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def values(numel: int, dtype: type, kind: str) -> np.ndarray:
    x = np.random.default_rng(numel).normal(size=numel)
    if kind == "zeros":
        x *= np.arange(numel) % 3 == 0
    elif kind == "small":
        x *= 1e-25
    return x.astype(dtype)


@in_one_test("numel, kind, dtype", product(SIZES, ["normal", "zeros", "small"], [np.float32, np.float64]))
def test_excess_is_that_of_the_whole_vector(numel: int, kind: str, dtype: type) -> None:
    x = values(numel, dtype, kind)
    magnitudes = np.abs(x).astype(np.float64)
    for quantile in (None, 0.3, 0.99):
        # A magnitude that occurs reaches itself.
        bound = 0.0 if quantile is None else float(np.quantile(magnitudes, quantile, method="nearest"))
        z = magnitudes[(magnitudes >= bound) & (magnitudes > 0)] - bound
        for sums in (
            ops.summed(torch.from_numpy(x), bound, False)[:3],
            reference.excess(torch.from_numpy(x), double(bound)),
            ops.summed(ops.tail(torch.from_numpy(x), double(bound)), bound, False)[:3],
        ):
            assert int(sums[0]) == z.size
            np.testing.assert_allclose([float(sums[1]), float(sums[2])], [z.sum(), (z**2).sum()], rtol=1e-10)


@in_one_test("numel, kind, dtype", product(SIZES, ["normal", "zeros", "small"], [np.float32, np.float64]))
def test_logarithms_of_zeros_are_left_out(numel: int, kind: str, dtype: type) -> None:
    x = values(numel, dtype, kind)
    expected = np.log(np.abs(x[x != 0]).astype(np.float64)).sum()
    for total in (ops.summed(torch.from_numpy(x), 0.0, True)[3], reference.log_sum(torch.from_numpy(x))):
        # A logarithm in float32, of torch, has 24 bits; rounding errors cancel.
        assert float(total) == pytest.approx(expected, rel=1e-6 if dtype is np.float32 else 1e-12, abs=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numel", SIZES)
def test_tail_holds_the_magnitudes_that_reach_the_threshold(numel: int, dtype: type) -> None:
    x = values(numel, dtype, "zeros")
    for bound in (0.0, 0.7, 50.0):
        found = ops.tail(torch.from_numpy(x), double(bound))
        magnitudes = np.abs(x)
        expected = magnitudes[(magnitudes >= bound) & (magnitudes > 0)]
        assert found.numpy().dtype == dtype
        assert found.tolist() == expected.tolist()


def test_tail_is_everything_where_sizes_are_fixed() -> None:
    x = torch.zeros(3, device="meta")
    assert ops.tail(x, torch.zeros((), device="meta")) is x


def test_nothing_is_left_of_nothing() -> None:
    empty, zeros = torch.zeros(0), torch.zeros(5)
    for x in (empty, zeros):
        assert list(ops.summed(x, 0.0, True)) == [0, 0, 0, 0]
        assert [float(part) for part in reference.excess(x, double(0.0))] == [0, 0, 0]
        assert float(reference.log_sum(x)) == 0
    assert host.tail(zeros, 0.0).numel() == 0
