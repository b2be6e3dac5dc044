"""States of groups as plain data for files, and back; and a checksum of plain data."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def to_plain(state: Any) -> Any:
    """Make lists of (named) tuples, and copies on the CPU of tensors."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, (tuple, list)):
        return [to_plain(part) for part in state]
    return state


def from_plain(plain: Any, like: Any) -> Any:
    """Undo :func:`to_plain`.

    Args:
        plain: what it gave.
        like: a state of the same kind, whose types, dtypes and devices are taken; None stands for a scalar as well, of
            which nothing was known yet.

    Raises:
        ValueError: if the two are not alike: other tuples, tensors of another shape, numbers of another type.
    """
    if isinstance(like, tuple):
        if not isinstance(plain, list) or len(plain) != len(like):
            raise ValueError(f"Expected {len(like)} parts, but got {plain!r}.")
        parts = [from_plain(one, other) for one, other in zip(plain, like, strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    if isinstance(like, Tensor):
        if not isinstance(plain, Tensor) or plain.shape != like.shape or _kind(plain) != _kind(like):
            raise ValueError(f"Expected a tensor of shape {tuple(like.shape)} and {like.dtype}, but got {plain!r}.")
        return plain.to(like.device, like.dtype, copy=True)
    if like is None and isinstance(plain, Tensor) and plain.dim() == 0:
        return plain.clone()
    if isinstance(plain, list):
        raise ValueError(f"Expected {like!r}, but got {len(plain)} parts.")
    if type(plain) is not type(like):
        raise ValueError(f"Expected something like {like!r}, but got {plain!r}.")
    return plain


def _kind(x: Tensor) -> tuple[bool, bool, bool]:
    return x.is_floating_point(), x.is_complex(), x.dtype == torch.bool


def checksum(plain: Any) -> str:
    """Return a digest of names, numbers and tensors that does not depend on the file or container that held them.

    A CRC-32 stands for the bytes of each tensor: it takes a fraction of the time in which they are written, and any
    wrong bit changes it. Lists and tuples count as the same, and so do dicts in another order.

    Raises:
        TypeError: for anything that is no plain data.

    Example:
        >>> state = {"step": 3, "residual": torch.tensor([1.0, 2.0])}
        >>> checksum(state) == checksum(dict(reversed(state.items())))
        True
        >>> checksum(state) == checksum(state | {"residual": torch.tensor([1.0, -2.0])})
        False
    """
    return hashlib.sha256(_spelled(plain).encode()).hexdigest()


def _spelled(plain: Any) -> str:
    if isinstance(plain, Tensor):
        flat = plain.detach().cpu().reshape(-1)
        if flat.numel() < 2:  # counts as contiguous whatever its stride is, which views of its bytes do not take
            flat = flat.clone(memory_format=torch.contiguous_format)
        content = flat.contiguous().view(torch.uint8).numpy().data
        return f"tensor({plain.dtype}, {tuple(plain.shape)}, {zlib.crc32(content)})"
    if isinstance(plain, Mapping):
        return "{" + ", ".join(sorted(f"{key!r}: {_spelled(value)}" for key, value in plain.items())) + "}"
    if isinstance(plain, (list, tuple)):
        return "[" + ", ".join(map(_spelled, plain)) + "]"
    if plain is None or isinstance(plain, (bool, int, float, str)):
        return repr(plain)
    raise TypeError(f"Expected plain data, but got {type(plain).__name__}.")
