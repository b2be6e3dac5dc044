"""The kernels of the CPU, compiled and in numpy, against whole vectors, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse import ops
from lightning_sparse.core.layout import Gradient, InRuns
from lightning_sparse.core.step import Candidates
from lightning_sparse.ops import Weights, host, reference
from tests.covering import covering, in_one_test
from tests.static_path import static_path

# Around the blocks, chunks and lanes of both, and one of many chunks.
FEW = [1, 33, 1025]
SMALL = [*FEW, 2, 31, 1023, 2049]
MIDDLE = [65_535, 65_537, 131_075]
LARGE = (1 << 19) + 3
SIZES = [*SMALL, *MIDDLE, LARGE]
KINDS = ["normal", "ties", "zeros", "subnormal", "nan", "inf", "wide"]
GRADIENTS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def cells(*axes: list[Any]) -> list[Any]:
    """Where each two values meet with few sizes, and of others each value: what is found does not depend on them."""
    largest = covering(product([LARGE], *axes), together=1, thorough=set(KINDS) - {"normal", "nan"})
    others = covering(product([*SMALL[len(FEW) :], *MIDDLE], *axes), together=1)
    return [*covering(product(FEW, *axes)), *others, *largest]


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


@in_one_test("numel, kind, dtype", cells(KINDS, GRADIENTS))
def test_one_pass_accumulates_clears_and_collects(
    numel: int, kind: str, dtype: torch.dtype, each_kernel: Callable[[], Iterator[str]]
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    spoilt = kind in ("nan", "inf")
    residual = values(numel, "normal" if spoilt else kind, 1).to(wide)
    grad = values(numel, kind if spoilt else "normal", 2).to(dtype)
    grad[: numel // 3] *= 1e-6  # subnormal in float16
    formed = torch.add(grad, residual)
    expected = torch.where(formed.isfinite(), formed, residual)
    magnitudes, zeros = expected.abs(), bits(torch.zeros_like(grad))
    cuts = [numel // 3, numel // 3 + 5, numel // 2 + 70] if kind != "ties" else []
    for bound in (0.0, float(magnitudes.quantile(0.95)) if numel < LARGE else 2.0, float("inf"), float("nan")):
        places = (magnitudes >= torch.tensor(bound, dtype=wide)).nonzero().flatten()
        for kernel in each_kernel():
            acc, given = residual.clone(), grad.clone()
            runs = [run for run in torch.tensor_split(given, cuts) if len(run)]
            found, finite = host.accumulate(acc, runs, bound)
            assert bits(acc) == bits(expected), kernel
            assert bits(given) == zeros, kernel
            assert finite != spoilt, kernel
            if spoilt or len(places) > numel // Candidates.ROOM:
                assert found is None, kernel
            else:
                assert found is not None, kernel
                assert found[0].dtype == torch.int32, kernel
                assert np.array_equal(found[0], places), kernel
                assert bits(found[1]) == bits(magnitudes[places]), kernel


@in_one_test("numel, kind, dtype, pushes", cells(KINDS, GRADIENTS, [False, True]))
def test_one_pass_forms_drifts_and_collects(
    numel: int, kind: str, dtype: torch.dtype, pushes: bool, each_kernel: Callable[[], Iterator[str]]
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    agreed, own = values(numel, "normal", 1).to(wide), values(numel, kind, 2).to(dtype)
    pushed = values(numel, "wide", 3).to(wide) if pushes else None
    drift = agreed - own.to(wide)
    scores = drift if pushed is None else drift * pushed
    spoilt, magnitudes = not bool(drift.isfinite().all()), scores.abs()
    cuts = [numel // 3, numel // 3 + 5, numel // 2 + 70] if kind != "ties" else []
    for bound in (0.0, float(magnitudes.nan_to_num().quantile(0.95)) if numel < LARGE else 2.0, float("inf")):
        places = (magnitudes >= torch.tensor(bound, dtype=wide)).nonzero().flatten()
        for kernel in each_kernel():
            away, score = torch.full_like(agreed, 7), torch.full_like(agreed, 7) if pushes else None
            runs = [run for run in torch.tensor_split(own, cuts) if len(run)]
            found, finite = host.part(away, score, agreed, pushed, runs, bound)
            assert finite != spoilt, kernel
            if spoilt:
                assert found is None, kernel
                continue
            assert bits(away) == bits(drift), kernel
            assert score is None or bits(score) == bits(scores), kernel
            if len(places) > numel // Candidates.ROOM:
                assert found is None, kernel
            else:
                assert found is not None, kernel
                assert np.array_equal(found[0], places), kernel
                assert bits(found[1]) == bits(magnitudes[places]), kernel


@in_one_test("numel, kind", cells(KINDS))
def test_what_reaches_a_bound_is_found_in_order(
    numel: int, kind: str, each_kernel: Callable[[], Iterator[str]]
) -> None:
    x = values(numel, kind)
    magnitudes = np.abs(x.numpy())
    numbers = np.flatnonzero(~np.isnan(magnitudes)).astype(np.int32)
    first, last = numel // 3, numel - numel // 4
    for bound in (-1.0, -0.0, 0.0, 1e-39, 0.5, 2.0, float("inf"), float("nan")):
        reached = magnitudes >= np.float32(bound)
        places = np.flatnonzero(reached)
        inside = places[(places >= first) & (places < last)]
        tail = magnitudes[reached & (magnitudes >= np.finfo(np.float32).smallest_normal)].tobytes()
        for kernel in each_kernel():
            assert np.array_equal(host.above(x, bound, 0, numel), places), (kernel, bound)
            given = torch.from_numpy(numbers), torch.from_numpy(magnitudes[numbers])
            assert np.array_equal(host.reaching_of(*given, bound), places), (kernel, bound)
            assert host.reached(given[1], bound) == len(places), (kernel, bound)
            assert np.array_equal(host.above(x, bound, first, last), inside), (kernel, bound)
            assert host.tail(x, bound).numpy().tobytes() == tail, (kernel, bound)


@in_one_test("numel, kind", product(SIZES, ["normal", "ties", "zeros", "subnormal", "wide"]))
def test_sums_are_those_in_double_precision(numel: int, kind: str) -> None:
    x = values(numel, kind)
    exact = x.double().abs()
    sums = [*ops.summed(x, 0.0, True), *ops.summed(x, 0.7, False)[:3]]
    beyond = (exact - 0.7).clamp(min=0)
    counted = exact[x.abs() >= torch.finfo(torch.float32).tiny]
    first = [counted.numel(), exact.sum(), exact.square().sum(), counted.log().sum()]
    second = [(exact >= np.float32(0.7)).sum(), beyond.sum(), beyond.square().sum()]
    # Torch has logarithms in float32.
    assert sums == pytest.approx([float(e) for e in (*first, *second)], rel=1e-6, abs=1e-12 * float(exact.max()))
    expected = exact.mean(), exact.max(), x.double().mean(), x.double().var(correction=min(1, numel - 1)).sqrt()
    least = 1e-12 * float(exact.mean())  # means of both signs cancel
    torch.testing.assert_close((*ops.mean_and_maximum(x), *ops.moments(x)), expected, rtol=1e-11, atol=least)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_are_taken_and_put(kernel: str, dtype: torch.dtype) -> None:
    x = torch.arange(1000).to(dtype)
    indices = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:300]
    if dtype in (torch.float32, torch.float64):
        assert torch.equal(ops.take(x, indices), x[indices])
        assert torch.equal(ops.take(x, indices[::3]), x[indices[::3]])
    for new in (-x[indices], 0.0):
        expected = x.clone()
        expected[indices] = new
        ops.put_(x, indices, new)
        assert torch.equal(x, expected)


def test_of_nothing_the_union_and_sums_are_empty(each_kernel: Callable[[], Iterator[str]]) -> None:
    nothing, values = torch.empty(0, dtype=torch.int64), torch.empty(0)
    for kernel in each_kernel():
        union, totals, count = ops.add_up([(nothing, values)] * 2, 9)
        assert [union.tolist(), totals.tolist(), int(count)] == [[], [], 0], kernel
        union, count = ops.distinct(nothing, 9)
        assert [union.tolist(), int(count)] == [[], 0], kernel


def test_an_index_outside_of_a_vector_is_an_error(kernel: str) -> None:
    x, outside = torch.zeros(10), torch.tensor([3, 10])
    with pytest.raises(IndexError):
        ops.take(x, outside)
    with pytest.raises(IndexError):
        ops.put_(x, outside, torch.ones(2))


@in_one_test(
    "block, ranks, kind, dtype",
    covering(
        (
            (*shape, kind, dtype)
            for shape in [(1, 3), (7, 2), (256, 4), (70_000, 2)]
            for kind in ["normal", "ties", "zeros"]
            for dtype in [torch.float32, torch.float64]
        ),
        seen_as=lambda block, ranks, kind, dtype: (block, kind, dtype),
    ),
)
def test_top_k_of_blocks_is_that_of_what_they_hold(
    block: int, ranks: int, kind: str, dtype: torch.dtype, each_kernel: Callable[[], Iterator[str]]
) -> None:
    period = block * ranks
    for numel in (period, (4 if block < 1000 else 1) * period + block // 2 + 1, max(20_001, period + 1)):
        x = values(numel, kind).to(dtype)
        for stripe in range(ranks):
            owned = np.flatnonzero(np.arange(numel) % period // block == stripe)
            order = np.argsort(-np.abs(x.numpy()[owned]), kind="stable")
            for k in {1, owned.size // 100, owned.size // 2, owned.size} - {0}:
                expected = np.sort(owned[order[:k]])
                for kernel in each_kernel():
                    found = ops.top_k_of_blocks(x, k, stripe * block, block, period)
                    assert np.array_equal(found, expected), (kernel, numel, stripe, k)


def weights(keep: float, least: float, damping: float) -> Weights:
    """Of a gradient and a residual of unchanged length, when second moments need no correction any more."""
    units = torch.tensor([1.0, 1.0, keep], dtype=torch.float64)
    return Weights(units, torch.zeros((), dtype=torch.float64), keep, least, damping)


WEIGHTS = [weights(0.999, 1e-10, 1 / 400), weights(0.0, 1e-8, 0.01)]


def weighed(acc: Tensor, second: Tensor, grad: Tensor, by: Weights) -> tuple[Any, Any, Any, Any]:
    """The sum, also where it is not finite; what is kept of it and of the second moment; and the score."""
    one = acc.numpy().dtype.type
    keep, add, least, damping = map(one, (by.beta2, 1 - by.beta2, by.eps, by.damping))
    with np.errstate(all="ignore"):
        g, residual, now = grad.to(acc.dtype).numpy(), acc.numpy(), second.numpy()
        formed = residual + g
        squares = np.minimum(now * keep + add * g * g, np.finfo(one).max)
        within = np.minimum(squares + np.square(formed * damping), np.finfo(one).max)
        score = formed / np.sqrt(np.sqrt(within) + least)
    fits = np.isfinite(formed)
    return formed, np.where(fits, formed, residual), np.where(fits, squares, now), score


@in_one_test("numel, kind, dtype, by", cells(KINDS, GRADIENTS, WEIGHTS))
def test_one_pass_forms_second_moments_and_scores(
    numel: int, kind: str, dtype: torch.dtype, by: Weights, each_kernel: Callable[[], Iterator[str]]
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    grad, residual = values(numel, kind, 1).to(dtype), values(numel, "normal", 2).to(wide)
    now = values(numel, "wide", 3).to(wide).square().clamp(max=torch.finfo(wide).max)
    one = residual.numpy().dtype.type
    formed, acc, second, score = weighed(residual, now, grad, by)
    fits = np.isfinite(formed)
    magnitudes = np.where(fits, np.abs(score), -1)
    for bound in (0.0, max(0.0, float(np.sort(magnitudes[:1000])[-50:][0])), float("inf")):
        places = np.flatnonzero(magnitudes >= one(bound))
        for kernel, runs in ((kernel, runs) for kernel in each_kernel() for runs in (1, 3)):
            given = grad.clone()
            lie = list(given.tensor_split(runs))
            in_place = runs == 1 and wide == dtype
            scores = given if in_place else torch.empty_like(residual)
            sums, squares = residual.clone(), now.clone()
            found, finite = host.weigh(sums, squares, scores, lie, by, bound)
            for ours, theirs in ((sums, acc), (squares, second), (scores[torch.from_numpy(fits)], score[fits])):
                np.testing.assert_array_equal(ours.numpy(), theirs, err_msg=kernel)
            assert in_place or not given.any(), kernel
            assert finite == bool(fits.all()), kernel
            if not finite or len(places) > numel // Candidates.ROOM:
                assert found is None, kernel
            else:
                assert found is not None, kernel
                np.testing.assert_array_equal(found[0], places, err_msg=kernel)
                np.testing.assert_array_equal(found[1], magnitudes[places].astype(one), err_msg=kernel)


BAD = ["inf", "-inf", "nan", "beyond", "below", "against"]
"""Not finite, or the sum of two numbers that are; the latter not in float16, whose largest number is too small."""


def spoilt(numel: int, bad: str, dtype: torch.dtype, places: list[int]) -> tuple[Tensor, Tensor]:
    """What is remembered, and a gradient with which it is not finite at some places."""
    wide = torch.promote_types(dtype, torch.float32)
    residual, grad = values(numel, "normal", 1).to(wide), values(numel, "normal", 2).to(dtype)
    if bad in ("beyond", "below"):
        sign = 1 if bad == "beyond" else -1
        residual[places], grad[places] = sign * torch.finfo(wide).max, sign * torch.finfo(dtype).max
    elif bad == "against":
        residual[places], grad[places] = torch.finfo(wide).max, -torch.inf
    else:
        grad[places] = float(bad)
    return residual, grad


NOT_FINITE = covering(
    product([4200, 65, 15, 1, 64, 2047, 2049], BAD, GRADIENTS),
    together=1,
)


@in_one_test("numel, bad, dtype", NOT_FINITE)
def test_what_would_not_be_finite_is_left_as_it_is(
    numel: int, bad: str, dtype: torch.dtype, each_kernel: Callable[[], Iterator[str]]
) -> None:
    cuts = sorted({min(cut, numel) for cut in (1, 66, numel // 2 + 3, numel - 1)} - {0, numel})
    ends = {0, 1, 15, 16, 63, 64, 65, 66, 127, 128, numel // 2 + 2, numel // 2 + 3, 2047, 2048, numel - 2, numel - 1}
    ends = sorted(end for end in ends if 0 <= end < numel)
    now, by = values(numel, "normal", 3).to(torch.promote_types(dtype, torch.float32)).square(), WEIGHTS[0]
    for places in ([], *([end] for end in ends), ends):
        residual, grad = spoilt(numel, bad, dtype, places)
        formed = torch.add(grad, residual)
        fits = formed.isfinite()
        whole = bool(fits.all())
        assert whole == (not places or (bad in ("beyond", "below") and dtype == torch.float16))
        expected, decayed = torch.where(fits, formed, residual), residual * 0.5 + grad
        less = torch.where(decayed.isfinite(), decayed, residual)
        _, acc, second, score = weighed(residual, now, grad, by)
        for kernel, split in ((kernel, split) for kernel in each_kernel() for split in (False, True)):
            told = kernel, places, split

            def runs(split: bool = split, grad: Tensor = grad) -> list[Tensor]:
                return list(torch.tensor_split(grad.clone(), cuts if split else []))

            given, sums = runs(), residual.clone()
            found, finite = host.accumulate(sums, given, 1.0)
            assert bits(sums) == bits(expected), told
            assert not any(run.any() for run in given), told
            assert finite == whole, told
            assert whole or found is None, told
            given, sums, squares, scores = runs(), residual.clone(), now.clone(), torch.empty_like(residual)
            found, finite = host.weigh(sums, squares, scores, given, by, 1.0)
            assert (bits(sums), bits(squares)) == (acc.tobytes(), second.tobytes()), told
            assert bits(scores[fits]) == score[fits.numpy()].tobytes(), told
            assert not any(run.any() for run in given), told
            assert finite == whole, told
            assert whole or found is None, told
            lie, sums, squares = Gradient(runs()), residual.clone(), now.clone()
            if residual.dtype == lie.dtype:
                found, finite = host.weigh(sums, squares, InRuns(lie), lie.runs, by, 1.0)
                assert (bits(sums), bits(squares)) == (acc.tobytes(), second.tobytes()), told
                assert bits(torch.cat(lie.runs)[fits]) == score[fits.numpy()].tobytes(), told
                assert finite == whole, told
                assert whole or found is None, told
        for decay, left, all_fit in ((1.0, expected, whole), (0.5, less, bool(decayed.isfinite().all()))):
            sums = residual.clone()
            assert bool(reference.accumulate_(sums, torch.tensor_split(grad, cuts), decay)) == all_fit, places
            assert bits(sums) == bits(left), places


@hypothesis.settings(
    deadline=None, max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(data=st.data())
def test_any_gradient_is_added_as_operations_on_whole_vectors_do(
    data: st.DataObject, each_kernel: Callable[[], Iterator[str]]
) -> None:
    numel = data.draw(st.integers(1, 300))
    dtype = data.draw(st.sampled_from(GRADIENTS))
    wide = torch.promote_types(dtype, torch.float32)
    at, cuts = st.integers(0, numel - 1), sorted(data.draw(st.sets(st.integers(1, numel), max_size=3)) - {numel})
    residual, grad = values(numel, "wide", 1).to(wide), values(numel, "zeros", 2).to(dtype)
    anything = st.floats(width=16 if dtype == torch.float16 else 32)
    for place, value in data.draw(st.lists(st.tuples(at, anything), max_size=4)):
        grad[place] = value
    largest = st.floats(width=32, allow_nan=False, allow_infinity=False)
    for place, value in data.draw(st.lists(st.tuples(at, largest), max_size=4)):
        residual[place] = value
    now = values(numel, "normal", 3).to(wide).square()
    formed, acc, second, _ = weighed(residual, now, grad, WEIGHTS[1])
    finite = bool(np.isfinite(formed).all())
    for kernel in each_kernel():
        sums, squares, score = residual.clone(), now.clone(), torch.empty_like(residual)
        assert host.accumulate(sums, torch.tensor_split(grad.clone(), cuts), 1.0)[1] == finite, kernel
        assert bits(sums) == acc.tobytes(), kernel
        sums, runs = residual.clone(), torch.tensor_split(grad.clone(), cuts)
        assert host.weigh(sums, squares, score, runs, WEIGHTS[1], 1.0)[1] == finite, kernel
        assert (bits(sums), bits(squares)) == (acc.tobytes(), second.tobytes()), kernel


def test_infinity_is_noticed_whatever_is_collected(each_kernel: Callable[[], Iterator[str]]) -> None:
    for kernel in each_kernel():
        for bound in (1.0, float("inf"), float("nan")):
            acc, grad = torch.ones(70_000), torch.zeros(70_000)
            grad[3], grad[5] = -float("inf"), 2.0
            found, finite = host.accumulate(acc, [grad], bound)
            assert not finite, (kernel, bound)
            assert found is None, (kernel, bound)
            assert acc[3:6].tolist() == [1, 1, 3], (kernel, bound)
            assert not grad.any(), (kernel, bound)


def test_large_numbers_in_a_run_that_is_not_aligned_are_finite(each_kernel: Callable[[], Iterator[str]]) -> None:
    for kernel in each_kernel():
        numel = LARGE + 16
        runs = [torch.zeros(1), torch.zeros(numel - 1)]
        runs[1][5:15] = 2e38
        acc = torch.zeros(numel)
        assert host.accumulate(acc, runs, 1.0)[1], kernel
        assert acc[5:17].tolist() == torch.tensor([0.0, *[2e38] * 10, 0.0]).tolist(), kernel


@hypothesis.settings(
    deadline=None, max_examples=50, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    numel=st.integers(1, 40), picks=st.lists(st.integers(0, 39), max_size=60), whole=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_what_was_sent_is_taken_out_once(
    numel: int,
    picks: list[int],
    whole: bool,
    dtype: torch.dtype,
    each_kernel: Callable[[], Iterator[str]],
) -> None:
    before, sent = values(numel + 1, "wide", 1).to(dtype), values(numel + 1, "normal", 2).to(dtype)
    before[-1] = 0
    indices = torch.tensor([pick for pick in picks if pick < numel], dtype=torch.int64)
    given = None if whole else sent[indices]
    expected = before.clone()
    for place in {*indices.tolist()}:
        expected[place] = 0 if whole else before[place] - sent[place]
    for kernel in each_kernel():
        x = before.clone()
        ops.subtract_at_(x, indices, given)
        assert bits(x) == bits(expected), kernel
    padded, more = torch.cat([indices, indices.new_full((3,), numel)]), torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    with static_path():
        x = before.clone()
        ops.subtract_at_(x, padded, None if given is None else torch.cat([given, more]))
    assert bits(x) == bits(expected)
