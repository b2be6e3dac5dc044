"""Steps of the default and of Adam, and momentum spent early, in Triton on a GPU against torch on it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.ops import adam
from lightning_sparse.ops.adam import Moved, Step, Steps
from lightning_sparse.ops.momentum import Momentum, Spending, Stepped
from lightning_sparse.ops.on_cuda import on_cuda
from tests.ops.device_steps import first_of_equal, walk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.fixture(autouse=True)
def tried_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What another test has found about kernels says nothing about those of this one."""
    monkeypatch.setattr(on_cuda, "_tried", set())
    monkeypatch.setattr(on_cuda, "refused", {})
    yield
    assert on_cuda.trouble is None
    assert not on_cuda.refused


@pytest.mark.parametrize(
    "memory", [ls.memories.Residual(), ls.memories.SecondMoment(1 - 2**-10)], ids=["residual", "second moment"]
)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("n", "numel", "density"),
    [(2, 5003, 0.05), (3, 70_001, 0.001), (3, 3_000_017, 0.01), (8, 1_000_000, 0.3), (20, 50_003, 0.1)],
)
def test_the_step_equals_that_of_torch(
    n: int, numel: int, density: float, scaled: bool, memory: ls.memories.Memory
) -> None:
    found = walk(n, numel, density, torch.float32, scaled, "cuda", count=4, memory=memory)
    assert on_cuda._tried
    with pytest.MonkeyPatch.context() as patch, first_of_equal():
        patch.setattr(on_cuda, "trouble", "compared with torch")
        expected = walk(n, numel, density, torch.float32, scaled, "cuda", count=4, memory=memory)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["numbers", "on the device", "scaled", "skipped"])
def test_steps_of_adam_equal_those_of_torch(where: str, dtype: torch.dtype) -> None:
    one = torch.ones((), device="cuda")
    by = {
        "numbers": Step(0.3, 0.96),
        "on the device": Step(0.3 * one, 0.96 * one),
        "scaled": Step(0.3, 1.0, 7 * one, 0 * one),
        "skipped": Step(0.3, 0.96, 7 * one, one),
    }[where]
    moved = []
    for numel in (1, 5003, 300_001, 1 << 20):
        p, g, d = torch.randn(3, numel, device="cuda")
        moved.append(Moved(p.to(dtype), g.where(g > 1, 0.0).to(dtype), d.abs() + 1e-8))
    expected = [x._replace(parameter=x.parameter.clone()) for x in moved]
    adam._in_torch(expected, by)
    steps = Steps()
    steps.take_(moved, by)
    assert on_cuda._tried and steps._addresses
    for found, other in zip(moved, expected, strict=True):
        assert torch.equal(found.parameter, other.parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["numbers", "on the device", "skipped"])
def test_momentum_is_spent_as_in_torch(where: str, dtype: torch.dtype) -> None:
    one = torch.ones((), device="cuda")
    by = Momentum(0.1 * one if where == "on the device" else 0.1, 0.9, 1.0, True)
    stepped = []
    for numel in (1, 5003, 300_001, 1 << 20):
        p, g, v = torch.randn(3, numel, device="cuda")
        waited = torch.randint(0, 256, (numel,), dtype=torch.uint8, device="cuda")
        stepped.append(Stepped(p.to(dtype), g.where(g > 1, 0.0).to(dtype), v.to(dtype), waited))
    expected = [Stepped(*(x.clone() for x in each)) for each in stepped]
    skip = one if where == "skipped" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_cuda, "trouble", "compared with torch")
        Spending().spend_(expected, by, skip)
    spending = Spending()
    spending.spend_(stepped, by, skip)
    assert on_cuda._tried and len(spending._addresses)
    for found, other in zip(stepped, expected, strict=True):
        assert all(map(torch.equal, found, other))
