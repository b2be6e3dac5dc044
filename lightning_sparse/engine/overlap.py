"""The exchange hidden behind backward: groups absorb and send as soon as DDP has their gradients; the step writes.

A group's exchange has two halves, see :mod:`~lightning_sparse.engine.pipeline`. The first one, from the gradient to the
average, runs within backward here, on a copy of the gradient, which stays this rank's own in ``.grad``. The second one
follows when the optimizer steps: what was sent leaves the residual, and averages take the place of gradients. So what
waits in between has left no residual yet: a state that is asked for holds all that was absorbed, and a step that is
skipped, or ends with an error, loses nothing.

On CPUs, local work up to the first message is done where DDP calls, and a thread goes on from there, with a process
group of its own. It reads residuals and never changes one. On CUDA, all is queued on a stream of high priority.

What is sent in backward cannot be changed afterwards. Gradients that were changed between backward and step, a second
backward before the step, clipping and loss scaling are errors, on all ranks.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from lightning_sparse.core.layout import flattened
from lightning_sparse.engine.ahead import LOOK
from lightning_sparse.engine.average import Average, place
from lightning_sparse.engine.backward import BackwardEnd
from lightning_sparse.engine.calls import BEGIN, EXCHANGE, HIDDEN, STEP, Met, compare
from lightning_sparse.engine.drivers import Going, joined
from lightning_sparse.engine.group import Exchanged as OfGroup
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.meeting import look
from lightning_sparse.engine.metrics import Stamp
from lightning_sparse.engine.network import LISTEN, LostRankError, TorchCollective
from lightning_sparse.engine.optimizers.kinds import ids_of
from lightning_sparse.engine.record import Counts
from lightning_sparse.engine.signals import SAVING, Hold
from lightning_sparse.engine.step import Exchanged, Joined, Started, Stepper, Units, at_once
from lightning_sparse.engine.stream import ExchangeStream

INSTEAD = "overlap=False exchanges when the optimizer steps."
SECOND = (
    "A second synchronised backward has begun before the optimizer has stepped. With overlap=True gradients are "
    "exchanged within backward, and those of the first one wait for the step. Step after each of them, accumulate "
    f"within no_sync(), or leave it at {INSTEAD}"
)
CHANGED = (
    "Gradients were changed between backward and the optimizer's step: {}. With overlap=True they are exchanged within "
    "backward already, so that clipping, masking, unscaling, zeroing or replacing them would have no effect. Leave "
    f"them as they are; {INSTEAD}"
)
RATES = (
    "Learning rates have changed between backward and the optimizer's step. With Residual(rates=True) and overlap=True "
    f"gradients were multiplied by those of backward already. Change rates after the step; {INSTEAD}"
)
OTHERS = (
    "An optimizer steps other parameters than those whose gradients were exchanged within backward. With overlap=True "
    f"one optimizer holds all parameters that are trained. For several, {INSTEAD}"
)
SCALED = (
    "Losses cannot be scaled with overlap=True: gradients are exchanged within backward, before a scaler knows its "
    f"decision. Train in bfloat16, or leave it at {INSTEAD}"
)
FOREIGN = f"engine.exchange() does not go with overlap=True, which has exchanged gradients within backward. {INSTEAD}"
ANOTHER = f"Another engine holds parameters of this one, whose gradients are exchanged within its backward. {INSTEAD}"
BETWEEN = "Groups cannot change between a backward and the optimizer's step with overlap=True: averages wait."

SAMPLED = 16
"""Gradients of which as many coordinates are compared, at least where there are so many."""


class Sent:
    """Work of the thread, and what it brings.

    Args:
        work: is called once.
        failing_together: within which errors are raised; other threads may look for the cause of what it does.
    """

    def __init__(
        self,
        work: Callable[[], list[OfGroup]],
        failing_together: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._work, self._failing_together = work, failing_together
        self._results: list[OfGroup] = []
        self.done = False
        """True if the work has ended."""
        self.error: BaseException | None = None
        """With which it has."""
        self._lock = threading.Lock()
        self._lock.acquire()

    def run(self) -> None:
        """Do the work; its error is raised where it is waited for."""
        try:
            with self._failing_together("in the exchange"):
                work, self._work = self._work, list  # which holds gradients
                try:
                    self._results = work()
                except BaseException as error:
                    self.error = error
                    raise
        except BaseException as error:
            self.error = self.error or error
        finally:
            self.done = True
            self._lock.release()

    def end(self, seconds: float = math.inf) -> None:
        """Wait for the end, and no longer than that; a handler of a signal that runs meanwhile may call this, too."""
        latest = time.monotonic() + seconds
        while not self.done and time.monotonic() < latest:  # set before the lock is free: a frame below may have it
            self._lock.acquire(timeout=LOOK.total_seconds())

    def wait(self) -> list[OfGroup]:
        """Return the results when they are here, see :meth:`end`."""
        self.end()
        if self.error is not None:
            raise self.error
        return self._results


class Sender:
    """A thread that does pieces of work in the order in which they come; it starts with the first one.

    Args:
        comm: for whose messages it waits, and which ends with it.
    """

    def __init__(self, comm: TorchCollective) -> None:
        self.comm = comm
        self._work: SimpleQueue[Sent | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Callable[[], Sent | None] = lambda: None
        self._ends = weakref.finalize(self, self._work.put, None)
        _senders.add(self)

    def send(self, sent: Sent) -> None:
        """Let work be done."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._work,), name="sparse-overlap", daemon=True)
            self._thread.start()
        self._last = weakref.ref(sent)
        self._work.put(sent)

    @property
    def works(self) -> bool:
        """True if something is not done."""
        last = self._last()
        return last is not None and not last.done

    def close(self) -> None:
        """End the thread, and what it waits for."""
        if self.works:
            self.comm.interrupt()
        self.comm.close()
        self._ends()
        if self._thread is not None:
            self._thread.join(timeout=10)


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_senders.clear)  # whose threads are not there


@atexit.register
def _close_all() -> None:
    """End threads that wait: the interpreter would end them within a message, and so the process by a signal."""
    for sender in list(_senders):
        sender.close()


def _serve(queue: SimpleQueue[Sent | None]) -> None:
    while (sent := queue.get()) is not None:
        sent.run()
        del sent  # which holds gradients


class Waiting:
    """What a backward exchanges, from its first bucket to the optimizer's step.

    Args:
        names: of parameters that optimizers hold.
        used: those of them that take part: their rate is not 0.
        groups: those that are exchanged, in the order of the plan.
        units: of what is exchanged.
        flush: whether everything is sent.
    """

    def __init__(
        self, names: Sequence[str], used: set[str], groups: Sequence[GroupReducer], units: Units, flush: bool
    ) -> None:
        self.names, self.used, self.units, self.flush = names, used, units, flush
        self.plan = groups
        self.missing = {id(group): group.spans.keys() & used for group in groups}
        """By group, parameters whose gradients are not here yet."""
        self.flat: dict[str, Tensor] = {}
        """Flat gradients in DDP's buckets, of groups that are not complete."""
        self.announce: Callable[[TorchCollective], None] = lambda comm: None
        """Begins a call of all ranks that ends with an error where they are about to exchange different things."""
        self.groups: list[GroupReducer] = []
        """Those that were sent, in this order."""
        self.sent: list[Sent] = []
        self.seconds = 0.0
        """Time that backward has spent on it."""
        self.given: Mapping[str, tuple[Tensor, int]] = {}
        """By parameter, what DDP has left in ``.grad``, and its version."""
        self.sampled: Tensor | None = None
        """Some coordinates of some of these."""


class Overlapped(Stepper):
    """Exchanges gradients within backward, and writes averages when optimizers step. Arguments are those of the base.

    Until an optimizer is known, because a host has shown it or it has stepped, gradients wait for the step: memory and
    learning rates follow from the optimizer.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.on_stream = ExchangeStream(self.device, priority=-1)
        threaded = self.on_stream.host_knows and self.comm.world_size > 1
        self._sender = Sender(self.comm.another()) if threaded else None
        self._sending = self.comm if self._sender is None else self._sender.comm
        self._waiting: Waiting | None = None
        self._kept = False
        """Whether gradients of the latest backward were absorbed, though some were not finite."""
        self.hiding = True
        """False while gradients wait for the step, so that nothing runs beside a backward that is timed."""

    # ----------------------------------------------------------------------------------------------- backward

    @property
    def hides(self) -> bool:
        """True if what a backward has exchanged waits for the step, or is on its way."""
        return self._waiting is not None

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a backward whose gradients are exchanged within it; collective.

        Raises:
            RuntimeError: on all ranks, if the optimizer has not stepped since the backward before.
        """
        if (waiting := self._waiting) is not None:
            self.meeting.meet(BEGIN, (), True)
            _wait_for(waiting)  # the thread must not be within a message when groups are given back
            raise RuntimeError(SECOND)
        self._kept = False
        ids = {key for optimizer in self.optimizers() for key in ids_of(optimizer)}
        names = [name for name, p in self.parameters.items() if id(p) in ids]
        if not names or not self.hiding:
            return
        if self.owners(names).keys() != {self}:
            raise RuntimeError(ANOTHER)
        self._number = self.record.counts.step
        self.split(names)
        self._open()
        units = Units(None, self._rates_of(names))
        used = {name for name in names if units.rates.get(name) != 0 or not self.group_of[name].memory.reads_rates}
        for group in self.groups:
            group.unused = group.spans.keys() - used
        groups = [group for group in self.groups if not used.isdisjoint(group.spans)]
        call = self.meeting.call(BEGIN, names, units.rates, self._scheduled_density())
        flush, self.flush_asked = self.flush_asked, False
        self._waiting = waiting = Waiting(names, used, groups, units, flush)
        words, ranks = call.words(True, [False] * len(self.parameters)), range(self.comm.world_size)
        waiting.announce = lambda comm: comm.announce(words, lambda rows: look(compare(rows, ranks)))
        if self._sender is None:  # looked at when the backward ends: the host must not wait for others before
            waiting.announce(self.meeting.hosts)

    @torch.no_grad()
    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take gradients of a bucket, and send groups that are complete.

        Args:
            parameters: of the model.
            gradients: flat ones of each of them, on this rank, with coordinates as parameters have them in memory; they
                must stay as they are until their group is complete.
        """
        if (waiting := self._waiting) is None:
            return
        begin = time.perf_counter()
        for p, grad in zip(parameters, gradients, strict=True):
            name = self.names.get(id(p), "")
            if name in waiting.used:
                waiting.flat[name] = grad
                waiting.missing[id(self.group_of[name])].discard(name)
        ready = [group for group in waiting.plan if id(group) in waiting.missing and not waiting.missing[id(group)]]
        if ready:
            hold = Hold()
            hold.start(SAVING)
            try:
                with self.naming_the_cause(), self.on_stream.beside():
                    waiting.sent.append(self._send(waiting, ready))
            finally:
                hold.end()
            waiting.groups += ready
            for group in ready:
                del waiting.missing[id(group)]
        waiting.seconds += time.perf_counter() - begin

    def _send(self, waiting: Waiting, ready: Sequence[GroupReducer]) -> Sent:
        """Absorb and select here up to the first message of these groups, which travel together, and go on beside."""
        pieces = [_copied(group, waiting.flat) for group in ready]
        steps = [
            self._steps_of(group, each, waiting.used, waiting.units, waiting.flush)
            for group, each in zip(ready, pieces, strict=True)
        ]
        comm = self._sending
        going = Going(joined(steps, comm), comm.start, at_once)

        announce = None if waiting.sent or self._sender is None else waiting.announce

        @torch.no_grad()
        def work() -> list[OfGroup]:
            if announce is not None:  # looked at before the first message
                announce(comm)
            return going.run()

        sent = Sent(work, self.failing_together)
        if self._sender is None:
            sent.run()
            sent.wait()
        else:
            self._sender.send(sent)
        return sent

    @contextmanager
    def naming_the_cause(self) -> Iterator[None]:
        """Raise the first error of the thread in place of one that follows from it: process groups have ended."""
        try:
            yield
        except Exception as error:
            every = [] if self._waiting is None else self._waiting.sent
            if isinstance(error, LostRankError):  # a rank that fails ends all its groups: the thread may know why
                for sent in every:
                    sent.end(LISTEN)
            first = next((sent.error for sent in every if sent.error is not None), error)
            if first is error:
                raise
            raise first from error

    def note_gradients(self) -> None:
        """Note what DDP has left in ``.grad``, when it has ended a backward."""
        if self._waiting is not None:
            every = ((name, self.parameters[name].grad) for name in self._waiting.names)
            self._waiting.given = {name: (grad, grad._version) for name, grad in every if grad is not None}
            self._waiting.sampled = _sampled([grad for grad, _ in self._waiting.given.values()])

    def gradients_are_here(self, names: Collection[str], finite: bool, averaged: bool) -> None:
        """See :meth:`.Stepper.gradients_are_here`; nothing waits for a step that no rank will take.

        What was absorbed stays in the residuals, as far as it is finite. To make it as if the backward had not been
        would take a copy of each residual in each step.
        """
        if (waiting := self._waiting) is not None and not finite:
            made = _wait_for(waiting)
            with self.record.changing(), self.on_stream.between_steps(), torch.no_grad():
                for group, one in zip(waiting.groups, made, strict=True):
                    group.settle(one, True)
            self._note_what_waits(waiting.used, waiting.flush, skipped=True)
            self._waiting, self.busy, self._kept = None, False, True
        super().gradients_are_here(names, finite, averaged)

    # --------------------------------------------------------------------------------------------------- step

    def exchange(self, names: Sequence[str], scale: Tensor | None = None, kind: int = STEP) -> Exchanged | None:
        """See :meth:`.Stepper.exchange`.

        Raises:
            RuntimeError: on all ranks that do the same, for a loss with a scale, and for foreign optimizers.
        """
        if scale is not None or kind == EXCHANGE:
            with self.failing_together("in the exchange"):
                self.meeting.meet(kind, names, True)
                raise RuntimeError(FOREIGN if kind == EXCHANGE else SCALED)
        return super().exchange(names, scale, kind)

    def _exchange(self, fresh: Sequence[str], units: Units, begin: Stamp, kind: int) -> Exchanged:
        """Write what backward has exchanged. Handlers of signals that save run where this waits for other ranks."""
        if (waiting := self._waiting) is None:
            return super()._exchange(fresh, units, begin, kind)
        if begin.event is None:  # on a device, backward does not wait for it
            begin = begin._replace(host=begin.host - waiting.seconds)
        met: list[Met] = []
        result: list[Exchanged] = []
        joining: Going[Joined] | None = None
        started = Started(waiting.groups, waiting.used, units, waiting.flush)

        @self.naming_the_cause()
        def rest() -> None:
            """Go on to the end, see the base."""
            nonlocal joining
            self._listen(self.meeting.hosts.hear)
            if result:
                return
            made = self._listen(lambda: _wait_for(waiting))
            if result:
                return
            self._refuse(waiting, fresh, met[0])
            with self.on_stream.between_steps():
                joining = joining or Going(self._join(started, made), self._start_within, self._listening)
                ended = joining.run()
                self._set_aside(fresh, units)
                if not ended.skipped:
                    self._write(ended.averages)
                result.append(self._settle(started, ended, begin))
                self.unused, self._begins, self._waiting = frozenset(), False, None

        @self.naming_the_cause()
        def announce() -> None:
            changed = self._changed(waiting)
            flags = [name in changed for name in self.parameters]
            alike, density = units.rates == waiting.units.rates, self._scheduled_density()
            self.meeting.announce(HIDDEN, fresh, alike, flags, met.append, units.rates, density=density)

        self._carry_out(announce, rest)
        return result[0]

    def _start(self, fresh: Sequence[str], used: set[str], units: Units) -> tuple[Started, Going[list[OfGroup]]]:
        """See the base; gradients that were not finite, and are now, were absorbed in part.

        Raises:
            RuntimeError: on all ranks, in that case.
        """
        if self._kept:
            raise RuntimeError(_changed(fresh))
        return super()._start(fresh, used, units)

    def _changed(self, waiting: Waiting) -> set[str]:
        """Return parameters whose ``.grad`` is not what DDP has left there."""
        found = set()
        for name in waiting.names:
            grad, (given, version) = self.parameters[name].grad, waiting.given.get(name, (None, 0))
            if grad is None or grad is not given or grad._version != version:
                found.add(name)
        # Scalers and writes to .data leave the version as it is.
        if not found and waiting.sampled is not None:
            now = _sampled([grad for grad, _ in waiting.given.values()])
            return found if bool(self.on_host((now == waiting.sampled).all())) else set(waiting.names)
        return found

    def _refuse(self, waiting: Waiting, fresh: Sequence[str], met: Met) -> None:
        """Refuse a step that would not be that of the gradients.

        Raises:
            RuntimeError: on all ranks, as they have met.
        """
        if set(fresh) != set(waiting.names):
            raise RuntimeError(OTHERS)
        changed = [name for name, number in self._numbers.items() if met.used[number]]
        if changed:
            raise RuntimeError(_changed(changed))
        if not met.finite:
            raise RuntimeError(RATES)

    def _write(self, averages: Mapping[str, Average]) -> None:
        """Put averages in the place of gradients."""
        self._lay_out(averages)
        place(averages, {name: self._exchanged(name, self.parameters[name].grad) for name in averages}, None)

    # ------------------------------------------------------------------------------------------------- groups

    def adopt(self, groups: list[GroupReducer], counts: Counts) -> None:
        """See :meth:`.Groups.adopt`.

        Raises:
            RuntimeError: between a backward and the step.
        """
        if getattr(self, "_waiting", None) is not None:
            raise RuntimeError(BETWEEN)
        super().adopt(groups, counts)

    @contextmanager
    def failing_together(self, where: str) -> Iterator[None]:
        """See :meth:`.Stepper.failing_together`."""
        try:
            with super().failing_together(where):
                yield
        except Exception:
            if self._sender is not None:
                self._sender.comm.abort()
            raise

    def close(self) -> None:
        """Give the process groups back, and end the thread."""
        super().close()
        if self._sender is not None:
            self._sender.close()


def _wait_for(waiting: Waiting) -> list[OfGroup]:
    """Return what was exchanged, in the order of :attr:`Waiting.groups`."""
    return [one for sent in waiting.sent for one in sent.wait()]


def _changed(names: Sequence[str]) -> str:
    """Say that gradients of these were changed."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return CHANGED.format(", ".join(names[:5]) + more)


def _sampled(gradients: Sequence[Tensor]) -> Tensor:
    """Return a few coordinates of a few gradients."""
    some = [flattened(grad) for grad in gradients[:: max(1, len(gradients) // SAMPLED)]]
    return torch.cat([x[:: max(1, x.numel() // SAMPLED)] for x in some])


def _copied(group: GroupReducer, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy gradients to a group's own place, and return its pieces by parameter; zeros of those that take no part."""
    if group.place is None:
        group.place = torch.zeros(group.plan.numel, dtype=group.dtype, device=group.device)
    pieces = {name: group.place[span] for name, span in group.spans.items()}
    given = {name: flat.pop(name) for name in group.spans if name in flat}
    if len(given) == len(pieces):
        torch.cat([*given.values()], out=group.place)
        return pieces
    for name, piece in pieces.items():
        piece.copy_(given[name]) if name in given else piece.zero_()
    return pieces


class OverlappedBackward(BackwardEnd):
    """DDP's communication hook, which hands gradients over as they come.

    Args:
        stepper: exchanges them.
    """

    def __init__(self, stepper: Overlapped) -> None:
        super().__init__(stepper)
        self._overlapped = stepper

    def _arrive(self, bucket: Any) -> None:
        if not self._pending:
            self._overlapped.begin()
        parameters = bucket.parameters()  # bucket.gradients() has coordinates of channels_last in another order
        self._overlapped.take(parameters, bucket.buffer().split([p.numel() for p in parameters]))

    def _end(self, buckets: Any) -> None:
        with self._overlapped.naming_the_cause():
            super()._end(buckets)
        if self._overlapped.hides:  # DDP writes gradients at the end of backward, in a callback that is queued next
            _behind(lambda: _behind(self._overlapped.note_gradients))


def _behind(act: Callable[[], None]) -> None:
    """Call a function at the end of the backward that is running, behind all that is to be called until now."""
    Variable._execution_engine.queue_callback(act)
