"""A number that tells whether somebody has written to a vector.

On CPUs it is formed in C, in one pass. It is compared on one rank and one device, with what that has formed before.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.ops.c import native
from lightning_sparse.ops.reference import static_shapes

WIDTH = 1021
"""Random factors of words in a sum; a prime, so that rows of matrices have different ones."""


def fingerprint(x: Tensor) -> Tensor:
    """Return a few numbers that change with any one element of at most 32 bits, and very probably with many together.

    Args:
        x: flat, of any floating dtype.

    Returns:
        Numbers on the device of x, for :func:`same`.

    Example:
        >>> x = torch.ones(3)
        >>> before = fingerprint(x)
        >>> x[1] = -1
        >>> bool(same(fingerprint(x), before))
        False
    """
    if native.library is not None and not static_shapes(x.device) and x.is_contiguous():
        return torch.tensor([native.library.fingerprint(x, _factors())], device="cpu")
    bits = torch.int32 if x.element_size() != 2 else torch.int16
    words = x.contiguous().view(bits).sum(dtype=bits)  # wrapping around: a wider sum takes a hundred times as long
    signs = _signs(x.device, x.dtype)
    whole = len(x) - len(x) % WIDTH
    rows, rest = x[:whole].view(-1, WIDTH), x[whole:]
    return torch.stack([words.double(), (rows @ signs).sum().double(), (rest @ signs[: len(rest)]).double()])


def same(one: Tensor, other: Tensor) -> Tensor:
    """Return the () flag that is set if two fingerprints are of the same vector; they may hold NaN."""
    return ((one == other) | (one.isnan() & other.isnan())).all()


@lru_cache(maxsize=1)
def _factors() -> Tensor:
    odd = np.random.default_rng(0).integers(0, 1 << 31, WIDTH) * 2 + 1
    return torch.from_numpy(odd.astype(np.uint32).view(np.int32))


@lru_cache(maxsize=16)
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    random = np.random.default_rng(0).standard_normal(WIDTH)
    return torch.from_numpy(random).to(device, dtype)
