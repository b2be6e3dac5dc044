"""Sketches of gradients: which sums they are, and that norms follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparse.ops.c import native
from lightning_sparse.ops.sketch import SHIFTS, WIDTH, sketch
from tests.ops.test_no_host_sync import DEVICE, no_waiting

LENGTHS = [5, 0, 70_000, 1, 4093, 3, 30_011, 0]
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-14, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""Of gradients, and how far sums may be off."""


def splitmix(seed: int, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def oracle(x: np.ndarray, seed: int, width: int) -> np.ndarray:
    """Row by row in float64."""
    rows = math.ceil(len(x) / width)
    words = splitmix(int(splitmix(seed % 2**64, 1)[0]), width + SHIFTS - 1 + rows)
    signs = np.where(words >> np.uint64(63), -1.0, 1.0)
    shared, own = signs[: width + SHIFTS - 1], signs[width + SHIFTS - 1 :]
    out = np.zeros(width)
    for r in range(rows):
        row = x[r * width : (r + 1) * width]
        out[: len(row)] += own[r] * shared[r % SHIFTS :][: len(row)] * row
    return out


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Tensor, expected: np.ndarray, tolerance: float) -> None:
    """Sums of many numbers, some of them near zero: compared with the largest one."""
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [WIDTH, 1021, 16])  # of 16, there are more than 4096 rows
def test_a_sketch_is_the_sum_of_rows_with_signs(
    width: int, dtype: torch.dtype, each_kernel: Callable[[], Iterator[str]]
) -> None:
    x = normal(sum(LENGTHS)).to(dtype)
    for seed in (0, 12345, -1):
        expected = oracle(x.double().numpy(), seed, width)
        for _ in each_kernel():
            found = sketch(x.split(LENGTHS), seed, width)
            assert found.shape == (width,)
            assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            close(found, expected, DTYPES[dtype])


def test_cutting_changes_no_bit(kernel: str) -> None:
    x = normal(200_003).float()
    expected = sketch([x], 7)
    for sizes in ([3] * 3000, [4093] * 48, [16_372, 5, 100_000], [199_999], [1, 0, 0, 2]):
        cut = [*x[: sum(sizes)].split(sizes), x[sum(sizes) :]]
        assert torch.equal(sketch(cut, 7), expected)


def test_dtypes_and_shapes_may_differ(each_kernel: Callable[[], Iterator[str]]) -> None:
    x = normal(30_000).float()
    narrow, half = x[:9000].bfloat16(), x[9000:20_000].half()
    matrix = x[20_000:].view(100, 100).t()  # in the order of memory
    joined = torch.cat([narrow.float(), half.float(), x[20_000:]])
    for _ in each_kernel():
        for pieces in ([narrow.view(90, 100), half, matrix], [narrow, half.view(11, 1000), matrix]):
            close(sketch(pieces, 3), oracle(joined.double().numpy(), 3, WIDTH), 2e-6)
        wide = sketch([narrow, half, matrix.double()], 3)
        assert wide.dtype == torch.float64
        close(wide, oracle(joined.double().numpy(), 3, WIDTH), 1e-14)
    apart = torch.ones(20, 2)[:, 0]
    close(sketch([apart], 3, 7), oracle(np.ones(20), 3, 7), 1e-6)


def test_the_mean_of_sketches_is_that_of_the_mean(each_kernel: Callable[[], Iterator[str]]) -> None:
    ranks = torch.stack([normal(100_000, seed).float() for seed in range(5)])
    for _ in each_kernel():
        mean = torch.stack([sketch([rank[:40_000], rank[40_000:]], 11) for rank in ranks]).mean(0)
        close(mean, sketch([ranks.mean(0)], 11).double().numpy(), 3e-6)


def test_seeds_give_other_signs_and_the_same_seed_the_same_bits(each_kernel: Callable[[], Iterator[str]]) -> None:
    x = normal(100_000).float()
    for _ in each_kernel():
        sketches = [sketch([x], seed) for seed in (0, 1, 2, 2**40, -1)]
        cosines = torch.corrcoef(torch.stack(sketches)) - torch.eye(5)
        assert float(cosines.abs().max()) < 5 / math.sqrt(WIDTH)
        assert torch.equal(sketch([x.clone()], 2), sketches[2])


def test_nothing_is_zeros(each_kernel: Callable[[], Iterator[str]]) -> None:
    for _ in each_kernel():
        for pieces in ([torch.empty(0)], [torch.empty(0, 3), torch.zeros(10), torch.empty(0)]):
            assert torch.equal(sketch(pieces, 0), torch.zeros(WIDTH))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_seen(dtype: torch.dtype, value: float, each_kernel: Callable[[], Iterator[str]]) -> None:
    for place in (0, 4092, 4093, 20_000, 99_999):
        x = normal(100_000).to(dtype)
        x[place] = value
        for _ in each_kernel():
            found = sketch([x[:50_000], x[50_000:]], 5)
            assert not math.isfinite(float(found.norm()))
            assert torch.isfinite(found).sum() == WIDTH - 1
            x[(place + WIDTH) % 90_000] = -value  # infinities of both signs
            assert not math.isfinite(float(sketch([x], 5).norm()))
            x[(place + WIDTH) % 90_000] = 0.0


def test_a_gradient_with_a_graph_is_taken(each_kernel: Callable[[], Iterator[str]]) -> None:
    x = torch.ones(10, requires_grad=True)
    for _ in each_kernel():
        found = sketch([x * 2], 0, 3)
        assert not found.requires_grad
        close(found, oracle(np.full(10, 2.0), 0, 3), 1e-6)


def test_a_device_is_not_waited_for() -> None:
    pieces = [torch.empty(size, device=DEVICE, dtype=dtype) for size in (5, 9_000_000) for dtype in DTYPES]
    with no_waiting():
        assert sketch(pieces, 1).device == DEVICE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_sees_no_synchronisation() -> None:
    x = normal(9_000_000).float()
    pieces = [piece.to("cuda") for piece in (x[:10], x[10:6_000_000], x[6_000_000:].bfloat16())]
    sketch(pieces, 1)  # the first time, kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sketch(pieces, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    joined = torch.cat([piece.double() for piece in pieces])
    close(found.cpu(), oracle(joined.cpu().numpy(), 2, WIDTH), 1e-5)


NUMEL = 600_000
ALIKE: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "independent": lambda rng: rng.normal(size=NUMEL),
    "the same everywhere": lambda rng: np.ones(NUMEL),
    **{
        f"periodic with {period}": lambda rng, period=period: np.tile(rng.normal(size=period), NUMEL // period)
        for period in (500, 512, 768, 1024, 4096)
    },
    "of rank one, positive": lambda rng: np.outer(rng.random(NUMEL // 512), rng.random(512)).ravel(),
    "of rank three": lambda rng: (rng.normal(size=(NUMEL // 768, 3)) @ rng.normal(size=(3, 768))).ravel(),
    "one column": lambda rng: np.arange(NUMEL) % 1024 == 5,
    "one huge coordinate": lambda rng: np.where(np.arange(NUMEL) == 12_345, 1e4, rng.normal(size=NUMEL)),
    "large rows": lambda rng: (rng.normal(size=(NUMEL // 512, 512)) * rng.pareto(1.5, (NUMEL // 512, 1))).ravel(),
    "few": lambda rng: rng.normal(size=NUMEL) * (rng.random(NUMEL) < 0.01),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_norms_are_those_of_sketches_for_gradients_of_any_structure(kind: str) -> None:
    seeds = 150 if native.library else 40
    x = torch.from_numpy(ALIKE[kind](np.random.default_rng(0)).astype(np.float32))
    norms = torch.stack([sketch([x], seed).double().norm() for seed in range(seeds)]) / x.double().norm()
    assert float((norms - 1).square().mean().sqrt()) < 0.02
    squares = norms.square()
    assert abs(float(squares.mean()) - 1) < 4 * float(squares.std()) / math.sqrt(seeds) + 1e-6


def test_small_parameters_of_one_size_do_not_meet_in_few_places() -> None:
    biases = [torch.ones(3) for _ in range(2000)]
    norms = torch.stack([sketch(biases, seed).norm() for seed in range(60)]) / math.sqrt(6000)
    assert float((norms - 1).square().mean().sqrt()) < 0.02
