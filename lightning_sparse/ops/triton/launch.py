"""Launches of kernels in Triton: the parts of a vector that programs share out, and the options of launches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE = 2048
"""Elements that a program works on at once: 64 words of 32 bits in a bitmap."""
PROGRAMS = 1024
"""Most programs of a launch whose results are added up by those of the next one: it loads one number of each."""
PICKS = 512
"""Picks that a program works on at once."""
EXACT = {"enable_fp_fusion": False}
"""Each operation is rounded by itself, as in torch."""


class Share(NamedTuple):
    """Who works on which tiles of a vector: program p on those from ``p per`` on, in order."""

    programs: int
    per: int
    """Tiles of a program."""

    @classmethod
    def of(cls, numel: int) -> Share:
        """Divide as evenly as possible, for at most :data:`PROGRAMS`.

        Example:
            >>> Share.of(5000), Share.of(25_000_000)
            (Share(programs=3, per=1), Share(programs=1018, per=12))
        """
        tiles = -(-numel // TILE)
        per = max(1, -(-tiles // PROGRAMS))
        return cls(max(1, -(-tiles // per)), per)

    @property
    def block(self) -> int:
        """Elements of a program."""
        return self.per * TILE


def bitmap_words(numel: int) -> int:
    """Length of a bitmap, in words of 32 bits: that of whole tiles.

    Example:
        >>> bitmap_words(2049)
        128
    """
    return -(-numel // TILE) * (TILE // 32)


def launch(kernel: Any, programs: int, *args: Any, warps: int = 8, **constants: Any) -> None:
    """Run a kernel on this many programs, on the device of the first tensor; there is nothing to be done by none."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[(programs,)](*args, **constants, num_warps=warps, **EXACT)
