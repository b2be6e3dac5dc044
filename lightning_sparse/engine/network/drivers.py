"""Drivers: they run coroutines that yield messages, and are the only code that uses the network.

- :func:`drive`: one coroutine on this rank; each message is one collective.
- :func:`drive_together`: several on this rank, the groups of a step; messages of a kind travel as one.
- :func:`drive_ranks`: the coroutines of n ranks in one process, side by side.
- :func:`drive_mirrored`: a dry run of one coroutine without a network, as if all ranks had the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lightning_sparse.core.messages import AllGather, AllReduce, AllToAll, Broadcast, Message, SendRecv, Steps
from lightning_sparse.engine.network.process_group import TorchCollective

T = TypeVar("T")
LARGE = 4 << 20
"""Bytes from which on a message is sent by itself: its copy would cost more than the latency that joining saves."""

Send = Callable[[Message, TorchCollective], Tensor]
"""Sends a message and returns the answer."""


def send(message: Message, comm: TorchCollective) -> Tensor:
    """Send one message between the real ranks and return the answer."""
    match message:
        case AllGather(x):
            return comm.all_gather(x)
        case AllReduce(x):
            return comm.all_reduce(x)
        case Broadcast(x, src):
            return comm.broadcast(x, src)
        case AllToAll(x):
            return comm.all_to_all(x)
        case SendRecv(x, to, source):
            received = comm.send_recv(x, to, source)
            return x[:0] if received is None else received
    raise TypeError(f"Expected a message, but got {message!r}.")


def drive(steps: Steps[T], comm: TorchCollective, send: Send = send) -> T:
    """Run a coroutine on this rank, each message as it comes.

    Args:
        steps: the coroutine; all ranks run the same one.
        comm: the ranks.
        send: sends a message; may be replaced to observe messages.

    Returns:
        The value of the coroutine.
    """
    return _run(steps, lambda message: send(message, comm))


def _run(steps: Steps[T], answer: Callable[[Message], Tensor]) -> T:
    try:
        message = next(steps)
        while True:
            message = steps.send(answer(message))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def drive_together(steps: Sequence[Steps[T]], comm: TorchCollective, send: Send = send) -> list[T]:
    """Run several coroutines on this rank, with one collective per round and kind, see :func:`together`.

    Args:
        steps: the coroutines; all ranks run the same ones in the same order.
        comm: the ranks.
        send: see :func:`drive`.

    Returns:
        The value of each coroutine.
    """
    return drive(together(steps), comm, send)


def together(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Join several coroutines to one, whose messages travel together.

    In each round, all coroutines run to their next message. Messages of one kind and dtype (and source, for a
    broadcast) become one; each coroutine gets its slice of the answer. A message that is alone is passed on without a
    copy, and so are messages of 4 MiB and more. Messages from rank to rank
    (:class:`~lightning_sparse.core.messages.SendRecv`) are passed on one by one, because the pairs with equal partners
    differ from rank to rank. The order depends only on the order of the coroutines and the kinds of their messages, so
    that it is equal on all ranks.

    Sums of floating-point numbers may differ from separate ones in the last bits, because a library adds up parts of a
    buffer in an order that depends on their position. They are equal on all ranks.

    Args:
        steps: the coroutines, which may end in different rounds.

    Example:
        >>> def total(x: Tensor) -> Steps[Tensor]:
        ...     return (yield AllReduce(x))
        >>> def ranks(x: float) -> Steps[list[Tensor]]:
        ...     return together([total(torch.tensor(x)), total(torch.tensor([x, 10 * x]))])
        >>> drive_ranks([ranks(1.0), ranks(2.0)])[0]
        [tensor(3.), tensor([ 3., 30.])]
    """
    results: dict[int, T] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(steps)))
    while answers:
        batches: dict[Hashable, dict[int, Message]] = {}
        for index, answer in answers.items():
            try:
                message = steps[index].send(answer)  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                results[index] = end.value
            else:
                batches.setdefault(_batch_of(message, index), {})[index] = message
        answers = {}
        for batch in batches.values():
            answers.update(zip(batch, (yield from _share(list(batch.values()))), strict=True))
        answers = dict(sorted(answers.items()))
    return [results[index] for index in range(len(steps))]


def _batch_of(message: Message, index: int) -> Hashable:
    """Return a key that is equal for messages that can travel as one."""
    if isinstance(message, SendRecv) or message.x.nbytes >= LARGE:
        return index
    return message.kind, message.x.dtype, getattr(message, "src", None)


def _share(messages: Sequence[Message]) -> Steps[list[Tensor]]:
    """Send the messages of one batch as one, and return their answers."""
    first = messages[0]
    if len(messages) == 1:
        return [(yield first)]
    # Rows of an all-to-all go to different ranks and are lengthened; everything else is one long vector.
    rows = [
        m.x.reshape(len(m.x), m.x.numel() // len(m.x)) if isinstance(m, AllToAll) else m.x.flatten() for m in messages
    ]
    answer = yield replace(first, x=torch.cat(rows, dim=-1))
    parts = torch.split(answer, [row.shape[-1] for row in rows], dim=-1)
    ranks = answer.shape[:1] if isinstance(first, AllGather) else ()
    return [part.reshape((*ranks, *m.x.shape)) for part, m in zip(parts, messages, strict=True)]


def drive_ranks(steps: Sequence[Steps[T]]) -> list[T]:
    """Run the coroutines of n ranks side by side in this process, without a network and without threads.

    All ranks run to their next message, which is then answered; sums are formed once, in the order of ranks. With
    :func:`together` for each rank, this works for several groups as well.

    Args:
        steps: the coroutine of each rank.

    Returns:
        The value of each coroutine.

    Raises:
        RuntimeError: if ranks ask for different messages, on which a real network would hang or return garbage; the
            error of a rank that fails is raised as it is.

    Example:
        >>> def mean(x: Tensor, n: int) -> Steps[Tensor]:
        ...     total = yield AllReduce(x)
        ...     return total / n
        >>> drive_ranks([mean(torch.tensor([1.0, 2.0]), 2), mean(torch.tensor([3.0, 4.0]), 2)])
        [tensor([2., 3.]), tensor([2., 3.])]
    """
    answers: Sequence[Tensor | None] = [None] * len(steps)
    while True:
        messages: list[Message] = []
        results: list[T] = []
        for coroutine, answer in zip(steps, answers, strict=True):
            try:
                messages.append(coroutine.send(answer))  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                results.append(end.value)
        if len(results) == len(steps):
            return results
        if results:
            raise RuntimeError(
                f"{len(results)} of {len(steps)} ranks have ended, and the others ask for {messages[0].kind}."
            )
        answers = _between(messages)


def _between(messages: Sequence[Message]) -> list[Tensor]:
    """Answer one message of each rank; the answers share no memory."""
    asked = {(m.kind, getattr(m, "src", None), tuple(m.x.shape), m.x.dtype) for m in messages}
    if len(asked) > 1:
        raise RuntimeError(f"Expected all ranks to ask for one thing, but they ask for {sorted(asked, key=str)}.")
    xs = [message.x for message in messages]
    match messages[0]:
        case AllGather():
            rows = torch.stack(xs)
            return [rows.clone() for _ in xs]
        case AllReduce():
            total = sum(xs[1:], start=xs[0])
            return [total.clone() for _ in xs]
        case Broadcast(_, src):
            return [xs[src].clone() for _ in xs]
        case AllToAll():
            return list(torch.stack(xs, dim=1).unbind())
    return [xs[rank][:0] if source is None else xs[source].clone() for rank, source in enumerate(_sources(messages))]


def _sources(messages: Sequence[Message]) -> list[int | None]:
    """Return the source of each rank."""
    routes = [(m.to, m.source) for m in messages if isinstance(m, SendRecv)]
    given = {(rank, to) for rank, (to, _) in enumerate(routes) if to is not None}
    taken = {(source, rank) for rank, (_, source) in enumerate(routes) if source is not None}
    if given != taken or any(a == b for a, b in given):
        raise RuntimeError(
            "Expected each rank to give to one that takes it, but they give (from, to) "
            f"{sorted(given)} and take {sorted(taken)}."
        )
    return [source for _, source in routes]


def drive_mirrored(steps: Steps[T], world_size: int) -> tuple[T, list[Message]]:
    """Make a dry run of a coroutine without a network, as if all n ranks had the same tensors as this one.

    On tensors of the "meta" device, which have shapes and no content, this costs almost nothing.

    Returns:
        The value of the coroutine, and its messages.
    """
    messages: list[Message] = []

    def answer(message: Message) -> Tensor:
        messages.append(message)
        x = message.x
        match message:
            case AllGather():
                return x.expand(world_size, *x.shape).clone()
            case AllReduce():
                return x * world_size
            case SendRecv(source=None):
                return x[:0]
        return x.clone()

    return _run(steps, answer), messages
