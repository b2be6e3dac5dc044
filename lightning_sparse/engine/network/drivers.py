"""Drivers without a network: for n ranks in one process, and for a dry run of one.

With :func:`~lightning_sparse.engine.network.drive` and :func:`~lightning_sparse.engine.network.drive_together`, the
drivers of a real rank, they are all that runs coroutines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_sparse.core.messages import AllGather, AllReduce, AllToAll, Broadcast, Message, SendRecv, Steps, run

T = TypeVar("T")


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
