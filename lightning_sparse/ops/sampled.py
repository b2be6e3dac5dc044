"""Values at a few places of each of many vectors: in one launch on CUDA, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.core.layout import fills_memory, flattened
from lightning_sparse.ops.addresses import DTYPES, Addresses
from lightning_sparse.ops.on_cuda import compare, on_cuda


class Sampler:
    """Takes values, and keeps addresses from step to step, as long as these do not change."""

    def __init__(self) -> None:
        self._addresses = Addresses()

    def take(self, vectors: Sequence[Tensor | None], places: Tensor) -> Tensor:
        """Return (vectors, s) float64 values; the host waits for nothing.

        Args:
            vectors: of one dtype and any shape. Of None, and of those without elements, values are NaN.
            places: (vectors, s) int64 in each one's elements, in the order of memory; s is a power of two.

        Example:
            >>> Sampler().take([torch.tensor([1.0, 2.0]), None], torch.tensor([[1, 0], [0, 0]]))
            tensor([[2., 1.],
                    [nan, nan]], dtype=torch.float64)
        """
        there = [None if x is None or not x.numel() else x for x in vectors]
        first = next((x for x in there if x is not None), None)
        if first is not None and _serves(there, first) and places.is_contiguous():
            what = Sampler, first.device, first.dtype
            if on_cuda.tried(what, partial(_rehearse, first)):
                return _in_triton(self._addresses, there, first, places)
        return _in_torch(there, places)


def _serves(vectors: Sequence[Tensor | None], first: Tensor) -> bool:
    """Return whether there is a kernel."""
    if first.dtype not in DTYPES or not on_cuda.takes(first):
        return False
    alike = first.device, first.dtype
    return all(x is None or ((x.device, x.dtype) == alike and fills_memory(x)) for x in vectors)


def _in_torch(vectors: Sequence[Tensor | None], places: Tensor) -> Tensor:
    nothing = torch.full(places.shape[1:], torch.nan, dtype=torch.float64, device=places.device)
    rows = [nothing if x is None else flattened(x)[at].double() for x, at in zip(vectors, places.unbind(), strict=True)]
    return torch.stack(rows)


def _in_triton(addresses: Addresses, vectors: Sequence[Tensor | None], first: Tensor, places: Tensor) -> Tensor:
    from lightning_sparse.ops.triton import tables

    values = torch.empty(places.shape, dtype=torch.float64, device=places.device)
    tables.take(addresses.of_each(first.dtype, vectors), places, values, first.dtype)
    return values


def _rehearse(first: Tensor) -> None:
    """Compare what the kernel takes with what torch does.

    Raises:
        MismatchError: if they differ.
    """
    vectors = [torch.arange(7, device=first.device), torch.ones((1, 2), device=first.device)]
    vectors = [x.to(first.dtype) for x in vectors]
    places = torch.arange(8, device=first.device).view(2, 4) % 2
    found, expected = _in_triton(Addresses(), vectors, vectors[0], places), _in_torch(vectors, places)
    compare({"values": found}, {"values": expected}, dtype=first.dtype)
