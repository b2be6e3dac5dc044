"""Orthonormal changes of basis, block by block."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

SIDE = 64


@functools.cache
def cosines(n: int) -> Tensor:
    """The orthonormal DCT-II, (n, n): rows are frequencies.

    Example:
        >>> torch.allclose(cosines(5) @ cosines(5).T, torch.eye(5), atol=1e-6)
        True
    """
    k, x = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    rows = torch.cos(math.pi / n * (x + 0.5) * k) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows.float()


@functools.cache
def hadamard(n: int) -> Tensor:
    """The orthonormal and symmetric Hadamard matrix, (n, n), for powers of two.

    Example:
        >>> hadamard(4) @ hadamard(4)
        tensor([[1., 0., 0., 0.],
                [0., 1., 0., 0.],
                [0., 0., 1., 0.],
                [0., 0., 0., 1.]])
    """
    if n == 1:
        return torch.ones(1, 1)
    half = hadamard(n // 2)
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)]) / math.sqrt(2)


def divisor_near(n: int, most: int = SIDE) -> int:
    """The largest divisor of n that is not above a bound.

    Example:
        >>> [divisor_near(n) for n in (128, 96, 2000, 65)]
        [64, 48, 50, 13]
    """
    return next(size for size in range(min(n, most), 0, -1) if n % size == 0)


def runs(n: int) -> list[tuple[int, int, int]]:
    """Spans of n places, and the power of two, at most 64, that each is cut by.

    Example:
        >>> runs(200)
        [(0, 192, 64), (192, 200, 8)]
    """
    whole = n // SIDE * SIDE
    found = [(0, whole, SIDE)] if whole else []
    for bit in reversed(range(SIDE.bit_length() - 1)):
        if n - whole >> bit & 1:
            begin = found[-1][1] if found else 0
            found.append((begin, begin + (1 << bit), 1 << bit))
    return found


class Turned:
    """Blocks of a matrix of at most 64 x 64, turned by Hadamard matrices after random changes of sign.

    ``turned = A g B^T`` with orthonormal A and B, so that lengths stay and nothing is lost. Signs are equal on all
    ranks and in all steps.

    Args:
        shape: of the tensor; all dimensions but the first one are one.
        seed: of the signs.
    """

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        self.shape = shape[0], math.prod(shape[1:])
        generator = torch.Generator().manual_seed(seed)
        signs = [torch.randint(2, (n,), generator=generator, device="cpu").float() * 2 - 1 for n in self.shape]
        self._signs = [each.to(torch.get_default_device()) for each in signs]

    def turn(self, x: Tensor) -> Tensor:
        """Into the new basis, (numel,)."""
        rows, columns = self._signs
        return _mixed(x.reshape(self.shape) * rows[:, None] * columns).reshape(-1)

    def back(self, x: Tensor) -> Tensor:
        """Out of it, (numel,)."""
        rows, columns = self._signs
        return (_mixed(x.reshape(self.shape)) * rows[:, None] * columns).reshape(-1)


def _mixed(x: Tensor) -> Tensor:
    """Hadamard matrices times blocks times Hadamard matrices; this is its own inverse."""
    rows, columns = x.shape
    parts = [(x[:, a:b].reshape(-1, n) @ hadamard(n)).view(rows, b - a) for a, b, n in runs(columns)]
    x = torch.cat(parts, 1)
    return torch.cat([(hadamard(n) @ x[a:b].view(-1, n, columns)).view(b - a, columns) for a, b, n in runs(rows)])
