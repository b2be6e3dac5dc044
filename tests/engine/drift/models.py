"""What tests of drift train: a model, batches, optimizers, and the rule in plain loops over all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

DENSITY = 0.1
OPTIONS: dict[str, Any] = {"density": DENSITY, "grouping": "model", "sparsifier": "shared_top_k"}
Made = Callable[[Sequence[dict[str, Any]]], Optimizer]


class Lion(Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Step by the sign of a mean of gradients."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(m.lerp(p.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - beta2)
        return loss


KINDS: dict[str, Made] = {
    "lion": lambda groups: Lion(groups, lr=0.01, weight_decay=0.1),
    "muon": lambda groups: torch.optim.Muon(groups, lr=0.02, weight_decay=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 60), nn.LayerNorm(60), nn.Tanh(), nn.Linear(60, 40), nn.Linear(40, 4))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(module: Any, x: Tensor) -> Tensor:
    found: Tensor = (module(x) - x[:, :4].sin()).square().mean()
    return found


def is_sparse(p: Tensor) -> bool:
    return p.dim() > 1 and p.numel() >= 256


def optimizers(kind: str, parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """One for all, or Muon for matrices and AdamW for the rest."""
    parameters = list(parameters)
    if kind != "muon":
        return [KINDS[kind]([{"params": parameters}])]
    matrices, rest = ([p for p in parameters if is_sparse(p) is one] for one in (True, False))
    return [KINDS[kind]([{"params": matrices}]), torch.optim.AdamW(rest, lr=0.01)]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def total(rows: Sequence[Tensor]) -> Tensor:
    """In the order of ranks."""
    found = rows[0]
    for row in rows[1:]:
        found = found + row
    return found


class Reference:
    """The rule with SharedTopK and exact messages, all ranks in one process.

    Args:
        kind: of :data:`KINDS`.
        n: ranks.
        gain: see Drift.
    """

    def __init__(self, kind: str, n: int, gain: bool = True) -> None:
        self.n, self.gain, self.averages = n, gain, kind == "muon"
        self.replicas = [copy.deepcopy(net()) for _ in range(n)]
        self.sparse = [[p for p in r.parameters() if is_sparse(p)][::-1] for r in self.replicas]  # groups are reversed
        self.dense = [[p for p in r.parameters() if not is_sparse(p)] for r in self.replicas]
        self.factor, self.sums = (1.0 if kind == "sgd" else math.sqrt(n)), (0.0, 0.0)
        self.steps: list[list[Optimizer]] = []
        for sparse, dense in zip(self.sparse, self.dense, strict=True):
            if kind == "muon":
                self.steps.append([KINDS[kind]([{"params": sparse[::-1]}]), torch.optim.AdamW(dense, lr=0.01)])
            else:
                self.steps.append([KINDS[kind]([{"params": sparse[::-1]}, {"params": dense}])])
        self.decay = self.steps[0][0].param_groups[0]["weight_decay"]
        self.rate = self.steps[0][0].param_groups[0]["lr"]
        self.linear = kind == "sgd"
        self.agreed = flat(self.sparse[0])
        self.pushed = [torch.zeros_like(self.agreed) for _ in range(n)]

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.step(step)

    def step(self, step: int) -> None:
        for rank, replica in enumerate(self.replicas):
            replica.zero_grad()
            loss_of(replica, batch(step, rank)).backward()
            self.pushed[rank] += flat(p.grad for p in self.sparse[rank])  # type: ignore[misc]
        for same in zip(*self.dense, strict=True):
            mean = total([p.grad for p in same]) / self.n
            for p in same:
                p.grad = mean.clone()
        for optimizers in self.steps:
            settings = optimizers[0].param_groups[0]
            settings["lr"] = self.rate if self.averages else self.rate * self.factor
            settings["weight_decay"] = self.decay if self.linear else self.decay * (1 / self.factor)
            for one in optimizers:
                one.step()
        self.meet(step)

    def meet(self, step: int) -> None:
        away = [self.agreed - flat(ps) for ps in self.sparse]
        scores = [d * s if self.gain else d for d, s in zip(away, self.pushed, strict=True)]
        k = int(DENSITY * len(self.agreed)) // self.n
        union = torch.tensor(sorted({i for one in scores for i in one.abs().topk(k).indices.tolist()}))
        mean = total([d[union] for d in away]) / self.n
        self.agreed[union] = torch.sub(self.agreed[union], mean, alpha=self.factor if self.averages else 1.0)
        for rank, ps in enumerate(self.sparse):
            mine = flat(ps)
            mine[union] = self.agreed[union]
            self.pushed[rank][union] = 0
            nn.utils.vector_to_parameters(mine, ps)
        if self.averages:
            own = sum(float(d[union].double().square().sum()) for d in away) / self.n
            self.sums = 0.95 * self.sums[0] + own, 0.95 * self.sums[1] + float(mean.double().square().sum())
            self.factor = min(max(1.0, self.sums[0] / self.sums[1]), float(self.n))

    def weights(self) -> list[Tensor]:
        """Each rank's own."""
        return [flat(replica.parameters()) for replica in self.replicas]
