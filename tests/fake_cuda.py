"""CUDA tensors without content, on a machine without CUDA.

Under :func:`fake_cuda`, operations check devices as CUDA does and compute nothing; whatever needs content raises. A few
methods of tensors fail on them in builds for the CPU, in a guard: the same operations are asked for directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


class HostWaitsError(Exception):
    """The host would have to wait for the device."""


@contextmanager
def fake_cuda() -> Iterator[None]:
    """All tensors that are made are fake, and may say that they are on :data:`CUDA`."""
    with FakeTensorMode(allow_non_fake_inputs=False), _AroundGuards():
        yield


class _AroundGuards(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            view, places = _indexed(args[0], args[1])
            return view if places is None else aten.index(view, places)
        if func is Tensor.__setitem__:
            view, places = _indexed(args[0], args[1])
            value = args[2] if isinstance(args[2], Tensor) else aten.full([], args[2], dtype=view.dtype, device=CUDA)
            return aten.copy_(view, value) if places is None else aten.index_put_(view, places, value)
        if func is Tensor.new_tensor or (func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == CUDA):
            raise HostWaitsError(f"{func} copies from the host")
        if func is Tensor.copy_:
            return aten.copy_(*args, **kwargs)
        if func is Tensor.contiguous:
            return aten.clone(args[0], memory_format=torch.contiguous_format)
        if func is Tensor.__rsub__:
            return aten.rsub(*args)
        if func is Tensor.__neg__:
            return aten.neg(*args)
        if func is Tensor.__invert__:
            return torch.bitwise_not(*args)
        return func(*args, **kwargs)


def _indexed(x: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None] | None]:
    """A view of x by numbers, slices and None, and the tensors that are left to index it with."""
    places: list[Tensor | None] = []
    dim = 0
    parts = list(key if isinstance(key, tuple) else (key,))
    if any(part is Ellipsis for part in parts):  # stands for as many slices as there are dimensions left
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (x.dim() - sum(part is not None for part in parts) + 1)
    for part in parts:
        if part is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(part, Tensor):
            if part.dtype in (torch.bool, torch.uint8):
                raise HostWaitsError("how many a mask picks is known on the device only")
        elif isinstance(part, slice):
            if any(isinstance(end, Tensor) for end in (part.start, part.stop)):
                raise HostWaitsError("a range that is known on the device only")
            x = aten.slice(x, dim, part.start, part.stop, part.step or 1)
        else:
            x = aten.select(x, dim, int(part))
            continue
        places.append(part if isinstance(part, Tensor) else None)
        dim += 1
    return x, places if any(place is not None for place in places) else None
