"""The passes of :mod:`~lightning_sparse.ops.reference`, by kernels in Triton where there are some.

These are for float32 on CUDA, and give the same: picks bit for bit (of equal magnitudes the first ones, where torch may
take others), sums up to their last bits, which only a rank's own thresholds see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.core.layout import Span
from lightning_sparse.ops import reference
from lightning_sparse.ops.on_cuda import on_cuda

MOST_NUMEL = (1 << 30) - 1
"""Longest vector: kernels count twice its coordinates in 31 bits."""


def top_k(x: Tensor, k: int) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.top_k`."""
    few = min(k, FEW)
    works = _takes(x, top_k, lambda y: reference.top_k(y, few), lambda y: _top_k(y, few))
    return _top_k(x, k) if works else reference.top_k(x, k)


def above(x: Tensor, threshold: Tensor, span: Span | None, capacity: int, phase: int) -> tuple[Tensor, Tensor]:
    """Do the work of :func:`lightning_sparse.ops.above`; ranges are left to torch."""

    def plain(y: Tensor) -> tuple[Tensor, Tensor]:
        return reference.above(y, torch.full_like(threshold, FEW / 2), None, FEW // 4, 7)

    def kernel(y: Tensor) -> tuple[Tensor, Tensor]:
        return _above(y, torch.full_like(threshold, FEW / 2), FEW // 4, 7)

    if span is None and _takes(x, above, plain, kernel):
        return _above(x, threshold, capacity, phase)
    return reference.above(x, threshold, span, capacity, phase)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Do the work of :func:`lightning_sparse.ops.moments`."""
    mean, deviation = _sums("moments", x)
    return mean, deviation


def mean_and_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Do the work of :func:`lightning_sparse.ops.mean_and_maximum`."""
    mean, largest = _sums("mean_and_maximum", x)
    return mean, largest


def excess(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do the work of :func:`lightning_sparse.ops.excess`."""
    number, total, squares = _sums("excess", x, threshold)
    return number, total, squares


def log_sum(x: Tensor) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.log_sum`."""
    [total] = _sums("log_sum", x)
    return total


FEW = 4099
"""Values on which kernels are tried."""


def _takes(x: Tensor, what: Any, plain: Callable[[Tensor], Any], kernel: Callable[[Tensor], Any]) -> bool:
    """Return whether a kernel does a pass over a vector; before its first use, it is compared with torch."""
    if not on_cuda.takes(x) or x.dtype != torch.float32 or not x.is_contiguous() or not 1 < x.numel() <= MOST_NUMEL:
        return False

    def attempt() -> None:
        places = torch.arange(FEW, device=x.device)
        few = ((1 + places * 1103 % FEW) * (1 - 2 * (places % 2))).float()  # different magnitudes
        for expected, found in zip(_flat(plain(few)), _flat(kernel(few)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5 if expected.is_floating_point() else 0, atol=0)

    return on_cuda.tried((what, x.device), attempt)


def _flat(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _sums(name: str, x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    plain: Callable[..., Any] = getattr(reference, name)

    def kernel(y: Tensor, *more: Tensor) -> Any:
        from lightning_sparse.ops.triton import sums as triton_sums

        return getattr(triton_sums, name)(y, *more)

    works = _takes(x, name, lambda y: plain(y, *more), lambda y: kernel(y, *more))
    return _flat(kernel(x, *more) if works else plain(x, *more))


def _top_k(x: Tensor, k: int) -> Tensor:
    from lightning_sparse.ops.triton import launch as triton_launch
    from lightning_sparse.ops.triton import select as triton_select
    from lightning_sparse.ops.triton import union as triton_union

    sizes = [triton_select.CONTROL, 2 * triton_select.DIGITS.value, triton_launch.PROGRAMS]
    control, histograms, counts = torch.split_with_sizes(x.new_zeros(sum(sizes), dtype=torch.int32), sizes)
    words = control.new_empty(triton_union.bitmap_words(x.numel()))
    # Nothing is noted, so that the search looks at everything.
    search, bound = triton_select.Scratch(control, histograms, words, counts), x.new_full((), torch.inf)
    return triton_select.pick(x, search, bound, k, k, None, 0, 1).keys.long() >> 1


def _above(x: Tensor, threshold: Tensor, capacity: int, phase: int) -> tuple[Tensor, Tensor]:
    from lightning_sparse.ops.triton import dense as triton_dense
    from lightning_sparse.ops.triton import launch as triton_launch
    from lightning_sparse.ops.triton import union as triton_union

    counts = x.new_empty(triton_launch.PROGRAMS, dtype=torch.int32)
    words = counts.new_empty(triton_union.bitmap_words(x.numel()))
    triton_dense.look(x, words, counts, counts.new_empty(1), threshold.to(x.dtype))
    found, sizes = triton_union.listed(triton_union.Bitmap(words, counts), x.numel(), capacity, phase)
    return found, sizes[1]
