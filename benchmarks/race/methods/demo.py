"""DeMo and DisTrO: the largest cosine coefficients of each block, at every step, and steps of one length."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.race.flat import Flat, pieces
from benchmarks.race.methods.base import Method, Place, Rate, move_
from benchmarks.race.methods.blocks import cosines, divisor_near
from lightning_sparse.core.messages import AllGather, Steps


class DeMo(Method):
    """``e = decay e + rate DCT(g)`` by blocks; the k largest of each are sent and leave e; steps are signs.

    ``p -= rate sign(IDCT(mean over the ranks that named a coefficient))``, after decoupled weight decay. Blocks are
    64 x 64, or the largest divisors below that; vectors are cut into runs. The DCT is linear, so that e is kept as
    coefficients. Peng et al., arXiv 2411.19870. A place has 16 bits, a value those of bfloat16, whose rounding stays
    in e; with `signs`, a value is one bit, and e loses what it stands for (DisTrO as Psyche trains with it).

    Args:
        flat: of the model.
        at: this rank.
        k: coefficients of a block.
        decay: of what waits.
        signs: send only signs.
    """

    kept: ClassVar[tuple[str, ...]] = ("errors",)
    wire: ClassVar[torch.dtype] = torch.bfloat16
    """Of values."""

    def __init__(self, flat: Flat, at: Place, k: int = 32, decay: float = 0.999, signs: bool = False) -> None:
        super().__init__(flat, at)
        self.k, self.decay, self.signs = k, decay, signs
        kinds = [flat.shapes, flat.vector_shapes]
        self._blocks = [[Blocks(shape) for shape in shapes] for shapes in kinds]
        self.errors = [[torch.zeros(blocks.sizes) for blocks in each] for each in self._blocks]

    def step(self, rate: Rate, step: int) -> Steps[None]:
        kinds = zip(self.flat.both, self._blocks, self.errors, (self.matrices, self.vectors), strict=True)
        for (parameter, every, errors, meter), shapes, decay in zip(
            kinds, (self.flat.shapes, self.flat.vector_shapes), self.at.decay, strict=True
        ):
            parameter.data.mul_(1 - rate * decay)
            if not every:
                continue
            picked = []
            for error, blocks, grad in zip(errors, every, pieces(parameter.grad, shapes), strict=True):
                move_(error.mul_(self.decay), blocks.coefficients(grad), -rate)
                picked.append(error.abs().topk(min(self.k, error.shape[1]), dim=1).indices)
            values = [error.gather(1, places) for error, places in zip(errors, picked, strict=True)]
            for error, places, value in zip(errors, picked, values, strict=True):
                leaves = value if self.signs else value.to(self.wire).float()
                error.scatter_add_(1, places, -leaves)
            where, sent = (torch.cat([each.flatten() for each in parts]) for parts in (picked, values))
            message = torch.cat([where.to(torch.int16).view(torch.uint8), self._coded(sent)])
            rows = yield from meter.watch(_gathered(message))
            where, received = self._decoded(rows, len(sent))
            lengths = [value.numel() for value in values]
            parts = zip(where.split(lengths, 1), received.split(lengths, 1), strict=True)
            for piece, blocks, (places, got) in zip(pieces(parameter.data, shapes), every, parts, strict=True):
                move_(piece, blocks.tensor(mean_of(places, got, blocks.sizes)).sign_(), rate)

    def _coded(self, values: Tensor) -> Tensor:
        """Bytes of values."""
        return packed(values > 0) if self.signs else values.to(self.wire).view(torch.uint8)

    def _decoded(self, rows: Tensor, picks: int) -> tuple[Tensor, Tensor]:
        """Places and values of all ranks, (n, picks) each."""
        where = torch.stack([row[: 2 * picks].clone().view(torch.int16) for row in rows]).long() & 0xFFFF
        codes = [row[2 * picks :].clone() for row in rows]
        values = [unpacked(code, picks) if self.signs else code.view(self.wire).float() for code in codes]
        return where, torch.stack(values)


class Blocks:
    """A tensor as rows of cosine coefficients, one row a block."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._sides = [divisor_near(n) for n in shape]
        self._grid = [n // side for n, side in zip(shape, self._sides, strict=True)]
        self._shape = shape
        count, size = (torch.Size(each).numel() for each in (self._grid, self._sides))
        self.sizes = count, size

    def coefficients(self, x: Tensor) -> Tensor:
        """(blocks, size)."""
        if len(self._sides) == 1:
            return x.view(self._grid[0], -1) @ cosines(self._sides[0]).T
        (a, b), (r, c) = self._grid, self._sides
        cut = x.view(a, r, b, c).transpose(1, 2)
        return (cosines(r) @ cut @ cosines(c).T).reshape(self.sizes)

    def tensor(self, rows: Tensor) -> Tensor:
        """The inverse."""
        if len(self._sides) == 1:
            return (rows @ cosines(self._sides[0])).view(self._shape)
        (a, b), (r, c) = self._grid, self._sides
        cut = cosines(r).T @ rows.view(a, b, r, c) @ cosines(c)
        return cut.transpose(1, 2).reshape(self._shape)


def mean_of(places: Tensor, values: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Mean over those ranks that named a coefficient; (n, picks) to (blocks, size)."""
    blocks, size = sizes
    rows = places.view(len(places), blocks, -1) + size * torch.arange(blocks)[:, None]
    total, count = torch.zeros(blocks * size), torch.zeros(blocks * size)
    total.index_add_(0, rows.flatten(), values.flatten())
    count.index_add_(0, rows.flatten(), torch.ones(values.numel()))
    return (total / count.clamp(min=1)).view(sizes)


def _gathered(x: Tensor) -> Steps[Tensor]:
    return (yield AllGather(x))


def packed(bits: Tensor) -> Tensor:
    """Eight in a byte."""
    whole = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (whole << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpacked(row: Tensor, length: int) -> Tensor:
    """1 or -1 for each bit."""
    bits = row[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten()[:length].float() * 2 - 1
