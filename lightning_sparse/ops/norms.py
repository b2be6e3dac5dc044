"""Norms of gradients, in float64, that do not depend on where gradients lie."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.core.layout import sum_dtype
from lightning_sparse.ops import on_device, static_shapes

CHUNK = 1 << 16
"""Elements of a partial norm: float32 sums of millions of squares are wrong in the fourth digit."""
LEAST = 1e-12
"""Norm of which float32 squares hold enough digits, however many elements it is made of."""


def norm(x: Tensor) -> Tensor:
    """Return the () float64 Euclidean norm of a vector; infinite or NaN if an element is."""
    if static_shapes(x.device):
        return on_device.norm(x)
    dtype = sum_dtype(x.dtype)
    whole = x.numel() // CHUNK * CHUNK
    rows = torch.linalg.vector_norm(x[:whole].view(-1, CHUNK), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(x[whole:], dtype=dtype)
    total: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]), dtype=torch.float64)
    if not LEAST < total < math.inf:  # squares of more than 1e19 are beyond float32, and those of less than 1e-19
        wide = [torch.linalg.vector_norm(chunk.double()) for chunk in torch.split(x, CHUNK)]
        total = torch.linalg.vector_norm(torch.stack(wide))
    return total


def joint_norm(pieces: Sequence[Tensor]) -> Tensor:
    """Return the () float64 Euclidean norm of the concatenation of vectors, at least one."""
    if len(pieces) == 1:
        return norm(pieces[0])
    if static_shapes(pieces[0].device):
        return torch.linalg.vector_norm(torch.stack([norm(piece) for piece in pieces]))  # type: ignore[no-any-return]
    short = [piece for piece in pieces if piece.numel() <= CHUNK]
    norms = [norm(piece) for piece in pieces if piece.numel() > CHUNK]
    if short:  # at once: a norm of its own takes five calls
        dtype = sum_dtype(short[0].dtype)
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(short, dtype=dtype)), dtype=torch.float64)
        norms += [total] if LEAST < total < math.inf else [norm(piece) for piece in short]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole
