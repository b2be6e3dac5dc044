"""n ranks of one group as threads of the test, over a network that is stricter than a real one.

It shares nothing with the library's own simulation, keeps everything that a step left behind, and hands out what the
library treats as private to a rank: residuals, selections, what was sent.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.exchanges import as_exchange
from lightning_sparse.memory import Memory, Residual
from lightning_sparse.pipeline import init_group, reduce_group
from lightning_sparse.sparsifiers import Sparsifier
from lightning_sparse.statistics import Statistics
from lightning_sparse.types import Context, GroupState, Selection, Update


class AbandonedError(Exception):
    """Another rank failed or took part in fewer collectives, so this one would wait for ever."""


class Network:
    """Where the ranks meet: the i-th calls of all ranks are one collective.

    One rank runs at a time, in turn, until its next collective. That is deterministic, and a rank whose turn comes
    while others are missing knows that they will never come.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.rounds: list[list[tuple[str, Tensor] | None]] = []
        self.turns = [threading.Lock() for _ in range(n)]
        """Open for the rank whose turn it is."""
        for turn in self.turns[1:]:
            turn.acquire()
        self.running = set(range(n))

    def begin(self, rank: int) -> None:
        self.turns[rank].acquire()

    def end(self, rank: int) -> None:
        self.running.remove(rank)
        self._pass_on(rank)

    def meet(self, rank: int, call: int, operation: str, x: Tensor) -> list[Tensor]:
        if len(self.rounds) == call:
            self.rounds.append([None] * self.n)
        brought = self.rounds[call]
        brought[rank] = (operation, x.detach().clone())
        self._pass_on(rank)
        self.turns[rank].acquire()
        if None in brought:
            raise AbandonedError(f"rank {rank} in {operation}")
        # What a real network would answer with a hang or with garbage.
        kinds = {(name, tuple(row.shape), row.dtype) for name, row in brought}
        assert len(kinds) == 1, f"ranks disagree about a collective: {kinds}"
        return [row for _, row in brought]

    def _pass_on(self, rank: int) -> None:
        """To the next rank that still runs, which may be this one."""
        following = [(rank + distance) % self.n for distance in range(1, self.n + 1)]
        waiting = [other for other in following if other in self.running]
        if waiting:
            self.turns[waiting[0]].release()


class Port:
    """The network as one rank sees it."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.world_size, self.calls = network, rank, network.n, 0

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._meet("all_gather", x))

    def all_reduce(self, x: Tensor) -> Tensor:
        rows = self._meet("all_reduce", x)
        # A collective may use x for its result: whoever reads x afterwards shall notice.
        x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).min)
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return self._meet("broadcast", x)[src].clone()

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([row[self.rank] for row in self._meet("all_to_all", x)])

    def send_on(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        # Who gives to nobody or takes from nobody says -1.
        partners = torch.tensor([-1 if partner is None else partner for partner in (to, source)])
        partners = torch.stack(self._meet("partners", partners))
        for rank, (taker, giver) in enumerate(partners.tolist()):
            assert rank not in (taker, giver), f"rank {rank} sends on to itself"
            assert taker == -1 or partners[taker, 1] == rank, f"rank {rank} gives to {taker}, which does not take it"
            assert giver == -1 or partners[giver, 0] == rank, f"rank {rank} waits for {giver}, which gives it nothing"
        rows = self._meet("send_on", x)
        return None if source is None else rows[source].clone()

    def _meet(self, operation: str, x: Tensor) -> list[Tensor]:
        self.calls += 1
        return self.network.meet(self.rank, self.calls - 1, operation, x)


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


THREADS = ThreadPoolExecutor(64)
"""At least as many as a step has ranks: a rank without a thread would be waited for."""


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
        self.sparsifier, self.exchange = sparsifier, as_exchange(exchange, sparsifier)
        self.memory = Residual() if memory is None else memory
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
        network = Network(self.n)
        jobs = [THREADS.submit(self._work, Port(network, rank), gradients[rank]) for rank in range(self.n)]
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, AbandonedError))
        number, self.steps = self.steps, self.steps + 1
        grads, states, statistics, seen = zip(*(job.result() for job in jobs), strict=True)
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
            statistics=list(statistics),
        )

    def _work(self, port: Port, row: Tensor) -> tuple[Tensor, GroupState, Statistics, Any]:
        grad = torch.cat([row, row.new_full((1,), 7.0)])  # the spare slot holds anything
        ctx = Context(step=self.steps, density=self.density, rank=port.rank, world_size=self.n)
        seen = []

        def exchange(acc: Tensor, selection: Selection, ctx: Context, comm: Any) -> Update:
            before = acc[:-1].clone()
            update = self.exchange(acc, selection, ctx, comm)
            seen.append((before, selection, update))
            return update

        port.network.begin(port.rank)
        try:
            state, statistics = reduce_group(
                grad,
                self.states[port.rank],
                ctx,
                memory=self.memory,
                sparsifier=self.sparsifier,
                exchange=exchange,
                comm=port,
            )
        finally:
            port.network.end(port.rank)
        return grad[:-1], state, statistics, seen[0]


def equal_states(a: Any, b: Any) -> bool:
    """Equal bit for bit: tensors, numbers, None and tuples of these; NaN is not equal to anything."""
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
