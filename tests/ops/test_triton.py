"""Kernels in Triton against their twins: in Triton's interpreter, and so at small sizes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_sparse.core.step import Context, Selection
from lightning_sparse.methods.exchanges import packed_union
from lightning_sparse.ops import choose, fill_if_, host, on_device, pad, reference
from lightning_sparse.ops.form import Form
from tests.covering import covering
from tests.ops.interpreted import in_triton, interpret
from tests.ops.test_variants import bits, values

interpret()

pytestmark = pytest.mark.usefixtures("silent")

from lightning_sparse.ops.triton import dense as triton_dense  # noqa: E402  # after it is known how kernels are to be defined
from lightning_sparse.ops.triton import lanes as triton_lanes  # noqa: E402
from lightning_sparse.ops.triton import launch as triton_launch  # noqa: E402
from lightning_sparse.ops.triton import select as triton_select  # noqa: E402
from lightning_sparse.ops.triton import union as triton_union  # noqa: E402

TILE, PROGRAMS = triton_launch.TILE, triton_launch.PROGRAMS
KINDS = ["normal", "ties", "zeros", "subnormal", "nan", "inf", "wide"]
FINITE = [kind for kind in KINDS if kind not in ("nan", "inf")]
thorough = pytest.mark.thorough


def scratch_for(numel: int) -> triton_select.Scratch:
    control, histograms = torch.zeros(triton_select.SCRATCH, dtype=torch.int32).split(
        [triton_select.CONTROL, 2 * triton_select.DIGITS.value]
    )
    words = torch.full((triton_union.bitmap_words(numel),), -1, dtype=torch.int32)
    return triton_select.Scratch(control, histograms, words, torch.full((PROGRAMS,), -1, dtype=torch.int32))


def marked(words: Tensor, numel: int) -> list[int]:
    return ((words[:, None] >> torch.arange(32)) & 1).flatten()[:numel].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("kind", "numel", "dtype"),
    covering(
        (kind, numel, dtype)
        for kind in KINDS
        for numel in (1, 31, TILE, 2 * TILE + 5)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
)
@pytest.mark.parametrize("scaled", [False, True])
def test_one_pass_accumulates_clears_and_notes(kind: str, numel: int, dtype: torch.dtype, scaled: bool) -> None:
    before, grad = values(numel + 1, kind, 1), values(numel, "normal", 2).to(dtype)
    grad[: numel // 3] *= 1e-6  # subnormal in float16
    scale = torch.tensor(3.0)
    given, acc, s, bound = grad.clone(), before.clone(), scratch_for(numel), torch.tensor(1.5)
    triton_dense.accumulate_(acc, given, 1.0, scale if scaled else None, s.words, s.counts, s.broken, bound)
    total = torch.add(grad.float() / scale if scaled else grad, before[:-1])
    expected = torch.where(total.isfinite(), total, before[:-1])
    assert bits(acc[:-1]) == bits(expected)
    assert float(acc[-1]) == 0
    assert not given.any()
    reached = expected.abs() >= bound
    assert marked(s.words, numel) == reached.nonzero().flatten().tolist()
    programs = triton_launch.Share.of(numel).programs
    assert s.counts[:programs].tolist() == [int(part.sum()) for part in reached.split(TILE)]
    assert bool(s.broken) == (not bool(total.isfinite().all()))


@pytest.mark.parametrize("places", [[], [5], [0, 2047, 2050]])
def test_coordinates_that_would_not_be_finite_are_left_as_they_are(places: list[int]) -> None:
    numel, largest = TILE + 3, torch.finfo(torch.float32).max
    s, acc, grad = scratch_for(numel), values(numel + 1, "normal", 3), values(numel, "normal", 4)
    acc[-1], acc[7], grad[7] = 0, largest, -largest
    kept = torch.zeros(numel, dtype=torch.bool)
    for place, number in zip(places, (math.nan, -math.inf, largest), strict=False):
        grad[place], kept[place] = number, True
        if number == largest:  # the sum overflows
            acc[place] = largest
    expected = torch.where(kept, acc[:-1], 0.5 * acc[:-1] + grad)
    others = acc[:-1].clone()
    with in_triton() as chosen:
        assert bool(on_device.accumulate_(others, grad, 0.5)) == (not places)
        assert chosen.trouble is None
        assert len(chosen._tried) == 1
    triton_dense.accumulate_(acc, grad, 0.5, None, s.words, s.counts, s.broken, torch.tensor(math.inf))
    assert bits(acc[:-1]) == bits(others) == bits(expected)
    assert bool(s.broken) == bool(places)
    assert bool(acc.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gradient_is_taken_in_as_by_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    acc, grad = values(TILE + 300, "normal", 1).to(wide), values(TILE + 300, "inf", 2).to(dtype)
    found, expected, given = acc.clone(), acc.clone(), grad.clone()
    monkeypatch.setattr(reference, "PIECE", 1000)
    assert not reference.accumulate_(expected, [grad], 0.7)
    with in_triton() as chosen:
        assert not on_device.accumulate_(found, grad, 0.7)
        assert len(chosen._tried) == (dtype != torch.float64)
    total = 0.7 * acc + grad
    assert torch.equal(found, torch.where(total.isfinite(), total, acc))
    assert torch.equal(found, expected)
    assert torch.equal(grad, given)


SHARES = [(0.02, 0.02, 1, 3), (0.05, 0.0, 0, 2), (0.0, 0.03, 3, 4), (0.4, 1.0, 1, 2), (0.001, 0.01, 7, 8)]
"""Of the group: of all, others of a stripe; which stripe, of how many."""
BOUNDS = [math.inf, 0.7, 0.0]
"""Nothing is noted, about half, everything."""
SIZES = [1, 700, TILE + 477]


@pytest.mark.parametrize(
    ("kind", "numel", "bound", "case"),
    [
        ("ties", SIZES[2], 0.7, SHARES[0]),
        ("zeros", SIZES[1], 0.0, SHARES[3]),
        ("subnormal", SIZES[0], math.inf, SHARES[1]),
        *(pytest.param(*each, marks=thorough) for each in product(FINITE, SIZES, BOUNDS, SHARES)),
    ],
)
def test_the_largest_and_those_of_a_stripe_are_picked(
    kind: str, numel: int, bound: float, case: tuple[float, float, int, int]
) -> None:
    x, (share, spare, turn, n) = values(numel, kind), case
    first, others = math.ceil(share * numel), math.ceil(spare * numel)
    s, next_bound, slots = scratch_for(numel), torch.tensor(bound), first + others + 3
    triton_dense.look(x, s.words, s.counts, s.broken, next_bound)
    found = triton_select.pick(x, s, next_bound, first, slots, torch.tensor(others, dtype=torch.int32), turn, n)
    expected, marks = host.top_k_and_stripe(x, first, others, turn, n)
    number = int(found.number)
    assert found.keys[:number].tolist() == (2 * expected + marks).tolist()
    assert found.keys[number:].tolist() == [2 * numel] * (slots - number)
    magnitudes = x.abs()[expected]
    largest = found.largest.max().view(1).view(torch.float32)
    assert float(largest) == (float(magnitudes.max()) if number else 0)
    if number:  # what the next pass notes is enough, if magnitudes are as they were
        assert float(next_bound) <= float(magnitudes.min())


def test_a_bound_is_kept_where_nothing_can_be_learned() -> None:
    x, s, bound = values(300, "nan"), scratch_for(300), torch.tensor(0.25)
    triton_dense.look(x, s.words, s.counts, s.broken, bound)
    found = triton_select.pick(x, s, bound, 5, 5, None, 0, 1)
    assert float(bound) == 0.25
    assert int(found.number) == 5
    assert 300 in [*(found.keys >> 1), 300]


@pytest.mark.parametrize("kind", ["normal", *(pytest.param(kind, marks=thorough) for kind in ("ties", "zeros"))])
def test_passes_of_other_methods_equal_those_of_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(TILE + 300, kind)
    with in_triton() as chosen:
        monkeypatch.setattr(on_device, "FEW", 99)
        for k in (1, 300):
            assert on_device.top_k(x, k).tolist() == host.top_k(x, k).tolist()
        for threshold, capacity in ((0.5, 2000), (0.5, 100), (9.0, 10)):
            bound = torch.tensor(threshold, dtype=torch.float64)
            found, count = on_device.above(x, bound, None, capacity, 12)
            expected, number = reference.above(x, bound, None, capacity, 12)
            assert torch.equal(found, expected)
            assert int(count) == int(number)
        level = torch.tensor(0.3, dtype=torch.float64)
        pairs = [
            (on_device.moments(x), reference.moments(x.double())),
            (on_device.mean_and_maximum(x), reference.mean_and_maximum(x.double())),
            (on_device.excess(x, level), reference.excess(x, level)),
            ((on_device.log_sum(x),), (reference.log_sum(x.double()),)),
            ((on_device.norm(x),), (reference.norm(x),)),
            ((on_device.norm(x.bfloat16()),), (reference.norm(x.bfloat16()),)),
        ]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
        assert chosen.trouble is None
        assert len(chosen._tried) == 8


def test_doubles_are_left_to_torch() -> None:
    with in_triton() as chosen:
        assert float(on_device.log_sum(torch.full((9,), math.e, dtype=torch.float64))) == pytest.approx(9)
        assert not chosen._tried


@pytest.mark.parametrize("flag", [False, True])
def test_flags_decide_on_the_device(flag: bool) -> None:
    decides = torch.tensor(flag)
    with in_triton() as chosen:
        for dtype in (torch.float32, torch.float16):
            x = values(TILE + 3, "normal", 1).to(dtype)
            filled = fill_if_(x.clone(), decides, math.nan)
            assert bool(filled.isnan().all()) if flag else bits(filled) == bits(x)
        yes = (torch.tensor(3), (torch.tensor(2.5, dtype=torch.float64), None), torch.tensor([True, False]))
        no = (torch.tensor(4), (torch.tensor(9.5, dtype=torch.float64), "kept"), torch.tensor([False, False]))
        chosen_ones = choose(decides, yes, no)
        picked = yes if flag else no
        assert chosen_ones[1][1] == "kept"
        assert [x.tolist() for x in (chosen_ones[0], chosen_ones[1][0], chosen_ones[2])] == [
            x.tolist() for x in (picked[0], picked[1][0], picked[2])
        ]
        assert chosen.trouble is None


def no_marks(numel: int) -> triton_union.Bitmap:
    sizes = triton_union.bitmap_words(numel), PROGRAMS
    return triton_union.Bitmap(*(torch.zeros(size, dtype=torch.int32) for size in sizes))


@pytest.mark.parametrize("kind", ["wide", "zeros", "nan"])
@pytest.mark.parametrize(
    ("slots", "bits"),
    [(1, 12), (9, 16), (60, 8), *(pytest.param(600, bits, marks=thorough) for bits in (8, 12, 16, 20))],
)
def test_messages_are_those_of_torch(slots: int, bits: int, kind: str) -> None:
    numel, most, generator = 70_003, 4095, torch.Generator().manual_seed(slots)
    acc = torch.cat([values(numel, kind, slots).clamp(-1e30, 1e30), torch.zeros(1)])
    number = max(0, slots - 2)
    indices = pad(torch.randperm(numel, generator=generator)[:number].sort().values, slots, numel)
    spare = (torch.rand(slots, generator=generator) < 0.5) & (indices < numel)
    if kind == "nan" and number:
        acc[indices[0]] = math.nan
    selection = Selection(indices, torch.tensor(number), aligned=True, spare=spare)
    form = Form(numel, slots, bits)
    expected = packed_union._tell(acc, selection, most, form, Context(0, 0.1, 0, 3))
    largest = acc[indices].abs().max().view(1).view(torch.int32) & 0x7FFFFFFF
    keys, unbroken = (2 * indices + spare).int(), torch.zeros(1, dtype=torch.int32)
    told = triton_lanes.tell(acc, keys, torch.tensor(number), largest, unbroken, form, most)
    trouble, lowest = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    heard = triton_lanes.hear(told.repeat(2, 1), form, no_marks(numel), no_marks(numel), lowest, trouble)
    assert heard.places.tolist() == 2 * indices.tolist()
    if kind == "nan" and number:  # who is in trouble need not say how large its picks are
        told, expected = (one[: form.classes] for one in (told, expected))
        assert int(told[1]) == packed_union.TROUBLE
    assert torch.equal(told, expected)
    if kind == "zeros":
        told = triton_lanes.tell(acc, keys, torch.tensor(number), largest, unbroken + 1, form, most)
        assert int(told[1]) == packed_union.TROUBLE
