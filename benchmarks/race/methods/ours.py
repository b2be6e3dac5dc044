"""This library's exchange: error feedback that knows AdamW, and what other memories and sparsifiers make of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import lightning_sparse as ls
from benchmarks.race.flat import Flat, pieces
from benchmarks.race.methods.base import Method, Place, Rate, move_, step_with
from benchmarks.race.methods.blocks import Turned
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Agreement, Candidates, Context, GroupState, Selection
from lightning_sparse.engine.average import spread_divisor
from lightning_sparse.engine.diversity import Diversity, squares_of
from lightning_sparse.engine.pipeline import exchange_group, init_group, settle_group
from lightning_sparse.methods.density import count
from lightning_sparse.methods.exchanges import as_exchange
from lightning_sparse.methods.sparsifiers.base import Selected, Sparsifier
from lightning_sparse.ops import pad


class Exchanged(Method):
    """Averages of matrices by the library's exchange; vectors are dense, as in the strategies.

    Args:
        flat: of the model.
        at: this rank.
        sparsifier: the library's.
        memory: likewise.
        density: of the exchange.
        whole: vectors join the group, as with ``Rules(dense_ndim=0, dense_numel=0)``.
        parts: number of groups. Each has the density's share of its own coordinates: of the rows of every matrix, as a
            rank has them which holds a part of a sharded model.
    """

    kept: ClassVar[tuple[str, ...]] = ("groups",)
    renewed: ClassVar[tuple[str, ...]] = ("_states",)
    waits = True

    def __init__(
        self,
        flat: Flat,
        at: Place,
        sparsifier: Any,
        memory: Any,
        density: float,
        whole: bool = False,
        parts: int = 1,
    ) -> None:
        super().__init__(flat, at)
        self.parts = {"sparsifier": sparsifier, "memory": memory}
        self.exchange = as_exchange(None, sparsifier, memory)
        self.ctx = Context(0, density, at.rank, at.ranks)
        numel = flat.matrices.numel() + (flat.vectors.numel() if whole else 0)
        self._places: list[Any] = [slice(None)] if parts == 1 else row_parts(flat.shapes, parts)
        sizes = [numel if parts == 1 else len(place) for place in self._places]
        self._states = [init_group(n, torch.float32, flat.matrices.device, self.ctx, **self.parts) for n in sizes]

    @property
    def groups(self) -> list[GroupState]:
        """States of the groups, without hints that cost nothing to lose."""
        return [state._replace(candidates=None) for state in self._states]

    @groups.setter
    def groups(self, states: list[GroupState]) -> None:
        self._states = [state._replace(candidates=Candidates()) for state in states]

    def averaged(self, grad: Tensor, step: int) -> Steps[Tensor | None]:
        """Replace a gradient by the average; return what it is to be divided by, where the memory knows."""
        ctx, divisor = self.ctx._replace(step=step), torch.ones_like(grad)
        known = True
        for number, place in enumerate(self._places):
            own, state = grad[place], self._states[number]
            proposed = yield from self.matrices.watch(
                exchange_group(own, state, ctx, exchange=self.exchange, **self.parts)
            )
            self._states[number] = settle_group(state, proposed, bool(proposed.skipped), self.parts["memory"])
            grad[place] = own
            known = proposed.divisor is not None
            if proposed.divisor is not None:
                divisor[place] = spread_divisor(proposed.update.indices, proposed.divisor, len(own))
        return divisor if known else None


def row_parts(shapes: Sequence[tuple[int, ...]], parts: int) -> list[Tensor]:
    """Cut the rows of every matrix into parts; return the coordinates of each part in the vector of all."""
    numels = [math.prod(shape) for shape in shapes]
    every = torch.arange(sum(numels)).split(numels)
    cut = [one.view(shape).tensor_split(parts) for one, shape in zip(every, shapes, strict=True)]
    return [torch.cat([rows[i].flatten() for rows in cut]) for i in range(parts)]


class TopK(Exchanged):
    """The largest of each rank with plain error feedback; AdamW on the averages."""

    def __init__(self, flat: Flat, at: Place, density: float = 0.01) -> None:
        super().__init__(flat, at, ls.sparsifiers.TopK(), ls.memories.Residual(), density)
        self.optimizer = self.adamw(*flat.both)

    def step(self, rate: Rate, step: int) -> Steps[None]:
        yield from self.averaged(self.flat.matrices.grad, step)
        yield from self.average_vectors()
        step_with(self.optimizer, rate)


@dataclass(frozen=True)
class Chunked(Sparsifier):
    """The largest of each chunk of 4096 coordinates, as many of each (ChunkTopK); the union has about k coordinates.

    Each rank picks a multiple of k/n, the state, which is raised as long as ranks agree so much that the union falls
    short of k. Chunks take turns with what is left over.
    """

    agreement: ClassVar[Agreement] = Agreement.SHARED
    exchange: ClassVar[str] = "packed_union"
    chunk: ClassVar[int] = 4096

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> float:
        return 1.0

    def select(self, acc: Tensor, state: float, ctx: Context) -> Selected:
        numel, k = acc.numel(), count(ctx.density, acc.numel())
        if ctx.union is not None and int(ctx.union) > 0:
            state = min(float(ctx.world_size), max(1.0, state * (k / int(ctx.union)) ** 0.5))
        chunks = -(-numel // self.chunk)
        picks = min(numel, round(state * k / ctx.world_size))
        each, more = divmod(picks, chunks)
        rows = torch.nn.functional.pad(acc, (0, chunks * self.chunk - numel)).view(chunks, self.chunk)
        places = rows.abs().topk(min(each + 1, self.chunk), dim=1).indices
        begin = torch.arange(chunks, device=acc.device)
        extra = (begin + ctx.step * more + ctx.rank) % chunks < more
        kept = torch.ones_like(places, dtype=torch.bool)
        kept[:, each:] = extra[:, None]
        found = (places + self.chunk * begin[:, None])[kept]
        found = found[found < numel].sort().values
        indices = pad(found, picks, numel)
        return Selection(indices, torch.tensor(found.numel(), device=acc.device), aligned=True, limit=k), state


class Ours(Exchanged):
    """What `sparse_ddp` does with AdamW: :class:`lightning_sparse.memories.SecondMoment` and UnionTopK.

    Args:
        flat: of the model.
        at: this rank.
        density: of the exchange.
        turned: select in a basis that mixes the coordinates of each block, see
            :class:`~benchmarks.race.methods.blocks.Turned`. Second moments are those of that basis.
        late: apply each average one step late; the last one is applied at the end, too.
        whole: vectors are sparse, too.
        chunked: pick as many of each chunk, see :class:`Chunked`.
        voted: MeanTopK in place of UnionTopK.
        keeps: factor of the residual in each step; below 1 it forgets.
        ahead: extrapolate: move matrices by this part of each move in advance, and take it back in the next step, as in
            optimistic gradient descent (arXiv 1711.00141); for averages that come late.
        parts: see :class:`Exchanged`.
    """

    kept: ClassVar[tuple[str, ...]] = ("groups", "handout", "last", "compared")
    renewed: ClassVar[tuple[str, ...]] = ("_states", "handout", "last")
    version: ClassVar[int] = 2
    compares: ClassVar[bool] = True
    """Whether steps are longer by what gradients have in common; else by `sqrt(n)`."""

    def __init__(
        self,
        flat: Flat,
        at: Place,
        density: float = 0.01,
        turned: bool = False,
        late: bool = False,
        whole: bool = False,
        ahead: float = 0.0,
        parts: int = 1,
        chunked: bool = False,
        keeps: float = 1.0,
        voted: bool = False,
    ) -> None:
        union = Chunked() if chunked else ls.sparsifiers.UnionTopK()
        sparsifier = ls.sparsifiers.MeanTopK() if voted else union
        super().__init__(flat, at, sparsifier, ls.memories.SecondMoment(at.betas[1]), density, whole, parts)
        self.keeps = keeps
        self.optimizer = None if whole else self.adamw(flat.vectors)
        self.bases = [Turned(shape, seed) for seed, shape in enumerate(flat.shapes)] if turned else []
        self.late, self.ahead = late, ahead
        self.diversity = Diversity()
        self.last: Tensor | None = None
        """The latest move of matrices, with extrapolation."""
        self.handout: tuple[Tensor, Tensor] | None = None

    @property
    def compared(self) -> dict[str, float]:
        """What is known of gradients."""
        return self.diversity.counters()

    @compared.setter
    def compared(self, known: dict[str, float]) -> None:
        self.diversity = Diversity.of([known])

    def step(self, rate: Rate, step: int) -> Steps[None]:
        grad = self._turned(self.flat.matrices.grad)
        if self.optimizer is None:
            grad = torch.cat([grad, self.flat.vectors.grad])
        if self.compares:
            yield from self._compare(grad, step)
        for state in self._states if self.keeps < 1 else ():
            state.memory.residual.mul_(self.keeps)
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
            self._apply(fresh, rate, last=True)

    def _compare(self, grad: Tensor, step: int) -> Steps[None]:
        """Follow what gradients have in common, as the engine does."""
        squares = ()
        if self.diversity.asks(self.at.ranks):
            squares = (yield from self.matrices.watch(squares_of([grad], step, self.at.ranks))).tolist()
        self.diversity.count(*squares)

    def _turned(self, grad: Tensor) -> Tensor:
        if not self.bases:
            return grad
        return torch.cat([b.turn(g) for b, g in zip(self.bases, pieces(grad, self.flat.shapes), strict=True)])

    def _turned_back(self, move: Tensor) -> Tensor:
        if not self.bases:
            return move
        return torch.cat([b.back(m) for b, m in zip(self.bases, pieces(move, self.flat.shapes), strict=True)])

    def _apply(self, handout: tuple[Tensor, Tensor], rate: Rate, last: bool = False) -> None:
        if self.ahead:
            before, move = 0.0 if self.last is None else self.last, handout[0]
            handout = move + self.ahead * ((0.0 if last else move) - before), handout[1]
            self.last = move
        factor = rate * self.diversity.factor(self.at.ranks)
        kinds = list(zip(self.flat.both, handout, self.at.decay, strict=True))
        for parameter, move, decay in kinds if self.optimizer is None else kinds[:1]:
            move_(parameter.data.mul_(1 - rate * decay), move, factor)
        if self.optimizer is not None:
            self.flat.vectors.grad.copy_(handout[1])
            step_with(self.optimizer, rate)


class ByRoot(Ours):
    """The same with steps that are longer by `sqrt(n)`, as the library took them before it compared gradients."""

    version: ClassVar[int] = 1
    compares: ClassVar[bool] = False
