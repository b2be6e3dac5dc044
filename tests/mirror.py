"""A network of n ranks that all bring what this one brings: right shapes and devices, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.futures import Future

from lightning_sparse.core.messages import Message
from lightning_sparse.core.step import Context, GroupState
from lightning_sparse.engine.drivers import drive
from lightning_sparse.engine.metrics import Statistics
from lightning_sparse.engine.network import TorchCollective, send
from lightning_sparse.engine.pipeline import exchange_group, settle_group


class Mirror:
    """A collective without a network.

    Args:
        rank: this rank.
        world_size: n.
        device: where tensors must be; None: anywhere.
    """

    one_hop = False

    def __init__(self, rank: int, world_size: int = 4, device: torch.device | None = None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device

    def _look_at(self, x: Tensor) -> Tensor:
        assert self.device in (None, x.device), f"a message of {x.device}, and not of {self.device}"
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._look_at(x).unsqueeze(0).expand(self.world_size, *x.shape).clone()

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._look_at(x).mul_(self.world_size)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return self._look_at(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        assert x.shape[0] == self.world_size
        return self._look_at(x)

    def send_recv(self, x: Tensor, to: int | None, source: int | None) -> Tensor:
        return x[:0] if source is None else self._look_at(x).clone()


def step_that_counts(
    grad: Tensor, state: GroupState, ctx: Context, parts: dict[str, Any], mirror: Mirror
) -> tuple[GroupState, Statistics]:
    """A step of a group after which the host knows that it counts and how many coordinates it has sent, unasked."""
    proposed = drive(exchange_group(grad, state, ctx, **parts), mirror)
    state = settle_group(state, proposed, False, parts["memory"])
    return state._replace(told=int(ctx.density * grad.numel())), proposed.statistics


class MirroredRanks(TorchCollective):
    """The network of an engine that is one of n ranks which all bring what this one brings.

    Args:
        world_size: n.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = 0, world_size
        mirror = Mirror(0, world_size)
        self.all_gather, self.all_reduce = mirror.all_gather, mirror.all_reduce  # type: ignore[method-assign]
        self.broadcast, self.all_to_all = mirror.broadcast, mirror.all_to_all  # type: ignore[method-assign]
        self.send_recv = mirror.send_recv  # type: ignore[method-assign]

    def start(self, message: Message) -> Callable[[], Tensor]:
        answer = send(message, self)
        return lambda: answer

    def start_average(self, x: Tensor, wait: bool = False) -> Future[Tensor]:
        future: Future[Tensor] = Future(devices=[x.device] if x.is_cuda else None)
        future.set_result(x)
        return future

    def all_gather_object(self, what: Any, device: torch.device) -> list[Any]:
        return [what] * self.world_size

    def between_hosts(self) -> MirroredRanks:
        return self

    def announce(self, words: Tensor, look: Callable[[Tensor], None]) -> None:
        look(words.expand(self.world_size, -1))

    def listen(self, name: str) -> None:
        """There is nobody to tell."""


@contextmanager
def mirrored_ranks(world_size: int) -> Iterator[None]:
    """Engines that are attached meanwhile, to models of one rank, take it for one of n that bring the same."""
    with patch.object(TorchCollective, "over", lambda *_: MirroredRanks(world_size)):
        yield
