"""Where the library finds what Python owns: addresses, and buffers of each thread."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import torch
from torch import Tensor

SLACK = 16
"""Slots behind what is found that the library may write to."""

ARGUMENTS = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
FUNCTIONS = {
    "ls_form": "l: ppp ppl i ip f pp l p",
    "ls_above": "l: pl f pp l",
    "ls_sums": "i: pl l d f p",
    "ls_largest": "l: ppl ll ll l pppp",
    "ls_take": "i: pl pl p",
    "ls_put": "i: pl pl p",
    "ls_tell": "i: ppl ppl i f l pp",
    "ls_round": "l: ppl pppl ll fiii f pppp",
    "ls_average": "i: pppl f iii pp",
    "ls_unite": "l: pppp l ll l pppp pp",
    "ls_meet": "l: p lllll i ll ppppppp",
    "ls_reader": "l:",
    "ls_add_up": "l: pipp ll f pppp",
    "ls_table": "l:",
}
"""Result and arguments of each function of the library, as letters of :data:`ARGUMENTS`; ``i`` for no result."""

_buffers = threading.local()


def declare(library: ctypes.CDLL) -> None:
    """Let ctypes make arguments of plain numbers and addresses, several times faster than Python does."""
    for name, letters in FUNCTIONS.items():
        returned, taken = letters.split(":")
        function = getattr(library, name)
        function.restype = ARGUMENTS[returned]
        function.argtypes = [ARGUMENTS[letter] for letter in taken.replace(" ", "")]


def at(x: Tensor | None) -> int | None:
    """Where it lies; the caller keeps it."""
    return None if x is None else x.data_ptr()


def written(*tensors: Tensor) -> None:
    """Let torch count that these were written to, past it."""
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def space(use: str, size: int, dtype: torch.dtype) -> Tensor:
    """A buffer of this thread, at least as long; touched as far as it is used."""
    return _kept(use, size, dtype)[0]


def address(use: str, size: int, dtype: torch.dtype) -> int:
    """Where such a buffer lies."""
    return _kept(use, size, dtype)[1]


def zeros(use: str, size: int) -> int:
    """Where a buffer of this thread lies that is zero whenever nobody works with it."""
    return _kept(use, size, torch.uint8)[1]


def _kept(use: str, size: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    kept: tuple[Tensor, int] | None = _buffers.__dict__.get(use)
    if kept is None or len(kept[0]) < size:
        # In large pages, untouched; of at least one element, because an empty vector cannot be viewed.
        buffer = torch.from_numpy(np.zeros(max(1, size) * dtype.itemsize, np.uint8)).view(dtype)
        kept = _buffers.__dict__[use] = buffer, buffer.data_ptr()
    return kept
