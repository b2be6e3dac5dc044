"""Arithmetic of single numbers that is written once: with Python's numbers on the CPU, with () tensors on a device.

There the host must not wait for a number; here a number takes a tenth of the time of a () tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.ops import static_shapes

Number = Any
"""() float64 on a device; a Python number on the CPU."""
Flag = Any
"""() bool on a device; a Python bool on the CPU. ``flag is False`` holds only if the host knows it."""


def known(x: Tensor) -> Any:
    """Convert a () tensor to a number or bool of Python's on the CPU; leave it as it is on a device."""
    return x if static_shapes(x.device) else x.item()


def at_most(x: Tensor, bound: int) -> int:
    """Return the number in a () tensor on the CPU, and on a device a bound that it does not exceed."""
    return bound if static_shapes(x.device) else int(x)


def tensor(x: Number, dtype: torch.dtype = torch.float64) -> Tensor:
    """Convert a :data:`Number` to a () tensor."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype, device="cpu")


def functions(x: Number) -> Any:
    """Return the module with functions of x: torch for tensors, math for numbers. They share names such as ``log``."""
    return torch if isinstance(x, Tensor) else math


def whole(x: Number) -> Number:
    """Return the integer at or below a number, int64 or Python's."""
    return torch.floor(x).long() if isinstance(x, Tensor) else math.floor(x)


def divisor(x: Number) -> Number:
    """Return x, and 1 in place of a number 0: Python raises where torch gives infinity or NaN."""
    return x if isinstance(x, Tensor) else x or 1.0


def either(flag: Flag, yes: Any, no: Any) -> Any:
    """Return ``yes if flag else no``."""
    return torch.where(flag, yes, no) if isinstance(flag, Tensor) else yes if flag else no


def lesser(x: Number, y: Number) -> Number:
    """Return the smaller number."""
    return torch.clamp(x, max=y) if isinstance(x, Tensor) else min(x, y)


def greater(x: Number, y: Number) -> Number:
    """Return the larger number."""
    return torch.clamp(x, min=y) if isinstance(x, Tensor) else max(x, y)
