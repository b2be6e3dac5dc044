"""This library's exchange: error feedback that knows AdamW, and what other memories and sparsifiers make of it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

import lightning_sparse as ls
from benchmarks.race.flat import Flat, pieces
from benchmarks.race.methods.base import Method, Place, step_with
from benchmarks.race.methods.blocks import Turned
from lightning_sparse.core.candidates import Candidates
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Context, GroupState
from lightning_sparse.engine.pipeline import exchange_group, init_group, settle_group
from lightning_sparse.engine.proposal import spread_divisor
from lightning_sparse.methods.exchanges import as_exchange


class Exchanged(Method):
    """Averages of matrices by the library's exchange, as one group; vectors are dense, as in the strategies.

    Args:
        flat: of the model.
        at: this rank.
        sparsifier: the library's.
        memory: likewise.
        density: of the exchange.
        whole: vectors join the group, as with ``Rules(dense_ndim=0, dense_numel=0)``.
    """

    kept: ClassVar[tuple[str, ...]] = ("groups",)

    def __init__(
        self, flat: Flat, at: Place, sparsifier: Any, memory: Any, density: float, whole: bool = False
    ) -> None:
        super().__init__(flat, at)
        self.parts = {"sparsifier": sparsifier, "memory": memory}
        self.exchange = as_exchange(None, sparsifier, memory)
        self.ctx = Context(0, density, at.rank, at.ranks)
        numel = flat.matrices.numel() + (flat.vectors.numel() if whole else 0)
        self._state = init_group(numel, torch.float32, torch.device("cpu"), self.ctx, **self.parts)

    @property
    def groups(self) -> GroupState:
        """What the group remembers, without hints that cost nothing to lose."""
        return self._state._replace(candidates=None)

    @groups.setter
    def groups(self, state: GroupState) -> None:
        self._state = state._replace(candidates=Candidates())

    def averaged(self, grad: Tensor, step: int) -> Steps[Tensor | None]:
        """Replace a gradient by the average; return what it is to be divided by, where the memory knows."""
        ctx = self.ctx._replace(step=step)
        proposed = yield from self.matrices.watch(
            exchange_group(grad, self._state, ctx, exchange=self.exchange, **self.parts)
        )
        self._state = settle_group(self._state, proposed, proposed.void, self.parts["memory"])
        if proposed.divisor is None:
            return None
        return spread_divisor(proposed.update.indices, proposed.divisor, len(grad))


class TopK(Exchanged):
    """The largest of each rank with plain error feedback; AdamW on the averages."""

    def __init__(self, flat: Flat, at: Place, density: float = 0.01) -> None:
        super().__init__(flat, at, ls.TopK(), ls.Residual(), density)
        self.optimizer = self.adamw(*flat.both)

    def step(self, rate: float, step: int) -> Steps[None]:
        yield from self.averaged(self.flat.matrices.grad, step)
        yield from self.average_vectors()
        step_with(self.optimizer, rate)


class Ours(Exchanged):
    """What `sparse_ddp` does with AdamW: :class:`lightning_sparse.SecondMoment` and UnionTopK.

    Args:
        flat: of the model.
        at: this rank.
        density: of the exchange.
        turned: select in a basis that mixes the coordinates of each block, see
            :class:`~benchmarks.race.methods.blocks.Turned`. Second moments are those of that basis.
        late: apply each average one step late; the last one is applied at the end, too.
        whole: vectors are sparse, too.
    """

    kept: ClassVar[tuple[str, ...]] = ("groups", "handout")

    def __init__(
        self,
        flat: Flat,
        at: Place,
        density: float = 0.01,
        turned: bool = False,
        late: bool = False,
        whole: bool = False,
    ) -> None:
        super().__init__(flat, at, ls.UnionTopK(), ls.SecondMoment(at.betas[1]), density, whole)
        self.optimizer = None if whole else self.adamw(flat.vectors)
        self.bases = [Turned(shape, seed) for seed, shape in enumerate(flat.shapes)] if turned else []
        self.late = late
        self.handout: tuple[Tensor, Tensor] | None = None

    def step(self, rate: float, step: int) -> Steps[None]:
        grad = self._turned(self.flat.matrices.grad)
        if self.optimizer is None:
            grad = torch.cat([grad, self.flat.vectors.grad])
        divisor = yield from self.averaged(grad, step)
        matrices, vectors = (grad / divisor).split([self.flat.matrices.numel(), len(grad) - self.flat.matrices.numel()])
        if self.optimizer is not None:
            yield from self.average_vectors()
            vectors = self.flat.vectors.grad.clone()
        fresh = self._turned_back(matrices), vectors
        if not self.late:
            self._apply(fresh, rate)
            return
        if self.handout is not None:
            self._apply(self.handout, rate)
        self.handout = fresh
        if step + 1 == self.at.steps:
            self._apply(fresh, rate)

    def _turned(self, grad: Tensor) -> Tensor:
        if not self.bases:
            return grad
        return torch.cat([b.turn(g) for b, g in zip(self.bases, pieces(grad, self.flat.shapes), strict=True)])

    def _turned_back(self, move: Tensor) -> Tensor:
        if not self.bases:
            return move
        return torch.cat([b.back(m) for b, m in zip(self.bases, pieces(move, self.flat.shapes), strict=True)])

    def _apply(self, handout: tuple[Tensor, Tensor], rate: float) -> None:
        factor = rate * math.sqrt(self.at.ranks)
        kinds = list(zip(self.flat.both, handout, self.at.decay, strict=True))
        for parameter, move, decay in kinds if self.optimizer is None else kinds[:1]:
            parameter.data.mul_(1 - rate * decay).sub_(move, alpha=factor)
        if self.optimizer is not None:
            self.flat.vectors.grad.copy_(handout[1])
            step_with(self.optimizer, rate)
