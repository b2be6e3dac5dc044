"""Other optimizers than AdamW behind an exchange of gradients: dense, and as `sparse_ddp` serves them today.

Muon steps the matrices of layers, AdamW embeddings, the output layer and vectors. All others step everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import lightning_sparse as ls
from benchmarks.adam import Lion
from benchmarks.race.flat import Flat
from benchmarks.race.methods.base import Method, Place, Rate, move_
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Candidates, Context, GroupState
from lightning_sparse.engine.average import spread_divisor
from lightning_sparse.engine.pipeline import Proposed, exchange_group, init_group, settle_group
from lightning_sparse.methods.density import DensitySchedule, as_schedule
from lightning_sparse.methods.exchanges import as_exchange
from lightning_sparse.methods.memory import Memory

OUTER = "words", "places", "out"
"""How names of embeddings and of the output layer begin, which AdamW steps beside Muon."""
DECAYS = {"lion": 10.0, "sgd": 1e-3, "rmsprop": 0.0}
"""Weight decay, as a multiple of AdamW's, where it differs. Lion's rates are as much lower, and those of SGD with
momentum as much higher. RMSprop would add decay to gradients before their scale is taken out: its default is none."""
LARGEST = 1000
"""Side of a matrix that SOAP has a basis for."""
WARM = 1.0
"""Density that a warm-up begins with."""


class Optimized(Method):
    """An optimizer of the user. It serves some matrices by the rule of a subclass, and the others by averages.

    Bytes of the served matrices are those of `matrices`, bytes of all else those of `vectors`.

    Args:
        flat: of the model.
        at: this rank.
        optimizer: `muon`, `lion`, `sgd` with momentum, or one of those in :func:`_made`.
        embeddings: what Muon leaves: `dense`, or `second_moment` as the library serves AdamW.
        density: of what is sparse.
        warm_up: steps in which the density falls from 1 to that.
        clipping: `rank`, or `joint` by one factor for all ranks, see :attr:`Method.clips_jointly`.
    """

    kept: ClassVar[tuple[str, ...]] = ("groups",)

    def __init__(
        self,
        flat: Flat,
        at: Place,
        optimizer: str = "muon",
        embeddings: str = "dense",
        density: float = 0.01,
        warm_up: int = 0,
        clipping: str = "rank",
    ) -> None:
        super().__init__(flat, at)
        self.clips_jointly = clipping == "joint"
        self.density = ls.Warmup(WARM, density, warm_up) if warm_up else as_schedule(density)
        names = [name for name in flat.names if optimizer != "muon" or not name.startswith(OUTER)]
        others = [name for name in flat.names if name not in names]
        self.served, self.others = flat.coordinates(names), flat.coordinates(others)
        self.parts: list[Part] = []
        """Exchanged sparsely."""
        self.embeddings: Part | None = None
        if embeddings == "second_moment":
            self.embeddings = Part(self.others, flat, at, ls.memories.SecondMoment(at.betas[1]), self.density)
            self.parts.append(self.embeddings)
            others = []
        views = flat.views()
        chosen = [views[name] for name in names], [views[name] for name in others]
        self.optimizers += _made(optimizer, *chosen, [views[name] for name in flat.vector_names], at)

    @property
    def groups(self) -> list[GroupState]:
        """States of the parts, without hints that cost nothing to lose."""
        return [part.group._replace(candidates=None) for part in self.parts]

    @groups.setter
    def groups(self, states: Sequence[GroupState]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.group = state._replace(candidates=Candidates())

    def average_others(self, rate: Rate, step: int) -> Steps[None]:
        """Average what the rule does not serve; with second moments, step it, too."""
        grad, data = self.flat.matrices.grad, self.flat.matrices.data
        if self.embeddings is not None:
            given = grad[self.others]
            proposed = yield from self.vectors.watch(self.embeddings.exchange(given, step))
            assert proposed.divisor is not None
            move = given / spread_divisor(proposed.update.indices, proposed.divisor, len(given))
            x = data[self.others].mul_(1 - rate * self.at.decay[0])
            move_(x, move, rate * math.sqrt(self.at.ranks))
            data[self.others] = x
        elif len(self.others):
            grad[self.others] = yield from self.mean(grad[self.others], self.vectors)
        yield from self.average_vectors()

    def step_optimizers(self, rate: Rate, longer: float = 1.0, decays: float = 1.0) -> None:
        """Take a step; for what the rule serves with a longer rate, and with a part of the weight decay."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * longer if group["served"] else rate
                group["weight_decay"] = group["decay"] * (decays if group["served"] else 1.0)
            optimizer.step()


class Part:
    """Some coordinates of the matrices that the library exchanges sparsely.

    Args:
        places: the coordinates.
        flat: of the model.
        at: this rank.
        memory: error feedback.
        density: of each step.
    """

    def __init__(self, places: Tensor, flat: Flat, at: Place, memory: Memory, density: DensitySchedule) -> None:
        self.places = places
        sparsifier = ls.sparsifiers.UnionTopK()
        self._by: dict[str, Any] = {"memory": memory, "sparsifier": sparsifier}
        self._exchange = as_exchange(None, sparsifier, memory)
        self._density, self._ctx = density, Context(0, density(0), at.rank, at.ranks)
        like = flat.matrices
        self.group = init_group(len(places), like.dtype, like.device, self._ctx, **self._by)

    def exchange(self, given: Tensor, step: int) -> Steps[Proposed]:
        """Replace what a rank has by the average; what was sent leaves the memory."""
        ctx = self._ctx._replace(step=step, density=self._density(step))
        proposed = yield from exchange_group(given, self.group, ctx, exchange=self._exchange, **self._by)
        self.group = settle_group(self.group, proposed, bool(proposed.skipped), self._by["memory"])
        return proposed


class Averaged(Optimized):
    """The optimizer steps the mean gradient, as behind DDP."""

    def step(self, rate: Rate, step: int) -> Steps[None]:
        grad = self.flat.matrices.grad
        grad[self.served] = yield from self.mean(grad[self.served], self.matrices)
        yield from self.average_others(rate, step)
        self.step_optimizers(rate)


class Today(Optimized):
    """The optimizer steps sparse averages behind plain error feedback, as `sparse_ddp` has it for all it does not know.

    With Muon, what AdamW steps is dense, as the documentation advises.
    """

    def __init__(self, flat: Flat, at: Place, optimizer: str = "muon", density: float = 0.01, warm_up: int = 0) -> None:
        super().__init__(flat, at, optimizer, density=density, warm_up=warm_up)
        self.parts.append(Part(self.served, flat, at, ls.memories.Residual(), self.density))

    def step(self, rate: Rate, step: int) -> Steps[None]:
        grad = self.flat.matrices.grad
        given = grad[self.served]
        yield from self.matrices.watch(self.parts[-1].exchange(given, step))
        grad[self.served] = given
        yield from self.average_others(rate, step)
        self.step_optimizers(rate)


def _made(
    optimizer: str,
    served: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    vectors: Sequence[nn.Parameter],
    at: Place,
) -> list[torch.optim.Optimizer]:
    """The user's optimizers over parameters of a model."""

    def group(parameters: Sequence[nn.Parameter], decay: float, is_served: bool = False) -> list[dict[str, Any]]:
        one = {"params": list(parameters), "weight_decay": decay, "decay": decay, "served": is_served}
        return [one] if parameters else []

    of_matrices, of_vectors = at.decay
    if optimizer == "muon":
        muon = torch.optim.Muon(group(served, of_matrices, True), lr=1.0, adjust_lr_fn="match_rms_adamw")
        left = group(others, of_matrices) + group(vectors, of_vectors)
        return [muon, *([torch.optim.AdamW(left, lr=1.0, betas=at.betas)] if left else [])]
    times = DECAYS.get(optimizer, 1.0)
    groups = group(served, times * of_matrices, True) + group(vectors, times * of_vectors)
    makes: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "lion": lambda: Lion(groups),
        "sgd": lambda: torch.optim.SGD(groups, lr=1.0, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(groups, lr=1.0, betas=at.betas),
        "adamw8": lambda: import_module("bitsandbytes").optim.AdamW8bit(groups, lr=1.0, betas=at.betas),
        "nadam": lambda: torch.optim.NAdam(groups, lr=1.0, betas=at.betas, decoupled_weight_decay=True),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=1.0, alpha=at.betas[1]),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=1.0),
        "soap": lambda: import_module("pytorch_optimizer").SOAP(
            groups, lr=1.0, betas=at.betas, max_precondition_dim=LARGEST
        ),
    }
    if optimizer not in makes:
        raise ValueError(f"Expected muon, {', '.join(makes)}, but got {optimizer}.")
    return [makes[optimizer]()]
