"""One step of all groups: gradients arrive from a source, groups exchange them, and the step is settled.

A source (:mod:`lightning_sparse.engine.sources`) hands over gradients by name of the parameter. The local work of a
group, up to its first message, is done as soon as its last gradient has arrived. Its messages travel with those of the
other groups of its *batch*, which is the step or the group alone: when the last group has come, those of a kind are
sent as one. Where parameters may be left out of a backward, it must be known beforehand which these are: that is asked
once for the whole batch, and all local work comes after it.

When all groups have been exchanged, what they have sent leaves the residuals, unless a gradient of any of them was not
finite on any rank. *When and where* groups run is up to an executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from lightning_sparse.core.layout import own
from lightning_sparse.core.messages import AllGather, Steps, ring_all_reduce_bytes, started
from lightning_sparse.core.step import Context
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.executor import held, make_executor
from lightning_sparse.engine.metrics import Stamp
from lightning_sparse.engine.network import TorchCollective, drive_together
from lightning_sparse.engine.optimizers.clipping import GradientClipping, Limit
from lightning_sparse.engine.pipeline import GroupReducer, forget_overflow_
from lightning_sparse.engine.regrouping import Groups
from lightning_sparse.engine.share import Share
from lightning_sparse.engine.skip import Decision, Header, any_set
from lightning_sparse.engine.sources.gradient_hooks import Usage, refuse_sparse_gradients
from lightning_sparse.engine.state.record import Averages, Counts, fill_nan_
from lightning_sparse.ops import all_finite
from lightning_sparse.ops.length import joint_norm

NOTE = "sparse_ddp: "
"""Begins the note that says where an error was raised."""
SHOWN = 4
"""Number of groups that a note names."""
PATIENCE = 30.0
"""Seconds that a state waits for an exchange that another rank has concluded already."""
Deliver = Callable[[Mapping[str, Averages], Tensor], None]
"""Puts averages, given by parameter, into the places of gradients, or NaN if a () flag is set."""


class Member(NamedTuple):
    """A group of a batch, whose gradients are complete."""

    group: GroupReducer
    ctx: Context
    used_here: Sequence[bool]
    """For each of its parameters: was it used on this rank? Empty where all are."""
    wait_for_gradients: Callable[[], None]
    """Lets the exchange wait for backward."""


class Reducer(Groups):
    """Exchanges the gradients of every synchronised backward, group by group.

    Args:
        parameters: by name.
        settings: checked choices.
        comm: the ranks; closed with the reducer.
        device: where gradients live.
        watch_usage: note which parameters took part in a backward. Needed where a backward may leave some out.
        loss_scale: () tensor that the loss is multiplied by, or None; asked in every backward.
        before_exchange: called on all ranks when the first gradients of a step are here; may call :meth:`adopt`.
        within: ranks that hold the other parts of what this rank holds; None: it holds all. They skip the same steps,
            and a norm is that of all parts. Closed with the reducer.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        settings: SparsificationConfig,
        comm: TorchCollective,
        device: torch.device,
        watch_usage: bool,
        loss_scale: Callable[[], Tensor | None],
        before_exchange: Callable[[], None],
        within: TorchCollective | None = None,
    ) -> None:
        super().__init__(parameters, settings, comm, device)
        self.within = within or TorchCollective.of_one()
        """Ranks that hold the other parts of what this rank holds; this one alone, where it holds all."""
        self.share = Share(within)
        self.clipping = GradientClipping(parameters)
        self.paused = False
        """True while gradients are left alone, which somebody else averages."""
        self.flush_asked = False
        """True if everything is sent in a step that has not begun yet."""
        self.flush_at: int | None = None
        """The step in which everything is sent; until it counts."""
        self.exposed_ms: Callable[[], float | None] = lambda: 0.0
        """Milliseconds that backward stood still in the latest step, if they are known; may wait for the device."""
        self.shared_bytes = 0.0
        """Bytes sent in the latest step for no single group: its header, and which parameters it used."""
        self.direct_bytes = ring_all_reduce_bytes(sum(own(p).nbytes for p in parameters.values()), comm.world_size)
        """Bytes that this rank sends where DDP averages everything by itself."""
        self.loss_scale, self._before_exchange = loss_scale, before_exchange
        self.networks = [comm] if within is None else [within, comm]
        """The ranks that have other parts, if there are any, and those that have the same: they reach all ranks."""
        # Ranks near each other, of which each may use other parameters, exchange the mean of their gradients.
        self._usage = Usage(parameters, comm) if watch_usage else None
        self._looking = refuse_sparse_gradients(parameters, self.failing_together)
        self._executor = make_executor(settings.executor, device, comm.world_size, self.on_stream.host_knows)
        self.overlaps_backward = not self.on_stream.host_knows or self._executor.threaded
        """True if exchanges go on beside backward: on a stream or a thread of their own."""
        self._begun = self._flushes = False
        self._held_up_before = 0.0
        """:attr:`held_up_seconds` when the step began."""
        self._limits: Sequence[Limit] = ()
        """Of this step, see :meth:`.GradientClipping.begin_step`; gradients of a batch are clipped together."""
        self._members: list[Member] = []
        """Of the next batch."""
        self._started: list[tuple[GroupReducer, Steps[None], Stamp]] = []
        """Groups whose local work is done, and the rest of their steps; touched by the executor only."""
        self._scale: Tensor | None = None
        """() factor of the loss of this step; None: none."""
        self._headers: Tensor | None = None
        """Headers of all ranks in this step; None if it had none."""

    @property
    def held_up_seconds(self) -> float:
        """Time for which the host stood still inside backward so far; 0 on devices, where streams wait instead."""
        return self._executor.blocked_seconds if self.on_stream.host_knows else 0.0

    @property
    def known_counts(self) -> Counts:
        """Exchanges of which the host has heard whether they counted; does not wait for a device."""
        unheard = self.skipped.decision is not None and not self.on_stream.host_knows
        return self.record.start if unheard else self.record.counts

    @property
    def header(self) -> Header:
        """Facts of this step that must be equal on all ranks that exchange."""
        return Header(self._number, self._flushes, self._digest)

    def begin_step(self) -> None:
        """Begin a step with the first gradients of a backward; nothing, where it has begun."""
        if self._begun:
            return
        self._begun, self._held_up_before = True, self.held_up_seconds
        self.skipped.begin_step()
        self._number = self.record.counts.step
        with self.record.changing():
            self.record.drop_applied()
            self.lengths.begin_step()
            overflow = not self.on_stream.host_knows and bool(self.record.decision)
            for group in self.groups if overflow else ():  # nobody could wait for the decision before
                forget_overflow_(group.state, group.memory, self.comm.world_size)
        self._before_exchange()
        self._scale = self.loss_scale()
        self._limits = self.clipping.begin_step(lambda: self.sparsified)  # when its groups are known
        self.shared_bytes, self._headers = 0.0, None
        if self.flush_asked:  # looked at once, so that all groups of the step do the same
            self.flush_at, self.flush_asked = self._number, False
        self._flushes = self.flush_at == self._number

    def arrive(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Take gradients of a backward; groups whose last one has come begin to work, now or on the thread.

        Args:
            gradients: (numel,) gradients by name of the parameter. Their place is the engine's until :meth:`finish`
                returns; averages take it.
        """
        self.begin_step()
        named = dict(gradients)
        for name, piece in named.items():
            self.group_of[name].arrived[name] = piece
        for group in dict.fromkeys(self.group_of[name] for name in named):
            if group.complete:
                self._submit(group)

    def submit(self, job: Callable[[], None], where: str) -> None:
        """Let a job of a source run behind all that was submitted before, and behind backward so far.

        Args:
            job: is run on the stream of groups, if there is one.
            where: says where in a step an error was raised.
        """
        wait_for_gradients = self.on_stream.ready()

        def run() -> None:
            with self.on_stream(), self.failing_together(where):
                wait_for_gradients()
                job()

        self._executor.submit(run)

    def finish(self, gradients: Iterable[tuple[str, Tensor]], deliver: Deliver | None = None) -> None:
        """Take the last gradients of a backward; averages are in their places when this returns.

        Signals wait while the last jobs of the step are submitted: a handler may wait for the step to settle then, as
        it has on another rank.

        Args:
            gradients: as of :meth:`arrive`.
            deliver: puts averages into the places of gradients when the exchange has settled; None: they are there.
        """
        with held():
            begin = Stamp.now(self.device)
            self.arrive(gradients)
            incomplete = [g.plan.name for g in self.groups if g.arrived and not g.complete]
            assert not incomplete, f"only some gradients of the groups {incomplete} have arrived"
            if self.messages == "step":
                # Where all is dense, there is one sum, and nothing that a header could travel with.
                self._send(None if self._all_dense else self.header)
            if self._usage is not None:
                self._usage.end_step()
            self._begun = False
            self._executor.submit(partial(self._settle, deliver))
        self._executor.drain()
        self._measure(begin)
        for group in self.groups:
            group.end_step()

    @property
    def busy(self) -> bool:
        """True within a backward, and between several ones of which one step is made."""
        return any(group.arrived for group in self.groups)

    @property
    def left_to_ddp(self) -> bool:
        """True if DDP averages gradients by itself."""
        return self.direct

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the () norm of gradients, which are averages already."""
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def put_together(self, own: Sequence[Averages]) -> Sequence[Averages]:
        """Return averages as optimizers get them: as they are."""
        return own

    def pass_by(self, averages: Sequence[tuple[Future[Tensor], Tensor]]) -> None:
        """Note that the source averages all gradients by itself.

        Args:
            averages: buffers, and the futures that end when they hold averages.
        """
        skipped = None
        if self.loss_scale() is None:  # else a scaler looks
            for average, _ in averages:
                average.wait()
            skipped = self._anywhere_within(~torch.stack([all_finite(buffer) for _, buffer in averages]).all())
        names = {name for name, p in self.parameters.items() if p.numel()}
        stream = None if self.on_stream.host_knows else torch.cuda.current_stream(self.device)
        decision = Decision(skipped, stream, self.comm.wait_until)
        self._hand_over(decision, dict.fromkeys(names))
        self.totals.add(self.direct_bytes, self.direct_bytes)
        self.exposed_ms = lambda: None
        if self._usage is not None:
            self._usage.end_step()
        self._begun = False

    @contextmanager
    def failing_together(self, where: str) -> Iterator[None]:
        """Let an error on this rank end the exchange for all: the others must not wait for it.

        It gets a note, but for one that has one.
        """
        try:
            yield
        except Exception as error:
            if not any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
                error.add_note(f"{NOTE}{where}, step {self._number}, rank {self.rank}")
            for comm in {*self.networks, *([] if self._usage is None else [self._usage.comm])}:
                comm.abort()
            raise

    @property
    def rank(self) -> int:
        """Number of this rank among all, also those that have other parts, which follow one another."""
        return self.comm.rank * self.within.world_size + self.within.rank

    def _anywhere_within(self, flag: Tensor) -> Tensor:
        """Return the () flag that is set if that of a rank is which has another part."""
        return flag if self.within.world_size == 1 else self.within.all_reduce(flag.float()) > 0

    def _norm_of(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the () norm of gradients, given the pieces that this rank has of them."""
        norm = joint_norm(pieces) if pieces else torch.zeros((), dtype=torch.float64, device=self.device)
        return norm if self.within.world_size == 1 else self.within.all_reduce(norm.square()).sqrt()

    def _submit(self, group: GroupReducer) -> None:
        """Let a group travel with the next batch, now that all its gradients are here."""
        step, density = self._number, group.density(self._number)
        ctx = Context(step, density, self.comm.rank, self.comm.world_size, model_numel=self._model_numel)
        if group.memory.reads_parameters:
            places = [(span, self._exchanged(name)) for name, span in group.spans.items()]
            ctx = ctx._replace(parameters=places)
        if self.rates.surplus:
            numels = {p.name: p.numel for p in group.plan.parameters}
            ctx = ctx._replace(surplus=self.rates.surplus_of(numels, step, density))
        used_here = [] if self._usage is None else self._usage.here(group.spans)
        member = Member(group, ctx, used_here, self.on_stream.ready())
        self._members.append(member)
        if not self._waits:
            self._executor.submit(partial(self._start, member))
        if self.messages == "group":
            self._send()

    def _exchanged(self, name: str) -> Tensor:
        """Return the coordinates of a parameter that this rank exchanges, with as many dimensions as it has."""
        return own(self.parameters[name]).detach()

    @property
    def _waits(self) -> bool:
        """True if local work begins when the gradients of the whole batch are here."""
        return self._usage is not None or bool(self._limits)

    def _send(self, header: Header | None = None) -> None:
        """Let the batch be exchanged, now or on the thread."""
        members, self._members = self._members, []
        if members:
            self._executor.submit(partial(self._exchange, members, header))

    def _start(self, member: Member, unused: Set[str] = frozenset()) -> None:
        """Do the local work of a group."""
        with self.on_stream():
            steps = started(self._steps_of(member, unused))
            self._started.append((member.group, steps, Stamp.now(self.device)))

    def _steps_of(self, member: Member, unused: Set[str]) -> Steps[None]:
        group, ctx, _, wait_for_gradients = member
        with self.failing_together(f"in the exchange of group {group.plan.name!r}"):
            wait_for_gradients()
            flush = self._flushes and group.sparsified  # others send all anyway, and their own step counts as sent
            yield from group.exchange_steps(ctx, unused, self._scale, flush, self._absorbing)

    @contextmanager
    def _absorbing(self, names: Set[str]) -> Iterator[None]:
        """Let gradients of these parameters be absorbed in this context."""
        with self.record.changing():
            self.record.absorb(names)
            yield

    def _exchange(self, members: Sequence[Member], header: Header | None) -> None:
        """Exchange a batch; with a header, if one is given."""
        names = [repr(member.group.plan.name) for member in members]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        where = f"in the exchange of group{'s' if len(names) > 1 else ''} {', '.join(names[:SHOWN])}{more}"
        with self.on_stream(), self.failing_together(where):
            if self._waits:
                unused = self._ask(members)
                self._clip(members, unused)
                for member in members:
                    self._start(member, unused & member.group.spans.keys())
            batch, self._started = self._started, []
            resumed = Stamp.now(self.device)
            steps: list[Steps[Any]] = [each for _, each, _ in batch]
            if header is None:
                drive_together(steps, self.comm)
            else:  # first, so that its words come first
                self._headers, *_ = drive_together([header.compare(self.device), *steps], self.comm)
                self.shared_bytes += AllGather(self._headers[0]).bytes_sent(self.comm.world_size)
        for group, _, paused in batch if len(batch) > 1 else ():
            group.note_pause(paused, resumed)

    def _ask(self, members: Sequence[Member]) -> Set[str]:
        """Return the parameters that no rank used; asks only where a backward may leave some out."""
        if self._usage is None:
            return frozenset()
        names = [name for member in members for name in member.group.spans]
        unused, sent = self._usage.nowhere(names, [here for member in members for here in member.used_here])
        self.shared_bytes += sent
        return unused

    def _clip(self, members: Sequence[Member], unused: Set[str]) -> None:
        """Clip this rank's gradients of a batch together."""
        for member in members if self._limits else ():
            member.wait_for_gradients()
        for clipping, names, _ in self._limits:
            numel = sum((span := self.group_of[name].spans[name]).stop - span.start for name in names)
            arrived = [  # not in the order of arrival, which changes after DDP's first step, and norms with it
                (name, group.arrived[name])
                for group in (member.group for member in members)
                for name in group.spans
                if name in names and name in group.arrived
            ]
            share = sum(piece.numel() for _, piece in arrived) / numel if numel else 1.0
            used = [piece for name, piece in arrived if name not in unused]
            clipping.apply_(used, self.comm.world_size, share, self._scale, self._norm_of)

    def _settle(self, deliver: Deliver | None) -> None:
        """Take what was sent out of the residuals, if the step counts, now that all groups have been exchanged.

        A gradient that is not finite is so on all ranks by now, so that nothing is sent.

        Args:
            deliver: see :meth:`finish`; None: NaN takes the place of gradients here, if the step is skipped.
        """
        with self.on_stream(), self.failing_together("in settling the step"):
            skips = [group.skipped for group in self.groups if group.skipped is not None]
            skipped = self._anywhere_within(any_set(skips, self.device, self.on_stream.host_knows))
            if deliver is None and (not self.on_stream.host_knows or skipped):
                used = (group.arrived[name] for group in self.groups for name in group.arrived.keys() - group.unused)
                fill_nan_(used, skipped)
            decision = Decision(skipped, self.on_stream.stream, self.comm.wait_until, self._headers)
            with self.record.changing():
                averages = {name: each for group in self.groups for name, each in group.averages.items()}
                for group in self.groups:
                    group.settle(skipped)
                self._hand_over(decision, averages)
        if deliver is not None:
            with self.on_stream(), self.failing_together("in handing averages over"):
                deliver(averages, skipped)

    def _hand_over(self, decision: Decision, averages: Mapping[str, Averages | None]) -> None:
        """Count an exchange that has settled, and let optimizers apply its averages, given by parameter."""
        with self.record.changing():
            self.record.settle(decision, averages)
        self.skipped.resolve()
        self.skipped.note(decision, averages.keys())
        self.clipping.hand_over(averages.keys())

    def _measure(self, begin: Stamp) -> None:
        """Count the bytes of a step, and the time for which it held backward up since the last bucket came.

        Groups that ran inside earlier hooks held it up, too.
        """
        ran = [group.statistics for group in self.groups if group.ran and group.statistics is not None]
        sent = sum(statistics.bytes_sent for statistics in ran) + self.shared_bytes
        self.totals.add(sent, sum(statistics.dense_bytes for statistics in ran))
        with self.on_stream():
            end = Stamp.now(self.device)
        if self.on_stream.host_knows:
            begin, end = Stamp(self._held_up_before, None), Stamp(self.held_up_seconds, None)
        self.totals.expose(begin, end)
        self.exposed_ms = lambda: max(0.0, begin.until(end))

    def pending(self) -> dict[str, tuple[Tensor | None, Tensor]]:
        """See :meth:`.Record.pending`."""
        return self.record.pending()

    def wait_for(self, number: int) -> None:
        """Return when so many exchanges have settled here, as they have on another rank, or can on all.

        A signal handler may have come in between, on the thread that waits for the exchange.

        Raises:
            RuntimeError: if that does not come.
        """
        deadline = time.monotonic() + PATIENCE
        while self.record.counts.number < number:
            if not self._executor.threaded or self._executor.error or time.monotonic() > deadline:
                raise RuntimeError(
                    f"Another rank has settled exchange {number}, and this one has only settled "
                    f"{self.record.counts.number}. Save a moment later."
                )
            time.sleep(0.001)

    def close(self) -> None:
        """Stop the communication thread, give the process group back, stop looking at parameters and optimizers."""
        self.skipped.close()
        self._executor.close()
        self.record.close()
        for handle in self._looking:
            handle.remove()
        if self._usage is not None:
            self._usage.close()
        self.within.close()
        self.comm.close()
