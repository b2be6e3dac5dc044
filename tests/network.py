"""n ranks as threads of the test, one of which runs at a time: for what calls a collective itself."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


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

    def _meet(self, operation: str, x: Tensor) -> list[Tensor]:
        self.calls += 1
        return self.network.meet(self.rank, self.calls - 1, operation, x)
