"""Kernels in Triton against their twins: in Triton's interpreter, and so at small sizes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_sparse.core.step import Candidates, Context, Selection
from lightning_sparse.methods.exchanges import packed_union
from lightning_sparse.ops import host, on_device, pad, reference
from lightning_sparse.ops.form import Form, Lanes
from tests.covering import covering, in_turns
from tests.ops.interpreted import in_triton, interpret
from tests.ops.test_variants import bits, values
from tests.static_path import static_path

interpret()

pytestmark = pytest.mark.usefixtures("silent")

from lightning_sparse.ops.triton import dense as triton_dense  # noqa: E402  # after it is known how kernels are to be defined
from lightning_sparse.ops.triton import launch as triton_launch  # noqa: E402
from lightning_sparse.ops.triton import packed as triton_packed  # noqa: E402
from lightning_sparse.ops.triton import select as triton_select  # noqa: E402

TILE = triton_launch.TILE
KINDS = ["normal", "ties", "zeros", "subnormal", "nan", "inf", "wide"]
FINITE = [kind for kind in KINDS if kind not in ("nan", "inf")]
thorough = pytest.mark.thorough


def scratch_for(numel: int, bound: float = math.inf) -> triton_select.Scratch:
    s = triton_select.Scratch(numel, torch.device("cpu"))
    for buffer in (s.emptied, s.words, s.counts):
        buffer.fill_(-1)
    s.bound.fill_(bound)
    s.begin()
    return s


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
def test_one_pass_accumulates_clears_and_notes(kind: str, numel: int, dtype: torch.dtype) -> None:
    before, grad = values(numel, kind, 1), values(numel, "normal", 2).to(dtype)
    grad[: numel // 3] *= 1e-6  # subnormal in float16
    given, acc, s = grad.clone(), before.clone(), scratch_for(numel, 1.5)
    triton_dense.accumulate_(acc, given, 1.0, *s.begin())
    total = torch.add(grad, before)
    expected = torch.where(total.isfinite(), total, before)
    assert bits(acc) == bits(expected)
    assert not given.any()
    reached = expected.abs() >= 1.5
    assert marked(s.words, numel) == reached.nonzero().flatten().tolist()
    programs = triton_launch.Share.of(numel).programs
    assert s.counts[:programs].tolist() == [int(part.sum()) for part in reached.split(TILE)]
    assert bool(s.finite) == bool(total.isfinite().all())


@pytest.mark.parametrize("places", [[], [5], [0, 2047, 2050]])
def test_coordinates_that_would_not_be_finite_are_left_as_they_are(places: list[int]) -> None:
    numel, largest = TILE + 3, torch.finfo(torch.float32).max
    acc, grad = values(numel, "normal", 3), values(numel, "normal", 4)
    acc[7], grad[7] = largest, -largest
    kept = torch.zeros(numel, dtype=torch.bool)
    for place, number in zip(places, (math.nan, -math.inf, largest), strict=False):
        grad[place], kept[place] = number, True
        if number == largest:  # the sum overflows
            acc[place] = largest
    expected = torch.where(kept, acc, 0.5 * acc + grad)
    with in_triton() as chosen:
        assert bool(on_device.accumulate_(acc, [grad], 0.5, Candidates())) == (not places)
        assert chosen.trouble is None
        assert len(chosen._tried) == 1
    assert bits(acc) == bits(expected)
    assert bool(acc.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gradient_is_taken_in_as_by_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    acc, grad = values(TILE + 300, "normal", 1).to(wide), values(TILE + 300, "inf", 2).to(dtype)
    found, expected, given = acc.clone(), acc.clone(), grad.clone()
    hints = Candidates()
    monkeypatch.setattr(reference, "CHUNK", 1000)
    assert not reference.accumulate_(expected, [grad], 0.7)
    with in_triton() as chosen:
        assert not on_device.accumulate_(found, [given], 0.7, hints)
        assert len(chosen._tried) == (dtype != torch.float64)
        assert hints.cleared([given]) == (dtype != torch.float64)
    total = 0.7 * acc + grad
    assert torch.equal(found, torch.where(total.isfinite(), total, acc))
    assert torch.equal(found, expected)


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
    s, slots = scratch_for(numel, bound), first + others + 3
    triton_dense.accumulate_(x, torch.zeros_like(x), 1.0, *s.begin())  # adds nothing
    found = triton_select.pick(x, s, first, slots, torch.tensor(others), turn, n)
    expected, marks = host.top_k_and_stripe(x, first, others, turn, n)
    number = int(found.number)
    assert found.indices.tolist() == [*expected.tolist(), *[numel] * (slots - number)]
    assert found.spares.tolist() == [*marks.tolist(), *[False] * (slots - number)]
    if number:  # what the next pass notes is enough, if magnitudes are as they were
        assert float(s.bound) <= float(x.abs()[expected].min())


@pytest.mark.parametrize("noted", [False, True])
def test_a_share_of_none_is_found_without_what_a_pass_has_noted(noted: bool) -> None:
    x, s = values(TILE + 477, "normal"), scratch_for(TILE + 477)
    before = s.bound.clone()
    for others in (3, 0):
        s.begin()[1].zero_()
        found = triton_select.pick(x, s if noted else None, 0, 4, torch.tensor(others), 1, 8)
        expected = 1 + 8 * host.top_k(x[1::8].contiguous(), 3)[:others]
        assert found.indices.tolist() == [*expected.tolist(), *[len(x)] * (4 - others)]
        assert int(found.number) == others
    assert not s.bound.isnan()
    assert (float(s.bound) == float(before)) != noted


def test_small_numbers_of_bfloat16_are_what_they_are_in_torch() -> None:
    grad = (torch.arange(1, 200, dtype=torch.int16) * 3).view(torch.bfloat16)
    acc, s = torch.zeros(len(grad)), scratch_for(len(grad))
    triton_dense.accumulate_(acc, grad.clone(), 1.0, *s.begin())
    assert bits(acc) == bits(grad.float())


def test_levels_of_more_ranks_than_a_block_holds_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_packed, "MOST_RANKS", 16)
    numel, n = 40, 20
    acc, second = torch.ones(numel + 1), torch.ones(numel + 1)
    acc[-1] = 0
    indices = torch.tensor([3, 8, 20])
    selection = Selection(indices, torch.tensor(3), aligned=True, spare=torch.zeros(3, dtype=torch.bool))
    form, lanes = Form.of(numel, 3, codes=True), Lanes.of(n, True)
    ctx = Context(0, 0.1, 0, n, second=second, finite=torch.tensor(True))
    # The last rank has larger values, and tells them of other coordinates.
    others = selection._replace(indices=indices + 1)
    rows = [
        packed_union.PLAIN.tell(acc * by, picked, lanes.most, form, ctx)
        for by, picked in ((1.0, selection), (64.0, others))
    ]
    told = torch.stack([rows[0]] * (n - 1) + [rows[1]])
    found = []
    for by in (triton_packed.Packed(), packed_union.PLAIN):
        with static_path():
            met = by.meet(told, selection, form, ctx)
            found.append(by.round(acc, met, lanes, ctx))
    assert len(set(found[1].units[:6].tolist())) == 1
    assert torch.equal(found[0].units[:6], found[1].units[:6])
    assert torch.equal(found[0].words[:6], found[1].words[:6])


def test_a_second_search_finds_what_the_first_one_left() -> None:
    grad, acc, hints = values(TILE + 300, "normal"), torch.zeros(TILE + 300), Candidates()
    with in_triton() as chosen:
        on_device.accumulate_(acc, [grad], 1.0, hints)
        for k in (5, 300, 7):
            assert on_device.top_k(acc, k, hints).tolist() == host.top_k(acc, k).tolist()
        assert chosen.trouble is None
        assert not chosen.refused


def test_a_bound_is_kept_where_nothing_can_be_learned() -> None:
    x, s = values(300, "nan"), scratch_for(300, 0.25)
    triton_dense.accumulate_(x, torch.zeros_like(x), 1.0, *s.begin())  # adds nothing
    found = triton_select.pick(x, s, 5, 5)
    assert float(s.bound) == 0.25
    assert int(found.number) == 5
    assert int(found.indices.max()) < 300


@pytest.mark.parametrize("kind", ["normal", *(pytest.param(kind, marks=thorough) for kind in ("ties", "zeros"))])
def test_passes_of_other_methods_equal_those_of_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(TILE + 300, kind)
    with in_triton() as chosen:
        monkeypatch.setattr(on_device, "FEW", 99)
        for k in (1, 300):
            assert on_device.top_k(x, k).tolist() == host.top_k(x, k).tolist()
        for y in (x, x.bfloat16()):
            torch.testing.assert_close(on_device.norm([y]), reference.norm(y), rtol=2e-6, atol=1e-6)
        assert chosen.trouble is None
        assert len(chosen._tried) == 3


def test_doubles_are_left_to_torch() -> None:
    with in_triton() as chosen:
        assert float(on_device.norm([torch.full((9,), 3.0, dtype=torch.float64)])) == pytest.approx(9)
        assert not chosen._tried


@pytest.mark.parametrize(
    ("size", "kind"),
    covering(
        in_turns([(9, 16), (1, 12), (60, 8), *((600, bits) for bits in (8, 12, 16, 20))], ["nan", "zeros", "wide"]),
        together=1,
        thorough={(600, bits) for bits in (8, 12, 16, 20)},
    ),
)
def test_messages_are_those_of_torch(size: tuple[int, int], kind: str) -> None:
    slots, bits = size
    numel, most, generator = 70_003, 4095, torch.Generator().manual_seed(slots)
    acc = torch.cat([values(numel, kind, slots).clamp(-1e30, 1e30), torch.zeros(1)])
    number = max(0, slots - 2)
    indices = pad(torch.randperm(numel, generator=generator)[:number].sort().values, slots, numel)
    spare = (torch.rand(slots, generator=generator) < 0.5) & (indices < numel)
    if kind == "nan" and number:
        acc[indices[0]] = math.nan
    selection = Selection(indices, torch.tensor(number), aligned=True, spare=spare)
    form = Form(numel, slots, bits)
    ctx, kernels = Context(0, 0.1, 0, 3), triton_packed.Packed()
    expected = packed_union._tell(acc, selection, most, form, ctx)
    told = kernels.tell(acc, selection, most, form, ctx)
    met = kernels.meet(told.repeat(3, 1), selection, form, ctx)
    assert met.indices[:number].tolist() == indices[:number].tolist()
    assert met.counts.tolist() == 3 * [number]
    assert int(met.size) == int(met.named) == number
    if kind == "nan" and number:  # who is in trouble need not say how large its picks are
        told, expected = (one[: form.classes] for one in (told, expected))
        assert int(told[1]) == packed_union.TROUBLE
    assert torch.equal(told, expected)
    if kind == "zeros":
        told = kernels.tell(acc, selection, most, form, ctx._replace(finite=torch.tensor(False)))
        assert int(told[1]) == packed_union.TROUBLE
