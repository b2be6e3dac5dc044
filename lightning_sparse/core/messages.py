"""Messages between ranks, and coroutines that yield them, alone and joined.

An exchange, and a sparsifier that needs the other ranks while it selects, never sees the network. It is a generator
that *yields* a message and gets the answer back; a driver in :mod:`lightning_sparse.engine.drivers` sends it. The same
code thus runs between processes, with joined messages of several groups, for n ranks in one process, and without any
network to count bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
LARGE = 4 << 20
"""Bytes from which on a message is sent by itself: its copy would cost more than the latency that joining saves."""
WORD = 16
"""Bytes to whose multiples messages of different dtypes are lengthened: the size of the longest dtype."""


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


def run(steps: Steps[T], answer: Callable[[Message], Tensor]) -> T:
    """Run a coroutine whose messages a function answers, and return its value."""
    try:
        message = next(steps)
        while True:
            message = steps.send(answer(message))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def ask(message: Message) -> Steps[Tensor]:
    """Return the answer to one message."""
    return (yield message)


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
        answer: Any = None
        try:
            while True:
                message = steps.send(answer)
                self.count(message)
                answer = yield message
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def count(self, message: Message) -> None:
        """Count a message."""
        self.bytes_sent += message.bytes_sent(self.world_size)


def ring_all_reduce_bytes(payload_bytes: float, world_size: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce: ``2 (n - 1) / n`` times the payload.

    Example:
        >>> ring_all_reduce_bytes(1000, 4)
        1500.0
    """
    return 2 * (world_size - 1) / world_size * payload_bytes


def in_hops(steps: Steps[T], n: int) -> Steps[T]:
    """Run a coroutine whose sums are formed by two messages that each rank sends to all others at once.

    Each of n ranks adds up one n-th of the vector, in the order of ranks, and sends it to the others: the bytes of a
    ring (:meth:`AllReduce.bytes_sent`), rounded up to n elements, in 2 message times in place of ``2 (n - 1)``. Two
    ranks send each other the whole vector, which is as many bytes in 1 message time. The sums are those of
    :func:`~lightning_sparse.engine.drivers.drive_ranks`, bit for bit. Vectors that are not :func:`short` are left to
    the library.

    Example:
        >>> import torch
        >>> def total(x: Tensor) -> Steps[Tensor]:
        ...     return (yield AllReduce(x))
        >>> steps = in_hops(total(torch.tensor([1, 2, 3, 4])), 3)
        >>> next(steps)
        AllToAll(x=tensor([[1, 2],
                [3, 4],
                [0, 0]]))
        >>> steps.send(torch.tensor([[1, 2], [10, 20], [100, 200]]))  # the first part of each rank
        AllGather(x=tensor([111, 222]))
    """
    answer: Any = None
    try:
        while True:
            message = steps.send(answer)
            if isinstance(message, AllReduce) and short(message.x):
                answer = yield from summed(message.x, n)
            else:
                answer = yield message
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def short(x: Tensor) -> bool:
    """Return True for tensors on the CPU below 4 MiB, which take less time than a message waits for another one."""
    return x.is_cpu and x.nbytes < LARGE


def summed(x: Tensor, n: int) -> Steps[Tensor]:
    """Return the sum of x over n ranks, see :func:`in_hops`."""
    if n == 2:
        every = yield AllGather(x)
        return every[0] + every[1]
    length = -(-x.numel() // n)
    message = x.new_zeros(n * length)
    message[: x.numel()] = x.flatten()
    total, *others = (yield AllToAll(message.view(n, length))).unbind()
    for other in others:
        total += other
    parts = yield AllGather(total)
    return parts.contiguous().flatten()[: x.numel()].view(x.shape)  # without the copy, single elements lie apart


TURNS = ("all_gather", "broadcast", "send_recv", "all_to_all", "all_reduce")
"""Kinds in the order in which they are sent where several are asked for: sums wait for those that follow a message."""
_kind = attrgetter("kind")


def together(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Join several coroutines to one, whose messages travel together.

    All coroutines run to their next message. Messages of the first kind of :data:`TURNS` that is asked for are sent,
    while the others wait for more of their own, and coroutines with an answer go on. Those of one kind (and source, for
    a broadcast) become one, as bytes where their dtypes differ; sums of different dtypes are sent one by one. Each
    coroutine gets its slice of the answer. A message that is alone is passed on without a copy; joined ones are shorter
    than 4 MiB. Messages from rank to rank (:class:`~lightning_sparse.core.messages.SendRecv`) are passed on one by
    one, because the pairs with equal partners differ from rank to rank. The order depends only on the order of the
    coroutines and the kinds of their messages, so that it is equal on all ranks.

    Where a library forms them, sums of floating-point numbers may differ from separate ones in the last bits, because
    it adds up parts of a buffer in an order that depends on their position. They are equal on all ranks.

    Args:
        steps: the coroutines, which may end at different times.

    Example:
        >>> def total(x: Tensor) -> Steps[Tensor]:
        ...     return (yield AllReduce(x))
        >>> steps = together([total(torch.tensor(1.0)), total(torch.tensor([2.0, 20.0]))])
        >>> run(steps, lambda message: print(message) or 3 * message.x)
        AllReduce(x=tensor([ 1.,  2., 20.]))
        [tensor(3.), tensor([ 6., 60.])]
    """
    results: dict[int, T] = {}
    asked: dict[int, Message] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(steps)))
    while True:
        for index, answer in answers.items():
            try:
                asked[index] = steps[index].send(answer)  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                results[index] = end.value
        if not asked:
            return [results[index] for index in range(len(steps))]
        kind = min(map(_kind, asked.values()), key=TURNS.index)
        answers = {}
        for batch in _batches(asked, kind):
            messages = [asked.pop(index) for index in batch]
            if len(batch) == 1:
                answers[batch[0]] = yield messages[0]
            else:
                sent, read = _as_one(messages)
                answers.update(zip(batch, read((yield sent)), strict=True))
        answers = dict(sorted(answers.items()))


def _batches(asked: Mapping[int, Message], kind: str) -> list[list[int]]:
    """Return which messages of a kind travel as one, each batch shorter than what is large."""
    found: dict[Hashable, list[list[int]]] = {}
    lengths: dict[Hashable, int] = {}
    for index, message in sorted(asked.items()):
        if message.kind != kind:
            continue
        length = message.x.nbytes
        alone = isinstance(message, SendRecv) or length >= LARGE
        dtype = message.x.dtype if isinstance(message, AllReduce) else None
        key = index if alone else (dtype, getattr(message, "src", None))
        if key in found and lengths[key] + length < LARGE:
            found[key][-1].append(index)
            lengths[key] += length
        else:
            found.setdefault(key, []).append([index])
            lengths[key] = length
    return list(chain.from_iterable(found.values()))


def _as_one(messages: Sequence[Message]) -> tuple[Message, Callable[[Tensor], list[Tensor]]]:
    """Return one message that holds several, and what reads their answers from its answer."""
    # Rows of an all-to-all go to different ranks and are lengthened; everything else is one long vector.
    first, gathers = messages[0], isinstance(messages[0], AllGather)
    by_row = isinstance(first, AllToAll)
    rows = [m.x.reshape(len(m.x), m.x.numel() // len(m.x)) if by_row else m.x.flatten() for m in messages]
    mixed = len({row.dtype for row in rows}) > 1
    sent = [_bytes_of(row) for row in rows] if mixed else rows

    def read(answer: Tensor) -> list[Tensor]:
        parts = torch.split(answer, [row.shape[-1] for row in sent], dim=-1)
        if mixed:
            parts = tuple(_read(part, row) for part, row in zip(parts, rows, strict=True))
        ranks = answer.shape[:1] if gathers else ()
        return [part.reshape((*ranks, *m.x.shape)) for part, m in zip(parts, messages, strict=True)]

    return replace(first, x=torch.cat(sent, dim=-1)), read


def _bytes_of(rows: Tensor) -> Tensor:
    """Return rows of bytes, lengthened so that what follows can be read as any dtype."""
    words = max(1, -(-rows.shape[-1] * rows.element_size() // WORD))  # strides of empty rows could not be read
    raw = rows.new_zeros((*rows.shape[:-1], words * WORD), dtype=torch.uint8)
    _read(raw, rows).copy_(rows)
    return raw


def _read(raw: Tensor, like: Tensor) -> Tensor:
    """Return bytes as elements of the dtype of rows, and as many in a row."""
    return raw[..., : like.shape[-1] * like.element_size()].view(like.dtype)
