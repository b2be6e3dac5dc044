"""Kernels of the second moment against operations of torch, in Triton's interpreter, and so at small sizes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_sparse.core.step import Candidates
from lightning_sparse.ops import Weights, on_device, reference
from tests.covering import covering
from tests.ops.interpreted import ExactRoots, in_triton, interpret
from tests.ops.test_triton import KINDS, TILE, marked, scratch_for
from tests.ops.test_variants import bits, values

interpret()

pytestmark = pytest.mark.usefixtures("silent")

from lightning_sparse.ops.triton import dense as triton_dense  # noqa: E402
from lightning_sparse.ops.triton import launch as triton_launch  # noqa: E402

thorough = pytest.mark.thorough
BETA2, EPS, DAMPING = 1 - 2**-10, 1e-8, float(torch.tensor(1 / 400))


def same(found: Tensor, expected: Tensor) -> None:
    nan = expected.isnan()
    assert bits(found[~nan]) == bits(expected[~nan])
    assert bool(found[nan].isnan().all())


def moments_of(given: Tensor, now: Tensor, keep: Tensor) -> Tensor:
    """Each operation rounded by itself."""
    return (now * keep + given * (1 - BETA2) * given).clamp(max=torch.finfo(torch.float32).max)


def scores_of(acc: Tensor, second: Tensor, power: Tensor) -> Tensor:
    score = torch.empty_like(acc)
    with ExactRoots():
        by = Weights(torch.ones(3, dtype=torch.float64), power, 1.0, EPS, DAMPING)
        reference.weigh_(acc.clone(), second.clone(), score, [torch.full_like(acc, -0.0)], by)
    return score


CELLS = covering(
    product(KINDS, (1, 31, TILE, 2 * TILE + 5), (torch.float32, torch.bfloat16, torch.float16), (False, True)),
    thorough=set(KINDS) - {"normal", "nan", "wide"},
)


@pytest.mark.parametrize(("kind", "numel", "dtype", "changes"), CELLS)
def test_one_pass_forms_scores_and_notes(kind: str, numel: int, dtype: torch.dtype, changes: bool) -> None:
    residual, grad = values(numel, "normal", 1), values(numel, kind, 2).to(dtype)
    now, power = values(numel, "wide", 3).square().clamp(max=1e38), torch.tensor(BETA2, dtype=torch.float64)
    given, acc, second, s = grad.clone(), residual.clone(), now.clone(), scratch_for(numel, 0.5)
    score = given if dtype == torch.float32 else torch.empty(numel)  # in the gradient's place, where it fits
    take, carry = (0.5, 0.75) if changes else (1.0, 1.0)
    units = torch.tensor([take, carry, BETA2 * carry**2], dtype=torch.float64)
    by = Weights(units, power, BETA2, EPS, DAMPING)
    triton_dense.weigh_(acc, second, score, given, by, *s.begin())
    wide = (grad * take).float()
    total, moments = wide + residual * carry, moments_of(wide, now, units[2].float())
    finite = total.isfinite()
    expected = torch.where(finite, total, residual), torch.where(finite, moments, now)
    for found, wanted in zip((acc, second), expected, strict=True):
        assert bits(found) == bits(wanted)
    scores = scores_of(*expected, power)
    same(score, scores)
    reached = scores.abs() >= 0.5
    assert marked(s.words, numel) == reached.nonzero().flatten().tolist()
    programs = triton_launch.Share.of(numel).programs
    assert s.counts[:programs].tolist() == [int(part.sum()) for part in reached.split(TILE)]
    assert bool(s.finite) == bool(finite.all())


@pytest.mark.parametrize("kind", ["wide", "nan", pytest.param("inf", marks=thorough)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=thorough), torch.float64])
def test_kernels_take_what_they_are_made_for(dtype: torch.dtype, kind: str) -> None:
    numel, power = TILE + 301, torch.tensor(BETA2, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    grad, residual, now = values(numel, kind, 1).to(dtype), values(numel, "normal", 2).to(wide), values(numel, "normal")
    units = torch.tensor([0.5, 0.75, BETA2 * 0.75**2], dtype=torch.float64)
    made, hints = [], [Candidates(), None]
    for candidates in hints:
        vectors = residual.clone(), now.abs().to(wide), torch.empty(numel, dtype=wide)
        with in_triton() as chosen, ExactRoots(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_device, "FEW", 99)
            patch.setattr(reference, "CHUNK", 1000)
            by = Weights(units, power, BETA2, EPS, DAMPING)
            finite = on_device.weigh_(*vectors, [grad.clone()], by, candidates)
            assert chosen.trouble is None
            assert len(chosen._tried) == (dtype != torch.float64 and candidates is not None)
        made.append((finite, *vectors))
    assert bool(made[0][0]) == bool((grad * 0.5 + residual * 0.75).isfinite().all())
    torch.testing.assert_close(*made, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["wide", "nan", "inf", "zeros"])
def test_divisors_are_those_of_torch(kind: str) -> None:
    second, average = values(700, "wide", 1).square(), values(700, kind, 2)
    second[:50] = average[50:100] = math.nan
    power = torch.tensor(0.25, dtype=torch.float64)
    with ExactRoots():
        expected = reference.divisors(second, average, power, EPS, DAMPING)
        with in_triton() as chosen, pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_device, "FEW", 99)
            found = on_device.divisors(second, average, power, EPS, DAMPING)
            assert chosen.trouble is None
            assert not chosen.refused
    same(found, expected)
