"""Copies of the weights that train by themselves, and meet where they have drifted most: with loops over ranks.

Shares with the library torch's Muon, and nothing else.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference.releases import evenly, rounded, steps_of


class Settings(NamedTuple):
    """Of a training; see `benchmarks/race/methods/drift.py`."""

    optimizer: str
    factor: str
    longer: str
    score: str
    decay: str
    density: float
    rate: float
    weight_decay: tuple[float, float]
    """Of matrices and vectors."""


class ReferenceDrift:
    """n ranks, one list entry each.

    Args:
        matrices: where training begins.
        vector: likewise; it has no copies.
        n: ranks.
        settings: of the training.
    """

    def __init__(self, matrices: list[Tensor], vector: Tensor, n: int, settings: Settings) -> None:
        self.n, self.by, self.vector = n, settings, vector.clone()
        self.copies = [[x.clone() for x in matrices] for _ in range(n)]
        self.agreed = flat(matrices)
        self.gradients = [torch.zeros_like(self.agreed) for _ in range(n)]
        self.factor = 1.0 if settings.factor == "one" else math.sqrt(n)
        self.own = self.joint = 0.0
        self.optimizers = [Stepper(settings.optimizer, copy) for copy in self.copies]
        self.of_vector = Stepper(settings.optimizer, [self.vector])

    def step(self, gradients: list[list[Tensor]], of_vector: list[Tensor], number: int) -> None:
        """All ranks step by their own gradients, then meet."""
        by, factor = self.by, self.factor
        decay = by.weight_decay[0]
        if by.decay == "agreed":
            away = self.agreed * (by.rate * decay)
            for copy in self.copies:
                for part, less in zip(copy, away.split([x.numel() for x in copy]), strict=True):
                    part -= less.view_as(part)
            self.agreed = self.agreed - away
        for rank in range(self.n):
            self.gradients[rank] = self.gradients[rank] + flat(gradients[rank])
            rate = by.rate * factor if by.longer == "steps" else by.rate
            self.optimizers[rank].step(gradients[rank], rate, 0.0 if by.decay == "agreed" else decay / factor)
        mean = sum(of_vector[1:], of_vector[0]) / self.n
        self.of_vector.step([mean], by.rate, by.weight_decay[1])
        self.meet(number)

    def meet(self, number: int) -> None:
        """Average the drift where it counts most."""
        drifts = [self.agreed - flat(copy) for copy in self.copies]
        gain = self.by.score == "gain"
        scores = [(d * s if gain else d).abs() for d, s in zip(drifts, self.gradients, strict=True)]
        k = int(self.by.density * len(self.agreed))
        picks, spares = zip(*(self.picked(scores[rank], rank, number, k) for rank in range(self.n)), strict=True)
        every = {place for pick in picks for place in pick}
        others = {place for spare in spares for place in spare} - every
        kept = evenly(sorted(every), k, number)
        union = torch.tensor(sorted(kept + evenly(sorted(others), k - len(kept), number)))
        all_picks = [torch.tensor(sorted(a + b)) for a, b in zip(picks, spares, strict=True)]
        steps = steps_of(torch.stack(drifts).double(), all_picks)
        given = [rounded(d[union].double(), steps[union], 32767 // self.n).float() for d in drifts]
        mean = sum(given[1:], given[0]) / self.n
        moved = mean * (1.0 if self.by.longer == "steps" else self.factor)
        self.agreed[union] = self.agreed[union] - moved
        for rank, copy in enumerate(self.copies):
            whole = flat(copy)
            whole[union] = self.agreed[union] - (drifts[rank][union] - given[rank])
            for part, new in zip(copy, whole.split([x.numel() for x in copy]), strict=True):
                part.copy_(new.view_as(part))
            self.gradients[rank][union] = 0.0
        if self.by.factor == "measured":
            squares = [sum(x * x for x in d[union].tolist()) for d in drifts]
            self.own = 0.95 * self.own + sum(squares) / self.n
            self.joint = 0.95 * self.joint + sum(x * x for x in mean.tolist())
            self.factor = min(max(1.0, self.own / self.joint), float(self.n))

    def picked(self, score: Tensor, rank: int, number: int, k: int) -> tuple[list[int], list[int]]:
        """Its share of the largest of all, and of the others in its stripe; as in the first 64 steps of UnionTopK."""
        turn = (rank - number) % self.n
        order = sorted(range(len(score)), key=score.tolist().__getitem__, reverse=True)
        share = (k + turn) // self.n
        in_stripe = [place for place in order[share:] if place % self.n == turn]
        return order[:share], in_stripe[: (k + self.n - 1 - turn) // self.n]


class Stepper:
    """Steps tensors in place, by formulas but for Muon; rounded as there, since a sign is all or nothing."""

    def __init__(self, kind: str, tensors: list[Tensor]) -> None:
        self.kind, self.tensors = kind, tensors
        self.average = [torch.zeros_like(x) for x in tensors]
        self.second = [torch.zeros_like(x) for x in tensors]
        self.count = 0
        self.muon = None
        if kind == "muon" and tensors[0].dim() == 2:
            self.parameters = [torch.nn.Parameter(x) for x in tensors]
            self.muon = torch.optim.Muon(self.parameters, adjust_lr_fn="match_rms_adamw")

    def step(self, gradients: list[Tensor], rate: float, decay: float) -> None:
        """Muon; AdamW beside it; Lion; SGD with momentum."""
        self.count += 1
        if self.muon is not None:
            self.muon.param_groups[0].update(lr=rate, weight_decay=decay)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            self.muon.step()
            return
        for x, g, m, v in zip(self.tensors, gradients, self.average, self.second, strict=True):
            if self.kind == "lion":
                sign = m.lerp(g, 1 - 0.9).sign()
                m.lerp_(g, 1 - 0.99)
                x.mul_(1 - rate * decay).sub_(sign, alpha=rate)
            elif self.kind == "sgd":
                m.mul_(0.9).add_(g.add(x, alpha=decay))
                x.sub_(m, alpha=rate)
            else:
                m.copy_(0.9 * m + 0.1 * g)
                v.copy_(0.95 * v + 0.05 * g * g)
                quotient = (m / (1 - 0.9**self.count)) / ((v / (1 - 0.95**self.count)).sqrt() + 1e-8)
                x.copy_(x * (1 - rate * decay) - rate * quotient)


def flat(tensors: list[Tensor]) -> Tensor:
    """One vector of all."""
    return torch.cat([x.flatten() for x in tensors])
