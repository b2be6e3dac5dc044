"""Kernels of the second moment against operations of torch, in Triton's interpreter, and so at small sizes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_sparse.ops import on_device, reference
from lightning_sparse.ops.host import top_k_and_stripe
from tests.covering import covering
from tests.ops.interpreted import ExactRoots, in_triton, interpret
from tests.ops.test_triton import KINDS, SHARES, TILE, marked, scratch_for
from tests.ops.test_variants import bits, values

interpret()

pytestmark = pytest.mark.usefixtures("silent")

from lightning_sparse.ops.triton import launch as triton_launch  # noqa: E402
from lightning_sparse.ops.triton import second as triton_second  # noqa: E402
from lightning_sparse.ops.triton import select as triton_select  # noqa: E402

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
        reference.score_(score, acc, second, power, EPS, DAMPING)
    return score


CELLS = covering(
    product(KINDS, (1, 31, TILE, 2 * TILE + 5), (torch.float32, torch.bfloat16, torch.float16), (False, True)),
    thorough=set(KINDS) - {"normal", "nan", "wide"},
)


@pytest.mark.parametrize(("kind", "numel", "dtype", "scaled"), CELLS)
def test_one_pass_forms_clears_and_notes(kind: str, numel: int, dtype: torch.dtype, scaled: bool) -> None:
    residual, grad = values(numel + 1, "normal", 1), values(numel, kind, 2).to(dtype)
    now, power = values(numel + 1, "wide", 3).square().clamp(max=1e38), torch.tensor(BETA2, dtype=torch.float64)
    scale = torch.tensor(3.0)
    given, acc, second, by = grad.clone(), residual.clone(), now.clone(), torch.empty(2)
    s, bound = scratch_for(numel), torch.tensor(0.5)
    weighed = triton_second.Weighed(second, by)
    noted = s.words, s.counts, s.broken, bound
    take, carry = (0.5, 0.75) if scaled else (1.0, 1.0)
    units = torch.tensor([take, carry, BETA2 * carry**2])
    triton_second.weigh_(acc, weighed, given, scale if scaled else None, power, units, BETA2, EPS, DAMPING, *noted)
    wide = ((grad.float() / scale if scaled else grad) * take).float()
    total, moments = wide + residual[:-1] * carry, moments_of(wide, now[:-1], units[2])
    finite = total.isfinite()
    expected = torch.where(finite, total, residual[:-1]), torch.where(finite, moments, now[:-1])
    for found, wanted in zip((acc, second), expected, strict=True):
        assert bits(found[:-1]) == bits(wanted)
        assert float(found[-1]) == 0
    assert not given.any()
    reached = scores_of(*expected, power).abs() >= bound
    assert marked(s.words, numel) == reached.nonzero().flatten().tolist()
    programs = triton_launch.Share.of(numel).programs
    assert s.counts[:programs].tolist() == [int(part.sum()) for part in reached.split(TILE)]
    assert bool(s.broken) == (not bool(finite.all()))
    assert by.tolist() == (torch.tensor([EPS, DAMPING], dtype=torch.float64) * math.sqrt(1 - BETA2)).float().tolist()


@pytest.mark.parametrize(
    ("kind", "numel", "bound", "case"),
    [
        ("ties", TILE + 477, 0.7, SHARES[0]),
        *(
            pytest.param(*each, marks=thorough)
            for each in product(
                ("normal", "ties", "zeros", "subnormal", "wide"), (1, 700), (math.inf, 0.7, 0.0), SHARES
            )
        ),
    ],
)
def test_scores_decide_what_is_picked(kind: str, numel: int, bound: float, case: tuple[float, float, int, int]) -> None:
    acc, (share, spare, turn, n) = torch.cat([values(numel, kind), torch.zeros(1)]), case
    second, power = torch.full((numel + 1,), 0.25), torch.tensor(0.5, dtype=torch.float64)
    second[::2] = 4.0
    score = scores_of(acc[:-1], second[:-1], power)
    first, others = math.ceil(share * numel), math.ceil(spare * numel)
    s, slots = scratch_for(numel), first + others + 3
    _note(score, bound, s)
    least = torch.tensor([EPS * math.sqrt(0.5), DAMPING * math.sqrt(0.5)])
    found = triton_select.pick(
        acc[:-1], s, torch.tensor(bound), first, slots, torch.tensor(others, dtype=torch.int32), turn, n,
        triton_second.Weighed(second, least),
    )  # fmt: skip
    expected, marks = top_k_and_stripe(score, first, others, turn, n)
    number = int(found.number)
    assert found.keys[:number].tolist() == (2 * expected + marks).tolist()
    largest = found.largest.max().view(1).view(torch.float32)
    assert float(largest) == (float(acc[expected].abs().max()) if number else 0)


def _note(score: Tensor, bound: float, s: triton_select.Scratch) -> None:
    from lightning_sparse.ops.triton import dense as triton_dense

    triton_dense.look(score, s.words, s.counts, s.broken, torch.tensor(bound))


@pytest.mark.parametrize("kind", ["wide", "nan", pytest.param("inf", marks=thorough)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=thorough)])
def test_other_methods_get_the_same_of_two_passes(dtype: torch.dtype, kind: str) -> None:
    numel, power = TILE + 301, torch.tensor(BETA2, dtype=torch.float64)
    grad, residual, now = values(numel, kind, 1).to(dtype), values(numel, "normal", 2), values(numel, "normal").abs()
    acc, second, score, given = residual.clone(), now.clone(), torch.empty(numel), grad.clone()
    units = torch.tensor([0.5, 0.75, BETA2 * 0.75**2], dtype=torch.float64)
    with in_triton() as chosen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "FEW", 99)
        finite = on_device.form_(acc, second, grad, units, BETA2)
        on_device.score_(score, acc, second, power, EPS, DAMPING)
        assert chosen.trouble is None
        assert len(chosen._tried) == 2
        double = acc.double()
        on_device.score_(torch.empty_like(double), double, second.double(), power, EPS, DAMPING)
        assert len(chosen._tried) == 2
    clipped = (grad * 0.5).float()  # in the gradient's dtype, as where it is clipped in place
    total = clipped + residual * 0.75
    whole = total.isfinite()
    assert bool(finite) == bool(whole.all())
    assert bits(acc) == bits(torch.where(whole, total, residual))
    assert bits(second) == bits(torch.where(whole, moments_of(clipped, now, units[2].float()), now))
    same(score, scores_of(acc, second, power))
    same(grad, given)
    kept, moments = residual.double(), now.double()
    assert bool(on_device.form_(kept, moments, grad.double(), units, BETA2)) == bool(whole.all())
    moments.clamp_(max=torch.finfo(torch.float32).max)
    torch.testing.assert_close((kept.float(), moments.float()), (acc, second), rtol=1e-3, atol=1e-6)
