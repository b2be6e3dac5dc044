"""One step of all groups: gradients arrive from a source, groups exchange them, and the step is settled.

A source (:mod:`lightning_sparse.engine.sources`) hands over gradients by name of the parameter. A group begins to work
as soon as its last gradient has arrived. Its messages travel with those of the other groups, or by themselves. When all
groups have been exchanged, what they have sent leaves the residuals, unless a gradient of any of them was not finite on
any rank. *When and where* groups run is up to an executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.config import SparsificationConfig
from lightning_sparse.core.clock import Stamp, Totals
from lightning_sparse.core.interrupts import held
from lightning_sparse.core.step import Agreement, Context
from lightning_sparse.engine.batch import Batches
from lightning_sparse.engine.executor import ExchangeStream, Inline, make_executor
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.header import Header, digest_of
from lightning_sparse.engine.network import TorchCollective, ring_all_reduce_bytes
from lightning_sparse.engine.optimizers.clipping import GradientClipping
from lightning_sparse.engine.optimizers.learning_rates import LearningRates
from lightning_sparse.engine.optimizers.scaled import Lengths
from lightning_sparse.engine.skip import Decision, SkippedSteps, any_set
from lightning_sparse.engine.sources.gradient_hooks import SparseGradients, Usage
from lightning_sparse.engine.state.record import Averages, Counts, Record
from lightning_sparse.methods.grouping import Group, Messages
from lightning_sparse.methods.memory import Memory

NOTE = "sparse_ddp: "
"""Begins the note that says where an error was raised."""
Mark = Callable[[Tensor, Set[str]], None]
"""Puts NaN into the gradients of a step if () a flag is set, but for those of parameters that no rank used."""
PATIENCE = 30.0
"""Seconds that a state waits for an exchange that another rank has concluded already."""


class Reducer:
    """Exchanges the gradients of every synchronised backward, group by group.

    Args:
        parameters: by name.
        settings: checked choices.
        comm: the ranks; closed with the reducer.
        device: where gradients live.
        watch_usage: note which parameters took part in a backward. Needed where a backward may leave some out.
        loss_scale: () tensor that the loss is multiplied by, or None; asked in every backward.
        before_exchange: called on all ranks when the first gradients of a step are here; may call :meth:`adopt`.
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
    ) -> None:
        names = {id(p): name for name, p in parameters.items()}
        self.groups: list[GroupReducer] = []
        self.group_of: dict[str, GroupReducer] = {}
        """The group of each parameter, by name."""
        self.adoptions = 0
        """How often groups took the place of others."""
        self.direct = False
        """Whether buckets are averaged just as DDP does, past the groups."""
        self.clipping = GradientClipping(parameters)
        self.lengths = Lengths()
        """Of averages, as optimizers got them."""
        self.flush_asked = False
        """Whether everything is sent in a step that has not begun yet."""
        self.flush_at: int | None = None
        """The step in which everything is sent; until it counts."""
        self.rates = LearningRates(names)
        self.record = Record(parameters, names)
        self.skipped = SkippedSteps(names)
        self.on_stream = ExchangeStream(device)
        self.exposed_ms: Callable[[], float] = lambda: 0.0
        """Milliseconds that backward stood still in the latest step; may wait for the device."""
        self.totals = Totals()
        """What was sent in all steps so far."""
        self._parameters, self._names = parameters, names
        self.settings, self._comm, self._device = settings, comm, device
        self._loss_scale, self._before_exchange = loss_scale, before_exchange
        self._usage = Usage(parameters, comm) if watch_usage else None
        self._sparse_gradients = SparseGradients(parameters, lambda: self.failing_together("in backward"))
        self._executor = make_executor(settings.executor, device, comm.world_size, self.on_stream.host_knows)
        self._batches = Batches(
            comm, self._usage, self._executor, self.on_stream, device, self.failing_together, self._absorbing
        )
        self.messages: Messages = "group" if settings.messages == "group" else "step"
        """What travels together."""
        self._begun = self._flushes = False
        self._model_bytes = sum(p.nbytes for p in parameters.values())
        self._number = 0
        """Number of the step that is running, or of the next one."""
        self._held_up_before = 0.0

    @property
    def step(self) -> int:
        """Exchanges so far that counted; may wait for the device."""
        return self.record.counts.step

    @property
    def held_up_seconds(self) -> float:
        """How long the host stood still inside backward so far, on a CPU; 0 on devices, where streams wait instead."""
        return self._held_up_before + self._executor.blocked_seconds if self.on_stream.host_knows else 0.0

    @property
    def shared_bytes(self) -> float:
        """Bytes sent in the latest step for no single group: its header, and which parameters it used."""
        return self._batches.shared_bytes

    @property
    def overlaps_backward(self) -> bool:
        """Whether exchanges go on beside backward: on a stream or a thread of their own."""
        return not self.on_stream.host_knows or not isinstance(self._executor, Inline)

    def form(
        self,
        group: Group,
        flush: bool = False,
        step: int | None = None,
        settings: SparsificationConfig | None = None,
    ) -> GroupReducer:
        """A group with nothing remembered.

        Args:
            group: of the plan.
            flush: whether it must be able to send what it will remember.
            step: at which it starts; None: the current one.
            settings: that it will have; None: the current ones.
        """
        step, settings = self.step if step is None else step, settings or self.settings
        density = group.density or settings.density(step)
        ctx = Context(step, density, self._comm.rank, self._comm.world_size)
        return GroupReducer(group, self._parameters, settings, ctx, flush)

    def prepare(self) -> None:
        """Compile what steps of the groups will need, before the first of them."""
        for group in self.groups:
            group.prepare(Context(0, 1.0, self._comm.rank, self._comm.world_size))

    def adopt(self, groups: list[GroupReducer], counts: Counts) -> None:
        """Go on with these groups, between two steps."""
        self.skipped.resolve()
        with self.record.changing():
            self.direct = False
            self.record.restart(counts)
            self.groups = groups
            self.group_of = {p.name: group for group in groups for p in group.plan.parameters}
        self._number = counts.step
        self.adoptions += 1
        self._model_numel = sum(g.plan.numel for g in groups if not g.plan.dense) or None
        self._digest_of_plan = digest_of([group.plan for group in groups])
        self._digest = digest_of(self.settings, self._digest_of_plan)
        self._all_dense = all(group.sparsifier.agreement is Agreement.EVERYTHING for group in groups)

    def regroup(self, plan: Sequence[Group], messages: Messages, direct: bool = False, for_good: bool = False) -> None:
        """Go on with other groups of the same parameters, and what is remembered of these; between two steps.

        Args:
            plan: the groups.
            messages: what travels together.
            direct: average buckets past the groups, which keep nothing then but what is remembered.
            for_good: of groups in which nothing waits, forget what else is remembered where the new ones have no use
                for it.
        """
        groups = []
        with self.on_stream.between_steps():
            for group in plan:
                before = {p.name: self.group_of[p.name] for p in group.parameters}
                flush = any(old.waits if for_good else old.remembers for old in before.values())
                running = self.form(group, flush)
                for name, old in before.items():
                    running.carry(name, old)
                if direct:
                    running.rest()
                groups.append(running)
        self.adopt(groups, self.record.counts)
        self.messages, self.direct = messages, direct

    def remember_by(self, settings: SparsificationConfig) -> None:
        """Go on with settings that differ in the memory; between two steps."""
        self.settings = settings
        self.regroup([group.plan for group in self.groups], self.messages)

    def adapt(self, memory: Memory) -> None:
        """Go on with a memory of the same kind that has other settings, in a step that has just begun."""
        self.settings = replace(self.settings, memory=memory)
        self._digest = digest_of(self.settings, self._digest_of_plan)
        with self.record.changing(), self.on_stream.between_steps():
            for group in self.groups:
                if group.memory.needs_second:
                    group.adapt(memory)

    def arrive(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Take gradients of a backward; groups whose last one has come begin to work, now or on the thread.

        Args:
            gradients: (numel,) gradients by name of the parameter. Their place is the engine's until :meth:`finish`
                returns; averages take it.
        """
        self.begin_step()
        named = dict(gradients)
        for name, piece in named.items():
            self.group_of[name].receive(name, piece)
        for group in dict.fromkeys(self.group_of[name] for name in named):
            if group.complete:
                self._submit(group)

    def finish(self, gradients: Iterable[tuple[str, Tensor]], mark: Mark, late: bool = False) -> None:
        """Take the last gradients of a backward; averages are in their places when this returns.

        Signals wait while the last jobs of the step are submitted: a handler may wait for the step to settle then, as
        it has on another rank.

        Args:
            gradients: as of :meth:`arrive`.
            mark: is called when all groups have been exchanged and the step may be skipped: puts NaN into gradients.
            late: whether optimizers get the averages later, when :meth:`hand_over` is called.
        """
        with held():
            begin = Stamp.now(self._device)
            self.arrive(gradients)
            self._send_last(mark, late)
        self._executor.drain()
        self.exposed_ms = self._measure_exposed(begin)
        self._count()
        self._end_step()

    def hand_over(self) -> None:
        """Let optimizers apply the averages of the oldest step that was finished late: they are in ``.grad`` now."""
        with self.record.changing():
            decision, names = self.record.hand_over()
        self.skipped.note(decision, names)

    @property
    def unused(self) -> Set[str]:
        """Names of the parameters that no rank used in the latest backward."""
        return {name for group in self.groups for name in group.untouched}

    def pass_by(self, names: Set[str], skipped: Tensor | None) -> None:
        """Note that the source has averaged all gradients by itself.

        Args:
            names: of the parameters.
            skipped: () whether the step counts for nothing; None: it counts.
        """
        stream = None if self.on_stream.host_knows else torch.cuda.current_stream(self._device)
        decision = Decision(skipped, stream, self._comm.wait_until)
        self.record.settle(decision, names, [])
        self.skipped.note(decision, names)
        self.totals.add(self.direct_bytes, self.direct_bytes)
        self._end_step()

    def begin_step(self) -> None:
        """Begin a step with the first gradients of a backward; nothing, where it has begun."""
        if self._begun:
            return
        self._begun = True
        self.skipped.begin_step()
        self._number = self.step
        with self.record.changing():
            self.record.begin_step()
            self.lengths.begin_step()
            overflow = not self.on_stream.host_knows and self.record.void
            for group in self.groups if overflow else ():
                group.forget_overflow(self._comm.world_size)
        self._before_exchange()
        self._batches.begin_step(self.clipping.begin_step(lambda: self.sparsified))  # when its groups are known
        if self.flush_asked:  # looked at once, so that all groups of the step do the same
            self.flush_at, self.flush_asked = self.step, False
        self._flushes = self.flush_at == self.step

    @property
    def sparsified(self) -> set[str]:
        """Names of the parameters that are not always sent as a whole."""
        return {name for group in self.groups if group.sparsified and not group.always_whole for name in group.spans}

    def rescale(self) -> None:
        """Let residuals stand for the same steps when learning rates have changed."""
        if not self.rates.known:
            raise RuntimeError("lr_aware=True needs the optimizers: call engine.bind([optimizer]) before training.")
        with self.record.changing(), self.on_stream.between_steps():
            factors = self.rates.factors()
            densities = {name: self.group_of[name].density(self.step) for name in factors}
            self.rates.change(factors, self.step, densities)
            for group in self.groups:
                group.scale(factors)

    def _submit(self, group: GroupReducer) -> None:
        """All gradients of a group are here: let it begin, now or on the thread."""
        density = group.density(self.step)
        ctx = Context(
            step=self.step,
            density=density,
            rank=self._comm.rank,
            world_size=self._comm.world_size,
            model_numel=self._model_numel,
            parameters=self._parameters_of(group) if self.settings.memory_in_use.reads_parameters else None,
            surplus=self.rates.surplus_of({p.name: p.numel for p in group.plan.parameters}, self.step, density),
        )
        self._batches.add(group, ctx, self._loss_scale(), self._flushes)
        if self.messages == "group":
            self._batches.send()

    @contextmanager
    def failing_together(self, where: str) -> Iterator[None]:
        """An error on this rank ends the exchange for all: the others must not wait for it.

        It gets a note, but for one that has one.
        """
        try:
            yield
        except Exception as error:
            if not any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
                error.add_note(f"{NOTE}{where}, step {self._number}, rank {self._comm.rank}")
            for comm in {self._comm, self._comm if self._usage is None else self._usage.comm}:
                comm.abort()
            raise

    @contextmanager
    def _absorbing(self, names: Set[str]) -> Iterator[None]:
        """Gradients of these parameters are absorbed in this context."""
        with self.record.changing():
            self.record.absorb(names)
            yield

    def _parameters_of(self, group: GroupReducer) -> list[tuple[slice, Tensor]]:
        return [(span, self._parameters[name].detach()) for name, span in group.spans.items()]

    def _send_last(self, mark: Mark, late: bool) -> None:
        """Send what has not been sent, and settle when it is exchanged."""
        incomplete = [g.plan.name for g in self.groups if g.arrived and not g.complete]
        assert not incomplete, f"only some gradients of the groups {incomplete} have arrived"
        if self.messages == "step":
            # Where all is dense, there is one sum, and nothing that a header could travel with.
            self._batches.send(None if self._all_dense else Header(self.step, self._flushes, self._digest))
        self._executor.submit(partial(self._settle, mark, late))

    def _count(self) -> None:
        ran = [group.statistics for group in self.groups if group.ran and group.statistics is not None]
        sent = sum(statistics.bytes_sent for statistics in ran) + self.shared_bytes
        self.totals.add(sent, sum(statistics.dense_bytes for statistics in ran))

    def _settle(self, mark: Mark, late: bool) -> None:
        """All groups have been exchanged: does the step count? Then residuals lose what was sent.

        A gradient that is not finite is so on all ranks by now, so that nothing is sent.
        """
        with self.on_stream(), self.failing_together("in settling the step"):
            skipped = self._any_not_finite()
            unused = self.unused
            if not self.on_stream.host_knows or skipped:
                mark(skipped, unused)
            # On a device, with nonfinite="nan" and without a loss scale, nobody asks.
            asked = self.on_stream.host_knows or self.settings.nonfinite == "skip" or self._loss_scale() is not None
            decision = Decision(
                skipped if asked else None, self.on_stream.stream, self._comm.wait_until, self._batches.headers
            )
            names = {name for group in self.groups for name in group.arrived} - unused
            with self.record.changing():
                averages = [made for group in self.groups if (made := _averages_of(group)) is not None]
                for group in self.groups:
                    group.settle(skipped)
                self.record.settle(decision, names, averages, late)
            if not late:
                self.skipped.note(decision, names)

    @property
    def looks_at_averages(self) -> bool:
        """True if it is the engine that has to see whether averages of a source's own are finite."""
        return self.settings.nonfinite == "skip" and self._loss_scale() is None

    @property
    def direct_bytes(self) -> float:
        """What this rank sends where DDP averages everything by itself."""
        return ring_all_reduce_bytes(self._model_bytes, self._comm.world_size)

    def _any_not_finite(self) -> Tensor:
        """() whether a gradient of any group was not finite on some rank; equal on all ranks."""
        flags = [group.void for group in self.groups if group.void is not None]
        return any_set(flags, self._device, self.on_stream.host_knows)

    def _end_step(self) -> None:
        self._begun = False
        self._sparse_gradients.close()
        for group in self.groups:
            group.end_step()
        if self._usage is not None:
            self._usage.end_step()

    def _measure_exposed(self, begin: Stamp) -> Callable[[], float]:
        """Time since the last bucket came; groups that ran inside earlier hooks held backward up, too."""
        if self.on_stream.host_knows:
            inline = self._executor.blocked_seconds
            self._held_up_before += inline
            self._executor.blocked_seconds = 0.0
            self.totals.expose(Stamp(0.0, None), Stamp(inline, None))
            return lambda: 1e3 * inline
        with self.on_stream():
            end = Stamp.now(self._device)
        self.totals.expose(begin, end)
        return lambda: max(0.0, begin.until(end))

    def wait_for(self, number: int) -> None:
        """Return when so many exchanges have settled here, as they have on another rank.

        A signal handler may have come in between, on the thread that waits for the exchange.

        Raises:
            RuntimeError: if that does not come.
        """
        deadline = time.monotonic() + PATIENCE
        while self.record.counts.number < number:
            if isinstance(self._executor, Inline) or self._executor.failed or time.monotonic() > deadline:
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
        self._sparse_gradients.close()
        if self._usage is not None:
            self._usage.close()
        self._comm.close()


def _averages_of(group: GroupReducer) -> Averages | None:
    """The averages of a group that its residual can take back; None: it has none, or was not exchanged."""
    made = group.exchange_made
    if made is None or group.memory.residual(group.state.memory) is None:
        return None
    update = made.proposed.update
    return Averages(group.spans, update.indices, update.values)
