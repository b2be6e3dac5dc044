"""What was sent leaves vectors on devices: kernels in Triton's interpreter against operations of torch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_sparse.ops import on_device
from tests.ops.interpreted import in_triton, interpret
from tests.ops.test_variants import bits, values

interpret()

pytestmark = pytest.mark.usefixtures("silent")

NUMEL = 1500


def sent(dtype: torch.dtype, places: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A vector, coordinates with one that is repeated and padding between and behind them, and values."""
    x = torch.cat([values(NUMEL, "normal", 1), torch.zeros(1)]).to(dtype)
    indices = torch.arange(0, NUMEL, 2, dtype=places)
    taken = values(len(indices), "ties", 2).to(dtype)
    indices[5], taken[5] = indices[4], taken[4]
    indices[9] = indices[-20:] = NUMEL
    return x, indices, taken


@pytest.mark.parametrize(
    ("dtype", "places", "emptied"),
    list(product((torch.float32, torch.float64), (torch.int32, torch.int64), (False, True))),
)
def test_values_leave_once(dtype: torch.dtype, places: torch.dtype, emptied: bool) -> None:
    x, indices, taken = sent(dtype, places)
    expected = x.clone()
    for place, value in dict(zip(indices.tolist(), taken, strict=True)).items():
        if place < NUMEL:
            expected[place] = 0 if emptied else x[place] - value
    given = None if emptied else taken
    of_torch, of_triton = x.clone(), x.clone()
    on_device.subtract_at_(of_torch, indices, given)
    with in_triton() as chosen:
        on_device.subtract_at_(of_triton, indices, given)
        assert chosen.trouble is None
        assert len(chosen._tried) == 1
        assert not chosen.refused
    assert bits(of_torch) == bits(of_triton) == bits(expected)


def test_nothing_leaves_where_nothing_was_sent() -> None:
    x = values(9, "normal")
    x[-1] = 0
    before = x.clone()
    with in_triton() as chosen:
        on_device.subtract_at_(x, torch.arange(0), x[:0])
        assert not chosen._tried
    assert torch.equal(x, before)


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, indices, taken = sent(torch.float32, torch.int64)
    expected = x.clone()
    on_device.subtract_at_(expected, indices, taken)
    monkeypatch.setattr("lightning_sparse.ops.triton.values.subtract_at_", lambda *_: None)
    with in_triton() as chosen, pytest.warns(UserWarning, match="compute something else"):
        on_device.subtract_at_(x, indices, taken)
        assert len(chosen.refused) == 1
    assert torch.equal(x, expected)
