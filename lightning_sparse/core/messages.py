"""Messages between ranks, and coroutines that yield them.

An exchange, and a sparsifier that needs the other ranks while it selects, never sees the network. It is a generator
that *yields* a message and gets the answer back; a driver in :mod:`lightning_sparse.engine.network` sends it. The same
code thus runs between processes, with joined messages of several groups, for n ranks in one process, and without any
network to count bytes.
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
    """One collective operation. All ranks yield the same kinds in the same order, with equal shapes and dtypes.

    The coroutine must not read ``x`` afterwards. It owns the answer: no other code writes to it. An answer may be a
    view of a longer tensor that holds other answers, too: each row of an all-gather or an all-to-all is contiguous,
    and the rows may lie apart (``answer.stride(0)``).
    """

    x: Tensor

    kind: ClassVar[str]
    """Name of the operation, see :class:`~lightning_sparse.engine.network.TorchCollective`."""

    @abstractmethod
    def bytes_sent(self, n: int) -> float:
        """Return the bytes that this rank sends with n ranks under ring algorithms, as the papers assume.

        The real number can differ between libraries (trees, shared memory).
        """


class AllGather(Message):
    """``(*shape)`` of each rank to ``(n, *shape)`` on all; each rank sends ``(n - 1) b`` bytes for b bytes of x."""

    __slots__ = ()
    kind = "all_gather"

    def bytes_sent(self, n: int) -> float:
        """Return ``(n - 1) b``: the part of each rank passes through the n - 1 others."""
        return float((n - 1) * self.x.nbytes)


class AllReduce(Message):
    """Sum over ranks; x may be overwritten. Each rank sends ``2 (n - 1) / n b`` bytes."""

    __slots__ = ()
    kind = "all_reduce"

    def bytes_sent(self, n: int) -> float:
        """Return :func:`ring_all_reduce_bytes` of x."""
        return ring_all_reduce_bytes(self.x.nbytes, n)


@dataclass(frozen=True, eq=False, slots=True)
class Broadcast(Message):
    """The tensor of rank ``src``, on all ranks; x may be overwritten. ``(n - 1) / n b`` bytes on average."""

    src: int
    kind = "broadcast"

    def bytes_sent(self, n: int) -> float:
        """Return the mean over ranks: all but the last one in the ring pass x on."""
        return (n - 1) / n * self.x.nbytes


class AllToAll(Message):
    """``(n, *shape)``: row j of rank i becomes row i of rank j; each rank sends ``(n - 1) / n b`` bytes."""

    __slots__ = ()
    kind = "all_to_all"

    def bytes_sent(self, n: int) -> float:
        """Return the bytes of all rows but the own one."""
        return (n - 1) / n * self.x.nbytes


@dataclass(frozen=True, eq=False, slots=True)
class SendRecv(Message):
    """Transfer of x to rank ``to``, and of x of rank ``source`` to this one; each another rank, or None.

    All ranks yield it, also those that neither send nor receive; senders and receivers must match. Without a source,
    the answer is an empty tensor. A rank with a receiver sends b bytes.
    """

    to: int | None
    source: int | None
    kind = "send_recv"

    def bytes_sent(self, n: int) -> float:
        """Return the bytes of x, or 0 without a receiver."""
        return 0.0 if self.to is None else float(self.x.nbytes)


Steps = Generator[Message, Tensor, T]
"""A coroutine that yields messages, gets the answers, and returns a T."""


def resolve(result: T | Steps[T]) -> Steps[T]:
    """Return the given value, or run the given coroutine and return its value."""
    return (yield from result) if isinstance(result, Generator) else result


def started(steps: Steps[T]) -> Steps[T]:
    """Run a coroutine up to its first message now, and return a coroutine that continues from there.

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
    """Counter of the bytes of messages.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.bytes_sent = 0.0
        """Bytes sent by this rank, see :meth:`Message.bytes_sent`."""

    def watch(self, steps: Steps[T]) -> Steps[T]:
        """Run a coroutine and count the bytes of its messages."""
        try:
            message = next(steps)
            while True:
                self.bytes_sent += message.bytes_sent(self.world_size)
                message = steps.send((yield message))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def ring_all_reduce_bytes(payload_bytes: float, world_size: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce: ``2 (n - 1) / n`` times the payload.

    Example:
        >>> ring_all_reduce_bytes(1000, 4)
        1500.0
    """
    return 2 * (world_size - 1) / world_size * payload_bytes
