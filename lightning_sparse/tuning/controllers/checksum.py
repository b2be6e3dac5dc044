"""A checksum to compare tensors between ranks without sending them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lightning_sparse.ops import static_shapes

ROW = 1 << 16
"""Words of a row; each place in a row has its own weight in a checksum. There may be as many rows, and one more."""
ROWS_ON_DEVICES = 64
"""Rows that are summed at a time on a device."""


def checksum(x: Tensor) -> Tensor:
    """Return the sum of bit patterns, as signed words of at most 32 bits, times a weight per place, as () int64.

    The sum is modulo 2**64. Weights are odd, so that a single different word always changes it. Several different
    words, words that change places or words that change their signs together are missed with a chance of about 2**-32:
    weights are random numbers, the same ones on all ranks and devices.

    Example:
        >>> given = torch.tensor([1.0, 2.0, 3.0])
        >>> [bool(checksum(torch.tensor(x)) == checksum(given)) for x in ([1.0, 2, 3], [2.0, 1, 3], [-1.0, -2, 3])]
        [True, False, False]
    """
    bits = x.detach().reshape(-1).contiguous().view({1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32))
    columns, rows = weights(x.device)
    whole = bits.numel() // ROW
    # On a CPU a row at a time, which fits into the cache; on a device enough rows to outweigh a kernel's launch.
    at_once = ROWS_ON_DEVICES if static_shapes(x.device) else 1
    pieces = torch.split(bits[: whole * ROW].view(whole, ROW), at_once) if whole else ()
    sums = [(piece.long() * columns).sum(1) for piece in pieces]
    rest = bits[whole * ROW :]
    sums.append((rest.long() * columns[: rest.numel()]).sum().view(1))
    return (torch.cat(sums) * rows[: whole + 1]).sum()


@functools.cache
def weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return odd random numbers of 64 bits, for places in a row and for rows."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (2, ROW + 1), generator=generator, dtype=torch.int64, device="cpu") | 1
    columns, rows = drawn.to(device)
    return columns[:ROW], rows
