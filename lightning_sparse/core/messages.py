"""What a step asks of the other ranks: messages, and coroutines that yield them.

An exchange, and a sparsifier that needs the other ranks while it selects, never sees the network. It is a generator
that *yields* a message and gets back what all ranks have shared; a driver in :mod:`lightning_sparse.engine.network`
sends it. So one and the same code runs between processes, with the messages of several groups joined, for n ranks in
one process, and without any network to count bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class Message(ABC):
    """What this rank gives. All ranks ask for the same kinds in the same order, with equal shapes and dtypes.

    The asking coroutine must not read ``x`` afterwards, and owns what it gets: nobody else writes to it. An answer may
    be a part of a longer one, in which others' answers lie: each row of an all-gather or an all-to-all is contiguous,
    and the rows may lie apart (``answer.stride(0)``).
    """

    x: Tensor

    kind: ClassVar[str]
    """Name of the operation, see :class:`~lightning_sparse.engine.network.TorchCollective`."""

    @abstractmethod
    def bytes_sent(self, n: int) -> float:
        """Bytes that this rank sends with n ranks under ring algorithms, as the papers assume.

        What a library really sends can differ (trees, shared memory).
        """


class AllGather(Message):
    """``(*shape)`` of each rank to ``(n, *shape)`` on all; each rank sends ``(n - 1) b`` bytes for b bytes of x."""

    __slots__ = ()
    kind = "all_gather"

    def bytes_sent(self, n: int) -> float:
        """What each rank brings passes through the n - 1 others."""
        return float((n - 1) * self.x.nbytes)


class AllReduce(Message):
    """Sum over ranks, for which x may be overwritten; each rank sends ``2 (n - 1) / n b`` bytes."""

    __slots__ = ()
    kind = "all_reduce"

    def bytes_sent(self, n: int) -> float:
        """See :func:`ring_all_reduce_bytes`."""
        return ring_all_reduce_bytes(self.x.nbytes, n)


@dataclass(frozen=True, eq=False, slots=True)
class Broadcast(Message):
    """What rank ``src`` gave, on all ranks, for which x may be overwritten; ``(n - 1) / n b`` bytes on average."""

    src: int
    kind = "broadcast"

    def bytes_sent(self, n: int) -> float:
        """The mean over ranks: all but the last one in the ring pass it on."""
        return (n - 1) / n * self.x.nbytes


class AllToAll(Message):
    """``(n, *shape)``: row j of rank i becomes row i of rank j; each rank sends ``(n - 1) / n b`` bytes."""

    __slots__ = ()
    kind = "all_to_all"

    def bytes_sent(self, n: int) -> float:
        """All rows but the own one."""
        return (n - 1) / n * self.x.nbytes


@dataclass(frozen=True, eq=False, slots=True)
class SendRecv(Message):
    """Give x to rank ``to`` and get what rank ``source`` gives to this one; each another rank, or None.

    All ranks ask for it, also those that neither give nor take; who gives and who takes must fit together. Without a
    source, the answer is an empty tensor. A rank that gives sends b bytes.
    """

    to: int | None
    source: int | None
    kind = "send_recv"

    def bytes_sent(self, n: int) -> float:
        """All of x, where there is somebody who takes it."""
        return 0.0 if self.to is None else float(self.x.nbytes)


Steps = Generator[Message, Tensor, T]
"""A coroutine that yields messages, gets the answers, and returns a T."""


def resolve(result: T | Steps[T]) -> Steps[T]:
    """What a part returned, or what the coroutine that it returned ends with."""
    return (yield from result) if isinstance(result, Generator) else result


def started(steps: Steps[T]) -> Steps[T]:
    """Run a coroutine up to its first message, now, and give what goes on from there.

    Example:
        >>> import torch
        >>> def double(x: Tensor) -> Steps[Tensor]:
        ...     print("local work")
        ...     return 2 * (yield AllReduce(x))
        >>> steps = started(double(torch.tensor(1.0)))
        local work
        >>> next(steps)
        AllReduce(x=tensor(1.))
    """
    try:
        first = next(steps)
    except StopIteration as end:
        return resolve(end.value)
    return _from(first, steps)


def _from(message: Message, steps: Steps[T]) -> Steps[T]:
    try:
        while True:
            message = steps.send((yield message))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Meter:
    """Counts the bytes of the messages that pass by.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.bytes_sent = 0.0
        """Bytes sent by this rank, see :meth:`Message.bytes_sent`."""

    def watch(self, steps: Steps[T]) -> Steps[T]:
        """The same coroutine, with its bytes counted."""
        try:
            message = next(steps)
            while True:
                self.bytes_sent += message.bytes_sent(self.world_size)
                message = steps.send((yield message))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def ring_all_reduce_bytes(payload_bytes: float, world_size: int) -> float:
    """Bytes that each rank sends in a ring all-reduce: ``2 (n - 1) / n`` times the payload.

    Example:
        >>> ring_all_reduce_bytes(1000, 4)
        1500.0
    """
    return 2 * (world_size - 1) / world_size * payload_bytes
