"""Groups whose messages travel together.

The local work of a group, up to its first message, is done as soon as its gradients are here. When the last group of a
batch has come, the messages of all are sent, those of a kind as one. Where parameters may be left out of a backward, it
must be known beforehand which these are: that is asked once for the whole batch, and all local work comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.clock import Stamp
from lightning_sparse.core.messages import AllGather, Steps, started
from lightning_sparse.core.step import Context
from lightning_sparse.engine.executor import ExchangeStream, Executor
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.header import Header
from lightning_sparse.engine.network import TorchCollective, drive_together
from lightning_sparse.engine.optimizers.clipping import Clipping
from lightning_sparse.engine.sources.gradient_hooks import Usage

SHOWN = 4
"""Number of groups that a note names."""


class Member(NamedTuple):
    """A group of a batch, whose gradients are complete."""

    group: GroupReducer
    ctx: Context
    scale: Tensor | None
    """Factor that the loss was multiplied by."""
    flush: bool
    """Whether everything is sent."""
    used_here: Sequence[bool]
    """Whether each of its parameters was used on this rank; empty where all are."""
    wait_for_gradients: Callable[[], None]
    """Lets the exchange wait for backward."""


class Started(NamedTuple):
    """A group whose local work is done."""

    group: GroupReducer
    steps: Steps[None]
    """The rest of it."""
    paused: Stamp


def _named(members: Sequence[Member]) -> str:
    names = [repr(member.group.plan.name) for member in members]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"group{'s' if len(names) > 1 else ''} {', '.join(names[:SHOWN])}{more}"


class Batches:
    """Forms batches, and sends them; the work is done by an executor.

    Args:
        comm: the ranks.
        usage: which parameters took part in a backward; None: all do.
        executor: when and where.
        on_stream: the stream of the groups.
        device: of the gradients.
        failing_together: within which errors are raised, given a place for a note.
        changing: within which gradients are absorbed, given the names of their parameters.
    """

    def __init__(
        self,
        comm: TorchCollective,
        usage: Usage | None,
        executor: Executor,
        on_stream: ExchangeStream,
        device: torch.device,
        failing_together: Callable[[str], AbstractContextManager[None]],
        changing: Callable[[Set[str]], AbstractContextManager[None]],
    ) -> None:
        self._comm, self._usage, self._executor = comm, usage, executor
        self._on_stream, self._device = on_stream, device
        self._failing_together, self._changing = failing_together, changing
        self._members: list[Member] = []
        self._started: list[Started] = []
        """Groups whose local work is done; touched by the executor only."""
        self.shared_bytes = 0.0
        """Bytes that this rank has sent in this step for no single group."""
        self.headers: Tensor | None = None
        """Headers of all ranks in this step; None if it had none."""
        self._clippings: Sequence[tuple[Clipping, Set[str], int]] = ()

    def begin_step(self, clippings: Sequence[tuple[Clipping, Set[str], int]]) -> None:
        """The first gradients of a step are here.

        Args:
            clippings: what this rank's gradients are clipped to, those of a batch together: of which parameters, and
                how many coordinates these have in all groups.
        """
        self.shared_bytes, self.headers = 0.0, None
        self._clippings = clippings

    def add(self, group: GroupReducer, ctx: Context, scale: Tensor | None, flush: bool) -> None:
        """All gradients of a group are here: let it travel with the next batch."""
        used_here = [] if self._usage is None else self._usage.here(group.spans)
        member = Member(group, ctx, scale, flush, used_here, self._on_stream.ready())
        self._members.append(member)
        if not self._waits:
            self._executor.submit(partial(self._start, member))

    @property
    def _waits(self) -> bool:
        """Whether local work begins when the gradients of the whole batch are here."""
        return self._usage is not None or bool(self._clippings)

    def send(self, header: Header | None = None) -> None:
        """Exchange what has been added; with a header, if one is given."""
        members, self._members = self._members, []
        if members:
            self._executor.submit(partial(self._exchange, members, header))

    def _start(self, member: Member, unused: Set[str] = frozenset()) -> None:
        with self._on_stream():
            steps = started(self._steps_of(member, unused))
            self._started.append(Started(member.group, steps, Stamp.now(self._device)))

    def _steps_of(self, member: Member, unused: Set[str]) -> Steps[None]:
        with self._failing_together(f"in the exchange of group {member.group.plan.name!r}"):
            member.wait_for_gradients()
            yield from member.group.exchange_steps(member.ctx, unused, member.scale, member.flush, self._changing)

    def _exchange(self, members: Sequence[Member], header: Header | None) -> None:
        with self._on_stream(), self._failing_together(f"in the exchange of {_named(members)}"):
            if self._waits:
                none: list[Set[str]] = [frozenset()] * len(members)
                unused = none if self._usage is None else self._ask(self._usage, members)
                self._clip(members, unused)
                for member, names in zip(members, unused, strict=True):
                    self._start(member, names)
            batch, self._started = self._started, []
            resumed = Stamp.now(self._device)
            steps: list[Steps[Any]] = [started.steps for started in batch]
            if header is None:
                drive_together(steps, self._comm)
            else:  # first, so that its words come first
                self.headers, *_ = drive_together([header.compare(self._device), *steps], self._comm)
                self.shared_bytes += AllGather(self.headers[0]).bytes_sent(self._comm.world_size)
        for group, _, paused in batch if len(batch) > 1 else ():
            group.note_pause(paused, resumed)

    def _clip(self, members: Sequence[Member], unused: Sequence[Set[str]]) -> None:
        for member in members if self._clippings else ():
            member.wait_for_gradients()
        for clipping, clipped, numel in self._clippings:
            arrived = [
                (name, piece, name in names)
                for member, names in zip(members, unused, strict=True)
                for name, piece in member.group.arrived.items()
                if name in clipped
            ]
            share = sum(piece.numel() for _, piece, _ in arrived) / numel
            used = [piece for _, piece, left_out in arrived if not left_out]
            clipping.apply_(used, self._comm.world_size, share, members[0].scale)

    def _ask(self, usage: Usage, members: Sequence[Member]) -> list[Set[str]]:
        """Which parameters of each group no rank used."""
        used, sent = usage.anywhere([here for member in members for here in member.used_here])
        self.shared_bytes += sent
        anywhere = iter(used)
        return [{name for name in member.group.spans if not next(anywhere)} for member in members]
