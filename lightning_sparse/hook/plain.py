"""States of groups as plain data for files, and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def to_plain(state: Any) -> Any:
    """(Named) tuples become lists, tensors copies on the CPU."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, (tuple, list)):
        return [to_plain(part) for part in state]
    return state


def from_plain(plain: Any, like: Any) -> Any:
    """Undo :func:`to_plain`.

    Args:
        plain: what it gave.
        like: a state of the same kind, whose types, dtypes and devices are taken.

    Raises:
        ValueError: if the two are not alike: other tuples, tensors of another shape.
    """
    if isinstance(like, tuple):
        if not isinstance(plain, list) or len(plain) != len(like):
            raise ValueError(f"Expected {len(like)} parts, but got {plain!r}.")
        parts = [from_plain(one, other) for one, other in zip(plain, like, strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    if isinstance(like, Tensor):
        if not isinstance(plain, Tensor) or plain.shape != like.shape:
            raise ValueError(f"Expected a tensor of shape {tuple(like.shape)}, but got {plain!r}.")
        return plain.to(like.device, like.dtype, copy=True)
    if isinstance(plain, list):
        raise ValueError(f"Expected {like!r}, but got {len(plain)} parts.")
    return plain
