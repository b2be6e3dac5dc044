"""What is tried before kernels in Triton are used, and what is said where they are not."""

from __future__ import annotations

import pytest
import torch

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
