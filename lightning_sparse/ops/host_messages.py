"""Messages of picks, on the CPU; see :mod:`~lightning_sparse.methods.exchanges.packed_union`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.ops.form import NIBBLE, OCTET, Form
from lightning_sparse.ops.host_arrays import compiled_on

CLASSES, CLASS_BITS = 8, 3
"""Classes of magnitude of a rank's picks, each 2**3 times smaller than the one before."""
LOWEST = -1100
"""A *level* is the exponent of a step, counted from here, below that of any number."""
SILENT, LEVELS, TROUBLE = 0, 4096, (1 << 20) - 1
"""The level of a rank that has picked nothing but zeros; what those of numbers are below; that of one with a value that
is not finite."""


class Heard(NamedTuple):
    """Messages of all ranks, read."""

    picks: list[Tensor]
    """(c,) int64 coordinates of each rank, ascending."""
    spares: list[Tensor]
    """(c,) bool: which of them are spare."""
    levels: Tensor
    """int64 levels of all of them, one rank after another."""
    lowest: int
    """The largest of all ranks' lowest levels; -1 - r where the message of rank r cannot be."""


def tell(acc: Tensor, indices: Tensor, spare: Tensor | None, count: int, most: int, form: Form) -> Tensor | None:
    """The message of one rank: number of picks and level of the largest; coordinates; and four bits for each.

    Args:
        acc: (numel + 1,) values.
        indices: (slots,) integers up to numel, ascending.
        spare: (slots,) bool.
        count: how many of the indices are picks.
        most: steps of the largest value.
        form: of the message.

    Returns:
        (form.width,) int32, without codes of second values; None where indices do not ascend.
    """
    if compiled := compiled_on(acc):
        return compiled.picks.tell(acc, indices, spare, count, most, form)
    places, slots = indices.numpy(), form.slots
    if (np.diff(places) < 0).any():
        return None
    if slots and places[0] < 0:
        raise IndexError(f"an index is outside of a vector of {acc.numel()}")
    words = np.zeros(form.width, dtype=np.int32)
    magnitudes = np.abs(acc.numpy().take(places))
    largest = magnitudes.max(initial=0)
    words[:2] = count, _level_of(largest / magnitudes.dtype.type(most))
    marks = np.zeros(32 * (form.octets - form.marks), dtype=bool)
    marks[(places >> form.bits) + np.arange(slots)] = True
    words[form.marks : form.octets].view(np.uint8)[:] = np.packbits(marks, bitorder="little")
    words[form.octets : form.nibbles].view(np.uint8)[:slots] = places.astype(np.uint8)
    for plane in range(form.planes):
        _plane_of(words, form, plane)[:] = _packed(places >> (OCTET + NIBBLE * plane) & 15)
    classes = np.zeros(slots, dtype=np.uint8)
    if 0 < largest < math.inf:
        for c in range(1, CLASSES):
            bound = np.ldexp(largest, -CLASS_BITS * c)
            if np.ldexp(bound, CLASS_BITS * c) > largest:  # it is subnormal, and was rounded up
                bound = np.nextafter(bound, 0, dtype=bound.dtype)
            classes += magnitudes <= bound
    if spare is not None:
        classes |= spare.numpy().view(np.uint8) << 3
    _plane_of(words, form, form.planes)[:] = _packed(classes)
    return torch.from_numpy(words)


def hear(rows: Tensor, ends: list[int], form: Form) -> Heard:
    """Read what :func:`tell` has written.

    Args:
        rows: (n, words) int32.
        ends: how many indices of each rank are picks, from 0 to ``slots``.
        form: of the messages.
    """
    places, levels, spares = (np.empty(sum(ends), dtype=dtype) for dtype in (np.int64, np.int64, bool))
    start, lowest = 0, SILENT
    for rank, (row, end) in enumerate(zip(np.ascontiguousarray(rows.numpy()), ends, strict=True)):
        own, top, found = slice(start, start + end), int(row[1]), _places_in(row, form, end)
        if found is None or not (SILENT <= top < LEVELS or top == TROUBLE):
            lowest = -1 - rank
            break
        np.minimum(found, form.numel, out=places[own])
        classes = _unpacked(_plane_of(row, form, form.planes), end)
        np.greater_equal(classes, CLASSES, out=spares[own])
        classes &= CLASSES - 1
        level_of = np.maximum(top - CLASS_BITS * np.arange(CLASSES), SILENT)
        level_of.take(classes, out=levels[own])
        lowest, start = max(lowest, int(level_of[classes.max(initial=0)]) if end else top), start + end
    picks, spare = (list(torch.split(torch.from_numpy(x), ends)) for x in (places, spares))
    return Heard(picks, spare, torch.from_numpy(levels), lowest)


def _places_in(row: NDArray[np.int32], form: Form, count: int) -> NDArray[np.int64] | None:
    """The first coordinates that a message tells; None where it cannot be."""
    marks = np.unpackbits(row[form.marks : form.octets].view(np.uint8), bitorder="little").nonzero()[0]
    if len(marks) != form.slots:
        return None
    places: NDArray[np.int64] = (marks[:count] - np.arange(count)) << form.bits
    places |= row[form.octets : form.nibbles].view(np.uint8)[:count]
    for plane in range(form.planes):
        places |= _unpacked(_plane_of(row, form, plane), count).astype(np.int64) << (OCTET + NIBBLE * plane)
    return None if (np.diff(places) < 0).any() else places


def _plane_of(words: NDArray[np.int32], form: Form, plane: int) -> NDArray[np.uint8]:
    """The bytes of four bits for each pick: of coordinates, and behind these planes the one of classes."""
    size = form.seconds - form.classes
    start = form.nibbles + plane * size
    return words[start : start + size].view(np.uint8)


def _packed(nibbles: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Two in a byte, in whole words."""
    padded = np.zeros(-(-nibbles.size // 8) * 8, dtype=np.uint8)
    padded[: nibbles.size] = nibbles
    return padded[0::2] | padded[1::2] << np.uint8(4)


def _unpacked(octets: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Undo :func:`_packed`."""
    return np.stack([octets & 15, octets >> 4], axis=1).reshape(-1)[:count]


def _level_of(step: np.floating) -> int:
    """Level of the smallest power of two that is not below a magnitude."""
    if not step < math.inf:
        return TROUBLE
    mantissa, exponent = np.frexp(step)
    return int(exponent) - (mantissa == 0.5) - LOWEST if step else SILENT
