"""Sparse vectors: sums in order, the strongest, messages; with exact sizes and with fixed ones."""

from __future__ import annotations

import pytest
import torch

from lightning_sparse.methods.exchanges import merging
from lightning_sparse.methods.exchanges.merging import masked, pack, strongest, unpack
from lightning_sparse.ops import add_up

PADDING = 100


@pytest.fixture(params=["exact", "static"])
def padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True where slots without a coordinate hold the padding index."""
    if request.param == "static":
        for module in (merging, __import__("lightning_sparse.ops", fromlist=["static_shapes"])):
            monkeypatch.setattr(module, "static_shapes", lambda device: True)
    return request.param == "static"


def vector(pairs: dict[int, float], slots: int | None = None, dtype: torch.dtype = torch.float32) -> merging.Pairs:
    missing = 0 if slots is None else slots - len(pairs)
    indices = torch.tensor([*pairs, *[PADDING] * missing])
    return indices, torch.tensor([*pairs.values(), *[0.0] * missing], dtype=dtype)


def listed(pairs: merging.Pairs) -> dict[int, float]:
    """What is not padding."""
    return {j: value for j, value in zip(*(x.tolist() for x in pairs), strict=True) if j != PADDING}


def test_sums_are_ascending_and_formed_in_the_order_of_the_parts(padded: bool) -> None:
    slots = 4 if padded else None
    # In float32 (1e8 + 1) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1.
    parts = [
        vector({3: 1e8, 7: 1e8}, slots),
        vector({1: 5.0, 3: 1.0, 7: -1e8}, slots),
        vector({3: -1e8, 7: 1.0}, slots),
    ]
    indices, sums, _ = add_up(parts, PADDING)
    assert indices.tolist()[:3] == [1, 3, 7]
    assert sums.tolist()[:3] == [5, 0, 1]
    assert indices.tolist()[3:] == ([PADDING] * 9 if padded else [])
    assert not sums[3:].any()


def test_parts_without_padding_or_without_anything_add_up(padded: bool) -> None:
    assert listed(add_up([vector({2: 1.0}), vector({1: 2.0, 2: 3.0})], PADDING)[:2]) == {1: 2, 2: 4}
    empty = vector({}, 2) if padded else (torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert listed(add_up([empty, vector({1: 2.0})], PADDING)[:2]) == {1: 2}


def test_the_strongest_are_the_largest_magnitudes_and_of_equal_ones_the_first(padded: bool) -> None:
    pairs = vector({1: 2.0, 4: -3.0, 5: 2.0, 9: -2.0, 11: 0.0}, 7 if padded else None)
    for keep, expected in ((1, [4]), (2, [1, 4]), (3, [1, 4, 5]), (4, [1, 4, 5, 9]), (5, [1, 4, 5, 9, 11])):
        for asked in (keep, torch.tensor(keep)):
            mask = strongest(pairs, asked, PADDING)
            assert pairs[0][mask].tolist() == expected
    kept, left = (listed(masked(pairs, m, PADDING)) for m in (mask, ~mask))
    assert (len(kept), left) == (5, {})
    assert strongest(pairs, 100, PADDING).all()


@pytest.mark.parametrize("padded", ["static"], indirect=True)
def test_padding_is_weaker_than_a_zero_wherever_it_stands(padded: bool) -> None:
    pairs = torch.tensor([PADDING, 3, PADDING, 8]), torch.zeros(4)
    assert strongest(pairs, 2, PADDING).tolist() == [False, True, False, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_stronger_than_everything(padded: bool, bad: float) -> None:
    pairs = vector({1: 3e38, 4: -3e38, 5: bad, 9: 3e38}, 6 if padded else None)
    assert pairs[0][strongest(pairs, 1, PADDING)].tolist() == [5]


def test_what_a_mask_leaves_is_in_order_with_padding_at_the_end(padded: bool) -> None:
    pairs = vector({1: 2.0, 4: -3.0, 5: 2.0}, 4 if padded else None)
    mask = torch.tensor([True, False, True] + [True] * padded)
    indices, values = masked(pairs, mask, PADDING)
    assert indices.tolist() == [1, 5] + [PADDING] * 2 * padded
    assert values.tolist() == [2, 2] + [0] * 2 * padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("slots", [3, 4, 7])
def test_a_message_has_a_fixed_length_and_carries_values_bit_for_bit(
    padded: bool, dtype: torch.dtype, slots: int
) -> None:
    bits = [2.0**-149, -0.0, float("nan")]
    indices, padding = torch.tensor([0, 2**24 + 1, 2**31 - 3]), 2**31 - 2
    values = torch.tensor(bits, dtype=dtype)
    message = pack((indices, values), slots, padding)
    assert (message.dtype, message.numel()) == (torch.int32, slots * (1 + values.element_size() // 4))
    got = unpack(message, slots, dtype, padding)
    assert got[0].tolist() == [*indices.tolist(), *[padding] * ((slots - 3) * padded)]
    assert torch.equal(got[1][:3].view(torch.int32), values.view(torch.int32))


def test_a_message_that_is_too_short_takes_the_first() -> None:
    assert listed(unpack(pack(vector({1: 1.0, 2: 2.0, 3: 3.0}), 2, PADDING), 2, torch.float32, PADDING)) == {1: 1, 2: 2}
