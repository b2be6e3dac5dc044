"""Drivers of coroutines: they answer the messages that exchanges yield, over a network or without one.

- :func:`drive`: one coroutine, a message at a time.
- :func:`drive_together`: several, the groups of a step; messages of a kind travel as one.
- :class:`Going`: one that waits, where a handler of a signal may go on with it.
- :func:`drive_ranks`: those of n ranks in one process.
- :func:`drive_mirrored`: a dry run of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lightning_sparse.core.messages import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Message,
    SendRecv,
    Steps,
    in_hops,
    run,
    together,
)
from lightning_sparse.engine.network import TorchCollective, send

T = TypeVar("T")

Send = Callable[[Message, TorchCollective], Tensor]
"""Sends a message and returns the answer."""


def drive(steps: Steps[T], comm: TorchCollective, send: Send = send) -> T:
    """Run a coroutine on this rank, each message as it comes.

    Args:
        steps: the coroutine; all ranks run the same one.
        comm: the ranks.
        send: sends a message; may be replaced to observe messages.

    Returns:
        The value of the coroutine.
    """
    return run(steps, lambda message: send(message, comm))


def drive_together(steps: Sequence[Steps[T]], comm: TorchCollective, send: Send = send) -> list[T]:
    """Run several coroutines on this rank, whose messages travel together.

    See :func:`~lightning_sparse.core.messages.together`.

    Args:
        steps: the coroutines; all ranks run the same ones in the same order.
        comm: the ranks.
        send: see :func:`drive`.

    Returns:
        The value of each coroutine.
    """
    return drive(joined(steps, comm), comm, send)


class Going(Generic[T]):
    """A coroutine that is run on this rank, up to its first message at once, and then each message as it comes.

    Where it waits, a handler of a signal may run it to its end: other ranks may have gone on meanwhile, and wait for
    what this one sends.

    Args:
        steps: the coroutine; all ranks run the same one.
        start: starts a message, and returns what waits for the answer, see :meth:`TorchCollective.start`.
        listening: calls a function that waits, so that handlers run meanwhile, and only then.
    """

    def __init__(
        self,
        steps: Steps[T],
        start: Callable[[Message], Callable[[], Tensor]],
        listening: Callable[[Callable[[], Tensor]], Tensor],
    ) -> None:
        self._steps, self._start, self._listening = steps, start, listening
        self._message: Message | None = None
        self._waiting: Callable[[], Tensor] | None = None
        self._values: list[T] = []
        self._go_on(None)

    def run(self) -> T:
        """Return the value of the coroutine."""
        while self._message is not None:
            self._waiting = waiting = self._waiting or self._start(self._message)
            answer = self._listening(waiting)
            if self._waiting is waiting:  # no handler has gone on
                self._go_on(answer)
        return self._values[0]

    def _go_on(self, answer: Tensor | None) -> None:
        self._waiting = None
        try:
            self._message = self._steps.send(answer)  # type: ignore[arg-type]  # None starts it
        except StopIteration as end:
            self._message = None
            self._values.append(end.value)


def joined(steps: Sequence[Steps[T]], comm: TorchCollective) -> Steps[list[T]]:
    """Join coroutines as :func:`drive_together` does, for :func:`drive`."""
    return together([in_hops(each, comm.world_size) for each in steps] if comm.one_hop else steps)


def drive_ranks(steps: Sequence[Steps[T]]) -> list[T]:
    """Run the coroutines of n ranks side by side in this process, without a network and without threads.

    All ranks run to their next message, which is then answered; sums are formed once, in the order of ranks. With
    :func:`~lightning_sparse.core.messages.together` for each rank, several groups are run as well.

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

    return run(steps, answer), messages
