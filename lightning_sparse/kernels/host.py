"""CPU formulations: numpy over zero-copy views, in chunks that stay in cache.

Torch's own ``topk`` and ``nonzero`` take several times longer on a CPU: they allocate what they return and what they
compare with, and page faults double every pass. Buffers are reused per thread.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 1 << 16
"""Elements per chunk: 256 KiB of float32, which fits into a second-level cache."""

_buffers = threading.local()


def above(x: Tensor, threshold: float, first: int, last: int) -> Tensor:
    """Ascending coordinates in [first, last) with ``|x| >= threshold``."""
    return torch.from_numpy(_above(x.numpy(), threshold, first, last))


def top_k(x: Tensor, k: int) -> Tensor:
    """Ascending coordinates of the k largest magnitudes, ``0 < k < numel``; of equal ones the lower coordinates."""
    return torch.from_numpy(_top_k(x.numpy(), k, 0, x.numel()))


def largest(x: Tensor, k: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Coordinates and magnitudes of the k largest in [first, last), largest first, lower coordinate first."""
    values = x.numpy()
    k = min(k, last - first)
    picked = np.arange(first, last) if k == last - first else _top_k(values, k, first, last)
    magnitudes = np.abs(values[picked])
    order = _descending(magnitudes)
    return torch.from_numpy(picked[order]), torch.from_numpy(magnitudes[order])


def excess(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Number, sum and sum of squares of ``|x| - threshold`` where that is not negative and x is not zero."""
    values = x.numpy()
    magnitudes, mask = _chunk_buffers(values.dtype)
    beyond, _ = _chunk_buffers(np.dtype(np.float64), "beyond")
    bound, level = _lowest(values.dtype, threshold), np.float64(threshold)
    count, total, squares = 0, 0.0, 0.0
    for start in range(0, values.size, CHUNK):
        chunk = values[start : start + CHUNK]
        size = chunk.size
        np.abs(chunk, out=magnitudes[:size])
        count += int(np.count_nonzero(np.greater_equal(magnitudes[:size], bound, out=mask[:size])))
        np.subtract(magnitudes[:size], level, out=beyond[:size])
        np.maximum(beyond[:size], 0.0, out=beyond[:size])
        total += float(beyond[:size].sum())
        squares += float(beyond[:size].dot(beyond[:size]))
    made = torch.tensor([count, total, squares], dtype=torch.float64, device="cpu").unbind()
    return made[0], made[1], made[2]


def log_sum(x: Tensor) -> Tensor:
    """Sum of ``ln |x|`` over the x that are not zero."""
    values = x.numpy()
    magnitudes, mask = _chunk_buffers(values.dtype)
    bound, total = _lowest(values.dtype, 0.0), 0.0
    for start in range(0, values.size, CHUNK):
        chunk = values[start : start + CHUNK]
        size = chunk.size
        np.abs(chunk, out=magnitudes[:size])
        np.less(magnitudes[:size], bound, out=mask[:size])
        np.copyto(magnitudes[:size], 1, where=mask[:size])
        total += float(np.log(magnitudes[:size], out=magnitudes[:size]).sum(dtype=np.float64))
    return torch.tensor(total, dtype=torch.float64, device="cpu")


def tail(x: Tensor, threshold: float) -> Tensor:
    """The magnitudes that reach a threshold, without zeros."""
    values = x.numpy()
    magnitudes, mask = _chunk_buffers(values.dtype)
    bound = _lowest(values.dtype, threshold)
    found = []
    for start in range(0, values.size, CHUNK):
        chunk = values[start : start + CHUNK]
        size = chunk.size
        np.abs(chunk, out=magnitudes[:size])
        np.greater_equal(magnitudes[:size], bound, out=mask[:size])
        found.append(magnitudes[:size].take(np.flatnonzero(mask[:size])))  # a boolean index takes ten times as long
    return torch.from_numpy(np.concatenate(found))


def distinct(indices: Tensor, padding: int) -> Tensor:
    """Ascending different values below ``padding``."""
    ordered = np.sort(indices.numpy())
    first = np.empty(ordered.shape, dtype=bool)
    first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    first &= ordered < padding
    return torch.from_numpy(ordered[first])


def unite(keys: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ascending different coordinates below ``padding`` of keys ``coordinate, 1 bit, 20 bits``."""
    ordered = np.sort(keys.numpy())
    ordered = ordered[: np.searchsorted(ordered, padding << 21)]
    coordinates = ordered >> 21
    starts = np.flatnonzero(np.concatenate([[True], coordinates[1:] != coordinates[:-1]])[: ordered.size])
    levels = ordered & 0xFFFFF
    if starts.size:
        levels = np.maximum.reduceat(levels, starts)
    spare = (ordered[starts] >> 20 & 1).astype(bool)  # the lowest key of each coordinate comes first
    union = torch.from_numpy(coordinates[starts])
    return union, torch.from_numpy(spare), torch.from_numpy(levels), torch.tensor(starts.size, device="cpu")


def locate(ordered: Tensor, values: Tensor) -> Tensor:
    """Positions of ascending values in an ascending tensor that holds them."""
    return torch.from_numpy(np.searchsorted(ordered.numpy(), values.numpy()))


def _above(values: NDArray[np.floating], threshold: float, first: int, last: int) -> NDArray[np.int64]:
    magnitudes, mask = _chunk_buffers(values.dtype)
    bound = values.dtype.type(threshold)
    found = []
    for start in range(first, last, CHUNK):
        chunk = values[start : min(start + CHUNK, last)]
        size = chunk.size
        np.abs(chunk, out=magnitudes[:size])
        np.greater_equal(magnitudes[:size], bound, out=mask[:size])
        hits = np.flatnonzero(mask[:size])
        if hits.size:
            hits += start
            found.append(hits)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def _top_k(values: NDArray[np.floating], k: int, first: int, last: int) -> NDArray[np.int64]:
    """Filter by a lower bound from a sample, then take the exact k-th magnitude among the few that are left."""
    numel = last - first
    candidates = _above(values, _sampled_bound(values, k, first, last), first, last)
    if candidates.size < k:
        candidates = np.arange(first, last)
    magnitudes = np.abs(values[candidates])
    kth = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    keep = magnitudes > kth
    ties = np.flatnonzero(magnitudes == kth)[: k - int(np.count_nonzero(keep))]
    keep[ties] = True
    assert numel >= k
    picked: NDArray[np.int64] = candidates[keep]
    return picked


def _descending(magnitudes: NDArray[np.floating]) -> NDArray[np.int64]:
    """Stable order from the largest on.

    The bits of a non-negative float32 order like the number; with the position below them one sort of integers does,
    which takes a tenth of a stable argsort.
    """
    if magnitudes.dtype != np.float32:
        return np.argsort(-magnitudes, kind="stable")
    keys = (~magnitudes.view(np.uint32)).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(magnitudes.size, dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _sampled_bound(values: NDArray[np.floating], k: int, first: int, last: int) -> float:
    """A magnitude that at least k elements very probably reach, from about 1 % of them at equal distances."""
    numel = last - first
    stride = max(1, min(97, numel // 4096))
    if stride == 1:
        return 0.0
    sample = np.abs(values[first:last:stride])
    share = k / numel
    rank = math.ceil(sample.size * share * 1.3 + 4 * math.sqrt(sample.size * share) + 1)
    if rank >= sample.size:
        return 0.0
    return float(np.partition(sample, sample.size - rank)[sample.size - rank])


def _lowest(dtype: np.dtype[np.floating], threshold: float) -> np.floating:
    """The threshold in this precision, raised above zero."""
    lowest: np.floating = max(dtype.type(threshold), np.finfo(dtype).smallest_normal)
    return lowest


def _chunk_buffers(
    dtype: np.dtype[np.floating], use: str = "magnitudes"
) -> tuple[NDArray[np.floating], NDArray[np.bool_]]:
    buffers: dict[str, tuple[NDArray[np.floating], NDArray[np.bool_]]] = _buffers.__dict__
    key = dtype.char + use
    if key not in buffers:
        buffers[key] = (np.empty(CHUNK, dtype=dtype), np.empty(CHUNK, dtype=bool))
    return buffers[key]
