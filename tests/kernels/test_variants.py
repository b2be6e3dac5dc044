"""The kernels of the CPU, compiled and in numpy, against whole vectors, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.candidates import Candidates
from lightning_sparse.kernels import host, native

# Around the blocks, chunks and lanes of both; from 2**20 on, compiled code writes past the caches.
SIZES = [1, 2, 31, 33, 1023, 1025, 2049, 65_535, 65_537, 131_075, (1 << 20) + 3]
KINDS = ["normal", "ties", "zeros", "subnormal", "nan", "inf", "wide"]
GRADIENTS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def values(numel: int, kind: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    if kind == "ties":
        x = (2 * x).round() / 2
    elif kind == "zeros":
        x = torch.where(x > 0, x, -0.0).where(x < 1, 0.0)
    elif kind == "subnormal":
        x *= 1e-39
    elif kind == "nan":
        x[numel // 2] = float("nan")
    elif kind == "inf":
        x[-1] = -float("inf")
    elif kind == "wide":
        x *= 10.0 ** torch.randint(-30, 30, (numel,), generator=generator)
    return x


def bits(x: Tensor) -> bytes:
    return x.numpy().tobytes() if x.dtype != torch.bfloat16 else x.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("dtype", GRADIENTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
def test_one_pass_accumulates_clears_and_collects(kernel: str, numel: int, kind: str, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    residual, grad = values(numel, kind, 1).to(wide), values(numel, "normal", 2).to(dtype)
    grad[: numel // 3] *= 1e-6  # subnormal in float16
    expected = torch.add(grad, residual)
    magnitudes = expected.abs()
    reached = magnitudes.where(~magnitudes.isnan(), -1.0)
    for bound in (0.0, max(0.0, float(reached.quantile(0.95))) if numel < 2**20 else 2.0, float("inf")):
        acc, given, before = torch.empty_like(expected), grad.clone(), residual.clone()
        found, finite = host.accumulate(acc, residual, given, bound)
        nan = expected.isnan()
        assert bits(acc[~nan]) == bits(expected[~nan])
        assert bool(acc[nan].isnan().all())
        assert bits(given) == bits(torch.zeros_like(given))
        assert bits(residual) == bits(before)
        assert finite == bool(expected.isfinite().all())
        places = (reached >= torch.tensor(bound, dtype=wide)).nonzero().flatten()
        if len(places) > numel // Candidates.ROOM:
            assert found is None
        else:
            assert found is not None
            assert found[0].dtype == np.int32
            assert found[0].tolist() == places.tolist()
            assert found[1].tobytes() == magnitudes[places].numpy().tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
def test_what_reaches_a_bound_is_found_in_order(kernel: str, numel: int, kind: str) -> None:
    x = values(numel, kind)
    for bound in (-1.0, -0.0, 0.0, 1e-39, 0.5, 2.0, float("inf"), float("nan")):
        places = np.flatnonzero(np.abs(x.numpy()) >= np.float32(bound))
        assert host.above(x, bound, 0, numel).tolist() == places.tolist()
        indices, magnitudes = host.reaching(x, bound)
        assert indices.tolist() == places.tolist()
        assert bits(magnitudes) == bits(x.abs()[places])
        first, last = numel // 3, numel - numel // 4
        inside = places[(places >= first) & (places < last)]
        assert host.above(x, bound, first, last).tolist() == inside.tolist()
        tail = np.abs(x.numpy())
        tail = tail[tail >= max(np.float32(bound), np.finfo(np.float32).smallest_normal)]
        assert host.tail(x, bound).numpy().tobytes() == tail.tobytes()
    assert host.all_finite(x) == bool(x.isfinite().all())


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "subnormal", "wide"])
@pytest.mark.parametrize("numel", SIZES)
def test_sums_have_the_same_bits(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel: str, numel: int, kind: str
) -> None:
    x = values(numel, kind)
    exact = x.double().abs()
    found = [*host.excess(x, 0.0), *host.excess(x, 0.7), *host.moments(x), *host.mean_and_maximum(x)]
    monkeypatch.setattr(native, "library", None)
    plain = [*host.excess(x, 0.0), *host.excess(x, 0.7), *host.moments(x), *host.mean_and_maximum(x)]
    assert torch.stack(found).numpy().tobytes() == torch.stack(plain).numpy().tobytes()
    if numel == 1:
        plain[7] = torch.zeros_like(plain[7]) if plain[7].isnan() else plain[7] - 1  # it has no deviation
    beyond = (exact - 0.7).clamp(min=0)
    expected = [
        *((x.abs() >= torch.finfo(torch.float32).tiny).sum(), exact.sum(), exact.square().sum()),
        *((exact >= np.float32(0.7)).sum(), beyond.sum(), beyond.square().sum()),
        *(x.double().mean(), x.double().var(correction=min(1, numel - 1)).sqrt(), exact.mean(), exact.max()),
    ]
    torch.testing.assert_close(
        torch.stack(plain), torch.stack([e.double() for e in expected]), rtol=1e-9, atol=1e-12 * float(exact.max()),
        equal_nan=True,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_are_taken_and_put(kernel: str, dtype: torch.dtype) -> None:
    x = torch.arange(1000).to(dtype)
    indices = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:300]
    if dtype in (torch.float32, torch.float64):
        assert torch.equal(kernels.take(x, indices), x[indices])
        assert torch.equal(kernels.take(x, indices[::3]), x[indices[::3]])
    for new in (-x[indices], 0.0):
        expected = x.clone()
        expected[indices] = new
        kernels.put_(x, indices, new)
        assert torch.equal(x, expected)


def test_an_index_outside_of_a_vector_is_an_error(kernel: str) -> None:
    x, outside = torch.zeros(10), torch.tensor([3, 10])
    with pytest.raises(IndexError):
        kernels.take(x, outside)
    with pytest.raises(IndexError):
        kernels.put_(x, outside, torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("block", "ranks"), [(1, 3), (7, 2), (256, 4), (70_000, 2)])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros"])
def test_top_k_of_blocks_is_that_of_what_they_hold(
    kernel: str, kind: str, block: int, ranks: int, dtype: torch.dtype
) -> None:
    period = block * ranks
    for numel in (period, 4 * period + block // 2 + 1, 150_001):
        x = values(numel, kind).to(dtype)
        for stripe in range(ranks):
            owned = np.flatnonzero(np.arange(numel) % period // block == stripe)
            for k in {1, owned.size // 100, owned.size // 2, owned.size} - {0}:
                order = np.argsort(-np.abs(x.numpy()[owned]), kind="stable")[:k]
                found = kernels.top_k_of_blocks(x, k, stripe * block, block, period)
                assert found.tolist() == sorted(owned[order].tolist())
