"""What needs no new optimizer: the average of all gradients, and PowerSGD's approximation of it."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.race.flat import Flat, pieces
from benchmarks.race.methods.base import Method, Place, Rate, step_with
from lightning_sparse.core.messages import Steps


class Dense(Method):
    """AdamW on the mean gradient, as behind DDP."""

    clips_averages = True

    def __init__(self, flat: Flat, at: Place) -> None:
        super().__init__(flat, at)
        self.optimizer = self.adamw(*flat.both)

    def step(self, rate: Rate, step: int) -> Steps[None]:
        grad = self.flat.matrices.grad
        grad.copy_((yield from self.mean(grad, self.matrices)))
        yield from self.average_vectors()
        self.clip_averages_()
        step_with(self.optimizer, rate)


class PowerSGD(Method):
    """A matrix of low rank in place of each gradient, with error feedback and warm start; AdamW on it.

    One step of power iteration: P = M Q is summed over ranks and orthonormalised, Q = M^T P is averaged, and the
    average is P Q^T. Matrices for which that saves less than half are dense, and so are the first steps, as torch's
    own hook has it. Vogels et al., PowerSGD, NeurIPS 2019, arXiv 1905.13727, algorithm 1.

    Args:
        flat: of the model.
        at: this rank.
        rank: of the matrices.
        begin: dense steps at the start; torch's hook takes 2 or more.
        least: how many times smaller a matrix must become.
    """

    clips_averages = True
    kept: ClassVar[tuple[str, ...]] = ("error", "qs")

    def __init__(self, flat: Flat, at: Place, rank: int = 1, begin: int = 2, least: float = 2.0) -> None:
        super().__init__(flat, at)
        self.rank, self.begin, self.least = rank, begin, least
        self.optimizer = self.adamw(*flat.both)
        self.error: Tensor = torch.zeros_like(flat.matrices.data)
        self.qs: list[Tensor] | None = None

    def step(self, rate: Rate, step: int) -> Steps[None]:
        grad = self.flat.matrices.grad
        if step < self.begin:
            grad.copy_((yield from self.mean(grad, self.matrices)))
        else:
            grad.add_(self.error)
            before = grad.clone()
            yield from self._approximate_()
            torch.sub(before, grad, out=self.error)
        yield from self.average_vectors()
        self.clip_averages_()
        step_with(self.optimizer, rate)

    def _approximate_(self) -> Steps[None]:
        """Replace the gradient by the average's approximation, equal on all ranks."""
        every = [piece.flatten(1) for piece in pieces(self.flat.matrices.grad, self.flat.shapes)]
        low = [x for x in every if self.rank * sum(x.shape) * self.least < x.numel()]
        high = [x for x in every if self.rank * sum(x.shape) * self.least >= x.numel()]
        if self.qs is None:
            seed = random.Random(self.at.seed).randint(0, 1_000_000_000)
            generator = torch.Generator().manual_seed(seed)
            drawn = [torch.randn(x.shape[1], min(self.rank, *x.shape), generator=generator, device="cpu") for x in low]
            self.qs = [each.to(self.error.device) for each in drawn]
        for q in self.qs:
            orthonormalize_(q)
        if high:
            yield from self._mean_of(high)
        ps = [x @ q for x, q in zip(low, self.qs, strict=True)]
        yield from self._mean_of(ps)
        for p, q, x in zip(ps, self.qs, low, strict=True):
            orthonormalize_(p)
            torch.mm(x.T, p, out=q)
        yield from self._mean_of(self.qs)
        for x, p, q in zip(low, ps, self.qs, strict=True):
            torch.mm(p, q.T, out=x)

    def _mean_of(self, parts: list[Tensor]) -> Steps[None]:
        joined = yield from self.mean(torch.cat([part.flatten() for part in parts]), self.matrices)
        for part, mean in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
            part.copy_(mean.view(part.shape))


def orthonormalize_(matrix: Tensor) -> None:
    """Make the columns orthonormal, one after the other."""
    for i in range(matrix.shape[1]):
        column: Any = matrix[:, i : i + 1]
        column /= column.norm()
        rest = matrix[:, i + 1 :]
        rest -= column * (column * rest).sum(0, keepdim=True)
