"""n ranks of one group side by side, over a network that is stricter than a real one.

It keeps everything that a step left behind, and hands out what the library treats as private to a rank: residuals,
selections, what was sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_sparse.core.messages import AllReduce, Broadcast, Steps, resolve
from lightning_sparse.core.step import Context, GroupState, Selection, Update
from lightning_sparse.engine import pipeline
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.engine.metrics import Statistics
from lightning_sparse.engine.pipeline import Proposed, exchange_group, init_group, settle_group
from lightning_sparse.methods.exchanges import Exchange, as_exchange
from lightning_sparse.methods.memory import Memory, Residual
from lightning_sparse.methods.sparsifiers import Sparsifier

T = TypeVar("T")


def strict(steps: Steps[T]) -> Steps[T]:
    """A coroutine whose messages and answers share memory with nothing, and that reads nothing twice."""
    try:
        message = next(steps)
        while True:
            answer = yield replace(message, x=message.x.detach().clone())
            if isinstance(message, AllReduce | Broadcast):
                # A collective may use x for its result: whoever reads x afterwards shall notice.
                x = message.x
                x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).min)
            message = steps.send(answer.clone())
    except StopIteration as end:
        return end.value


class Outcome(NamedTuple):
    """What one step did; lists and rows are by rank."""

    step: int
    """The step's number."""
    gradients: Tensor
    """(n, numel) what went in."""
    before: list[Tensor | None]
    """(numel,) residuals before the step."""
    accs: list[Tensor]
    """(numel,) accumulators that were exchanged."""
    selections: list[Selection]
    updates: list[Update]
    averages: Tensor
    """(n, numel) what came out on each rank."""
    after: list[Tensor | None]
    """(numel,) residuals after the step."""
    states: list[GroupState]
    statistics: list[Statistics]
    divisors: list[Tensor | None]
    """(u,) numbers that averages are divided by."""


class Ranks:
    """n ranks that reduce one group, step by step."""

    def __init__(
        self,
        n: int,
        numel: int,
        *,
        sparsifier: Sparsifier,
        density: float,
        exchange: str | None = None,
        memory: Memory | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.n, self.density, self.steps = n, density, 0
        self._seen: dict[int, tuple[Tensor, Selection, Update]] = {}
        self.memory = Residual() if memory is None else memory
        self.sparsifier, self.exchange = sparsifier, as_exchange(exchange, sparsifier, self.memory)
        self.states = [
            init_group(
                numel,
                dtype,
                torch.device("cpu"),
                Context(step=0, density=density, rank=rank, world_size=n),
                memory=self.memory,
                sparsifier=sparsifier,
            )
            for rank in range(n)
        ]

    def residuals(self) -> list[Tensor | None]:
        views = [self.memory.residual(state.memory) for state in self.states]
        return [None if view is None else view.clone() for view in views]

    def step(self, gradients: Tensor, number: int | None = None) -> Outcome:
        """One step; ``number`` is the step's number where it is not the next one."""
        self.steps = self.steps if number is None else number
        before = self.residuals()
        with patch.object(pipeline, "DENSE", self._watched(pipeline.DENSE)):
            done = drive_ranks([strict(self._steps(rank, row)) for rank, row in enumerate(gradients)])
        number, self.steps = self.steps, self.steps + 1
        grads, states, proposed, seen = zip(*done, strict=True)
        self.states = list(states)
        accs, selections, updates = zip(*seen, strict=True)
        return Outcome(
            step=number,
            gradients=gradients,
            before=before,
            accs=list(accs),
            selections=list(selections),
            updates=list(updates),
            averages=torch.stack(grads),
            after=self.residuals(),
            states=self.states,
            statistics=[made.statistics for made in proposed],
            divisors=[made.divisor for made in proposed],
        )

    def _steps(self, rank: int, row: Tensor) -> Steps[tuple[Tensor, GroupState, Proposed, Any]]:
        grad = row.clone()
        ctx = Context(step=self.steps, density=self.density, rank=rank, world_size=self.n)
        exchange = self._watched(self.exchange)
        parts: dict[str, Any] = {"memory": self.memory, "sparsifier": self.sparsifier, "exchange": exchange}
        proposed = yield from exchange_group(grad, self.states[rank], ctx, **parts)
        state = settle_group(self.states[rank], proposed, bool(proposed.skipped), self.memory)
        return grad, state, proposed, self._seen.pop(rank)

    def _watched(self, exchange: Exchange) -> Any:
        """The same exchange; what it is given and gives is noted by rank."""

        def watched(acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
            before = acc[:-1].clone()
            update = yield from resolve(exchange(acc, selection, ctx))
            self._seen[ctx.rank] = before, selection, update
            return update

        watched.tells_trouble = exchange.tells_trouble  # type: ignore[attr-defined]
        return watched


def equal_states(a: Any, b: Any) -> bool:
    """Equal bit for bit: tensors, numbers, None and tuples of these; NaN is not equal to anything.

    A number may be a () float64 tensor on one side: only a device knew it there.
    """
    if isinstance(a, float) != isinstance(b, float):
        known, other = (a, b) if isinstance(a, float) else (b, a)
        return isinstance(other, Tensor) and other.dtype == torch.float64 and not other.dim() and float(other) == known
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal_states, a, b))
    return type(a) is type(b) and a == b


def noise(n: int, numel: int, *, seed: int = 0, grain: int = 256, dtype: torch.dtype = torch.float64) -> Tensor:
    """(n, numel) normal values rounded to multiples of ``1/grain``, so that sums of a few of them are exact.

    With a grain of 256 and magnitudes below 2**7 a sum needs 15 bits: exact in float32 as well as in float64.
    """
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, numel, generator=generator, dtype=torch.float64) * grain).round().div(grain).to(dtype)


def sent(update: Update, numel: int) -> Tensor:
    """Coordinates that a rank took out of its residual, without padding."""
    if update.sent is None:
        return torch.arange(numel)
    return update.sent[update.sent < numel]


def gave(update: Update, acc: Tensor) -> Tensor:
    """(numel,) what left a rank's accumulator."""
    places, given = sent(update, acc.numel()), torch.zeros_like(acc)
    if update.sent_values is None:
        given[places] = acc[places]
    else:
        assert update.sent is not None
        values = update.sent_values[update.sent < acc.numel()]
        given[places] = values
        assert torch.equal(given[places], values)  # a coordinate that repeats gives the same each time
    return given
