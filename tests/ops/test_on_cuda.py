"""What is tried before kernels in Triton are used, and what is said where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sparse.ops.on_cuda import OnCuda, compare


def test_equal_tensors_pass_and_nan_is_equal_to_nan_alone() -> None:
    x, skipped = torch.arange(6.0).view(2, 3), torch.tensor(True)
    compare({"x": x, "skipped": skipped}, {"x": x.clone(), "skipped": skipped.clone()})
    compare({"none": x[:0]}, {"none": x[:0]})
    y = x.clone()
    y[1, 1] = float("nan")
    with pytest.raises(RuntimeError, match=r"x, \(2, 3\) torch.float32, differs at 1 of 6 places, first at 4: nan ins"):
        compare({"x": y}, {"x": x})
    compare({"x": y}, {"x": y.clone()})


@pytest.mark.parametrize("current", [0, 1])
def test_kernels_are_launched_on_the_device_of_their_tensors(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [current]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        devices.append(wanted.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    launch = pytest.importorskip("lightning_sparse.ops.triton.launch").launch
    seen: list[int] = []
    with FakeTensorMode():
        x = torch.empty(3, device="cuda:1")
    launch({(2,): lambda *args, **options: seen.append(torch.cuda.current_device())}, 2, 5, x)
    assert (seen, devices) == ([1], [current])


def test_an_attempt_may_wait_where_the_user_lets_torch_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [2]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    chosen = OnCuda()
    chosen.trouble = None
    during: list[object] = []
    assert chosen.tried("it", lambda: during.append(modes[-1]))
    assert (during, modes) == (["default"], [2, "default", 2])
    assert chosen.tried("it", lambda: during.append(modes[-1]))
    assert len(during) == 1
