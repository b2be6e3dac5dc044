"""SparseLoCo: local steps, of which each rank sends the largest of each chunk in two bits."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.race.flat import Flat, pieces
from benchmarks.race.methods.base import Method, Place, Rate, step_with
from lightning_sparse.core.messages import AllGather, Steps

CHUNK = 4096


class SparseLoCo(Method):
    """AdamW alone for H steps; then the largest of each chunk of what waits, rounded to four values of its tensor.

    ``e = decay e + (begin - x)``; what is sent leaves e; the outer step goes by the mean over those ranks that name a
    coordinate, each rank's part being clipped to the median of the ranks' norms. Vectors are averaged densely. Chunks
    are runs of a tensor, so that each tensor has one pick in 64; the authors' are blocks of its rows and columns.
    arXiv 2508.15706; the mean over contributors and the clipping are those of the code that the authors train with
    (tplr-ai/templar).

    Args:
        flat: of the model.
        at: this rank.
        every: H.
        outer: rate of the outer step.
        decay: of what waits.
        k: picks of a chunk of 4096, an even number.
    """

    version = 2
    kept: ClassVar[tuple[str, ...]] = ("error", "begin")
    local = True

    def __init__(
        self, flat: Flat, at: Place, every: int = 30, outer: float = 1.0, decay: float = 0.95, k: int = 64
    ) -> None:
        super().__init__(flat, at)
        self.every, self.outer, self.decay, self.k = every, outer, decay, k
        self.optimizer = self.adamw(*flat.both)
        self.begin: list[Tensor] = [p.data.clone() for p in flat.both]
        self.error: Tensor = torch.zeros_like(flat.matrices.data)

    def step(self, rate: Rate, step: int) -> Steps[None]:
        step_with(self.optimizer, rate)
        if (step + 1) % self.every == 0 or step + 1 == self.at.steps:
            yield from self.meet()

    def meet(self) -> Steps[None]:
        """The end of a round."""
        gone = [begin - p.data for begin, p in zip(self.begin, self.flat.both, strict=True)]
        self.error.mul_(self.decay).add_(gone[0])
        packed, own = zip(*(packed_of(e, self.k) for e in pieces(self.error, self.flat.shapes)), strict=True)
        for part, (places, values) in zip(pieces(self.error, self.flat.shapes), own, strict=True):
            part.view(-1).index_add_(0, places, -values)
        messages = yield from self.matrices.watch(_gathered(torch.cat(packed)))
        spans = messages.split([len(part) for part in packed], dim=1)
        update = torch.cat([self._mean(span, shape) for span, shape in zip(spans, self.flat.shapes, strict=True)])
        self.begin[0].sub_(update, alpha=self.outer)
        self.begin[1].sub_((yield from self.mean(gone[1], self.vectors)), alpha=self.outer)
        self.flat.load(self.begin)

    def _mean(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Over contributors, from the bytes of all ranks."""
        numel = torch.Size(shape).numel()
        received = [unpacked(row.contiguous(), numel, self.k) for row in rows]
        norms = torch.stack([values.norm() for _, values in received])
        limit = norms.median()  # torch's: the lower one of two in the middle
        total, count = torch.zeros(numel), torch.zeros(numel)
        for (places, values), norm in zip(received, norms, strict=True):
            shorter = (limit / norm.clamp(min=1e-12)).clamp(max=1.0)
            total.index_add_(0, places, values * shorter)
            count.index_add_(0, places, torch.ones_like(values))
        return total / count.clamp(min=1)

    def shared(self) -> list[Tensor]:
        return self.begin


def _gathered(x: Tensor) -> Steps[Tensor]:
    return (yield AllGather(x))


def packed_of(tensor: Tensor, k: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The largest k of each chunk, as bytes: 12 bits for a place, 2 for a value, and the four values as float32.

    Returns:
        Bytes; and places and values as every rank will read them.
    """
    flat = tensor.reshape(-1)
    chunks = -(-flat.numel() // CHUNK)
    rows = torch.nn.functional.pad(flat, (0, chunks * CHUNK - flat.numel())).view(chunks, CHUNK)
    places = rows.abs().topk(k, dim=1).indices
    values = rows.gather(1, places)
    codes, table = quantized(values)
    even, odd = places[:, 0::2].reshape(-1), places[:, 1::2].reshape(-1)
    index = torch.stack([even & 255, (even >> 8) | ((odd & 15) << 4), odd >> 4], 1).to(torch.uint8)
    quads = codes.view(-1, 4)
    two_bits = (quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6).to(torch.uint8)
    message = torch.cat([index.view(-1), two_bits, table.view(torch.uint8)])
    return message, unpacked(message, flat.numel(), k)


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of four bins over six standard deviations, and the mean of what is in each."""
    mean, deviation = values.mean(), values.std()
    codes = ((values - mean) / (6 * deviation / 4).clamp(min=1e-30) + 2).round().clamp(0, 3).long()
    flat = codes.view(-1)
    counts = torch.bincount(flat, minlength=4)
    table = torch.zeros(4).index_add_(0, flat, values.reshape(-1)) / counts.clamp(min=1)
    return flat, table


def unpacked(message: Tensor, numel: int, k: int) -> tuple[Tensor, Tensor]:
    """Places and values of a message; picks of padding are left out."""
    chunks = -(-numel // CHUNK)
    picks = chunks * k
    index, two_bits, table = message.split([picks * 3 // 2, picks // 4, 16])
    first, second, third = index.view(-1, 3).long().unbind(1)
    places = torch.stack([first | (second & 15) << 8, second >> 4 | third << 4], 1).view(chunks, k)
    places = (places + CHUNK * torch.arange(chunks)[:, None]).view(-1)
    codes = torch.stack([two_bits >> shift & 3 for shift in (0, 2, 4, 6)], 1).view(-1).long()
    values = table.clone().view(torch.float32)[codes]
    inside = places < numel
    return places[inside], values[inside]
