"""What ranks tell each other of their picks, on the CPU; see :mod:`~lightning_sparse.exchanges.packed_union`."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.host_arrays import compiled_on
from lightning_sparse.kernels.native_picks import Heard, body_words

BLOCK = 1 << 16
"""Coordinates that a 16-bit offset can tell apart."""
CLASSES, CLASS_BITS = 8, 3
"""Classes of magnitude of a rank's picks, each 2**3 times smaller than the one before."""
LOWEST = -1100
"""A *level* is the exponent of a step, counted from here, below that of any number."""
SILENT, LEVELS, TROUBLE = 0, 4096, (1 << 20) - 1
"""The level of a rank that has picked nothing but zeros; what those of numbers are below; that of one with a value that
is not finite."""


def tell(acc: Tensor, indices: Tensor, spare: Tensor | None, count: int, most: int, blocks: int) -> Tensor | None:
    """The message of one rank: number of picks and level of the largest; coordinates; and four bits for each.

    Args:
        acc: (numel + 1,) values.
        indices: (c,) integers up to numel, those of a block behind those of the blocks before it.
        spare: (c,) bool.
        count: how many of the indices are picks.
        most: steps of the largest value.
        blocks: of 65 536 coordinates: the slot at which each ends is told, and two 16-bit offsets a word, of which the
            first may have borrowed from the second. 0: whole coordinates.

    Returns:
        int32 words; None where the indices of blocks are in another order.
    """
    if compiled := compiled_on(acc):
        return compiled.picks.tell(acc, indices, spare, count, most, blocks)
    places, slots = indices.numpy(), indices.numel()
    if blocks and (np.diff(places // BLOCK) < 0).any():
        return None
    body = body_words(slots, blocks)
    words = np.zeros(2 + body + (slots + 7) // 8, dtype=np.int32)
    magnitudes = np.abs(acc.numpy().take(places))
    largest = magnitudes.max(initial=0)
    words[:2] = count, _level_of(largest / magnitudes.dtype.type(most))
    if blocks:
        words[2 : 2 + blocks] = np.searchsorted(places, np.arange(1, blocks + 1) * BLOCK)
        offsets = words[2 + blocks : 2 + body]
        offsets.view(np.uint16)[:slots] = places.astype(np.uint16)
        offsets -= (offsets & 0x8000) << 1
    else:
        words[2 : 2 + body] = places
    nibbles = np.zeros(8 * (words.size - 2 - body), dtype=np.uint8)
    if 0 < largest < math.inf:
        for c in range(1, CLASSES):
            bound = np.ldexp(largest, -CLASS_BITS * c)
            if np.ldexp(bound, CLASS_BITS * c) > largest:  # it is subnormal, and was rounded up
                bound = np.nextafter(bound, 0, dtype=bound.dtype)
            nibbles[:slots] += magnitudes <= bound
    if spare is not None:
        nibbles[:slots] |= spare.numpy().view(np.uint8) << 3
    words[2 + body :].view(np.uint8)[:] = nibbles[0::2] | nibbles[1::2] << 4
    return torch.from_numpy(words)


def hear(rows: Tensor, ends: list[int], slots: int, blocks: int, padding: int) -> Heard:
    """Read what :func:`tell` has written.

    Args:
        rows: (n, words) int32.
        ends: how many indices of each rank are picks, from 0 to ``slots``.
        slots: indices of each rank.
        blocks: see :func:`tell`.
        padding: what coordinates are limited to.
    """
    if native.library:
        return native.library.picks.hear(rows, ends, slots, blocks, padding)
    places, levels, spares = (np.empty(sum(ends), dtype=dtype) for dtype in (np.int64, np.int64, bool))
    body, start, lowest = 2 + body_words(slots, blocks), 0, SILENT
    firsts = np.arange(blocks + 1) * BLOCK
    for rank, (row, end) in enumerate(zip(np.ascontiguousarray(rows.numpy()), ends, strict=True)):
        own, top = slice(start, start + end), int(row[1])
        counts = np.diff(row[2 : 2 + blocks].astype(np.int64), prepend=0, append=slots)
        outside = not blocks and end and not 0 <= row[2 : 2 + end].min() <= row[2 : 2 + end].max() <= padding
        if outside or (counts < 0).any() or not (SILENT <= top < LEVELS or top == TROUBLE):
            lowest = -1 - rank
            break
        if blocks:
            offsets = row[2 + blocks : body]
            offsets = (offsets + ((offsets & 0x8000) << 1)).view(np.uint16)
            np.add(np.repeat(firsts, counts)[:end], offsets[:end], out=places[own])
            np.minimum(places[own], padding, out=places[own])
        else:
            places[own] = row[2 : 2 + end]
        octets = row[body : body + (slots + 7) // 8].view(np.uint8)
        nibbles = np.stack([octets & 15, octets >> 4], axis=1).reshape(-1)[:end]
        np.greater_equal(nibbles, CLASSES, out=spares[own])
        nibbles &= CLASSES - 1
        level_of = np.maximum(top - CLASS_BITS * np.arange(CLASSES), SILENT)
        level_of.take(nibbles, out=levels[own])
        lowest, start = max(lowest, int(level_of[nibbles.max(initial=0)]) if end else top), start + end
    picks, spare = (list(torch.split(torch.from_numpy(x), ends)) for x in (places, spares))
    return Heard(picks, spare, torch.from_numpy(levels), lowest)


def _level_of(step: np.floating) -> int:
    """Level of the smallest power of two that is not below a magnitude."""
    if not step < math.inf:
        return TROUBLE
    mantissa, exponent = np.frexp(step)
    return int(exponent) - (mantissa == 0.5) - LOWEST if step else SILENT
