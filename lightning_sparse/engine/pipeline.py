"""One group: its state, and the journey of its gradient: absorb, select, exchange, scatter; settle, if the step counts.

Everything between ranks is a message that a coroutine yields; :mod:`drivers <lightning_sparse.engine.network>` send it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.core.checks import expect
from lightning_sparse.core.console import say
from lightning_sparse.core.layout import Gradient, InRuns, fills_memory, flattened, rates_at, sum_dtype
from lightning_sparse.core.messages import Meter, Steps, together
from lightning_sparse.core.step import Absorbed, Agreement, Candidates, Context, GroupState, Selection, Update
from lightning_sparse.engine.average import Average, bounds_of, scatter_average_
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.diversity import Diversity, squares_of
from lightning_sparse.engine.metrics import Stamp, Statistics, measure, norm_of
from lightning_sparse.engine.network import drive_mirrored
from lightning_sparse.methods.density import Constant, count
from lightning_sparse.methods.exchanges import Dense, Exchange
from lightning_sparse.methods.grouping import Group
from lightning_sparse.methods.memory import Drift, Memory
from lightning_sparse.methods.sparsifiers import Everything, Sparsifier
from lightning_sparse.ops import all_finite, on_device, static_shapes
from lightning_sparse.ops.on_cuda import on_cuda
from lightning_sparse.ops.reference import as_gradient

EVERYTHING, DENSE = Everything(), Dense()
"""The sparsifier and the exchange where everything is sent."""
MANY = 1 << 20
"""Coordinates of which any density below 1 leaves out some."""
REHEARSED = 4096, 0.25
"""Coordinates and density of steps that :func:`rehearse` takes."""


class Proposed(NamedTuple):
    """A step of a group that has been exchanged, and is not settled yet."""

    update: Update
    rounding: Tensor | None
    """(u,) what casting the average to the gradient's dtype lost; None: nothing."""
    after: GroupState
    """The state that a step that counts leaves; its memory is the group's own, which has not been settled."""
    statistics: Statistics
    skipped: Tensor
    """() bool: whether something was not finite on any rank."""
    handed: Tensor
    """(u,) what gradients got, in their dtype, free of the scale of a loss; the update is in units of the residual."""
    divisor: Tensor | None = None
    """(u,) what averages are divided by, see :meth:`~lightning_sparse.methods.memory.Memory.divisors`."""


def init_group(
    numel: int, dtype: torch.dtype, device: torch.device, ctx: Context, *, memory: Memory, sparsifier: Sparsifier
) -> GroupState:
    """State of a group before its first step. The accumulator has the gradient's dtype, but at least float32.

    Raises:
        ValueError: if the group is empty or has 2**31 - 1 coordinates or more (indices travel as 32-bit words), if the
            density is outside (0, 1], or if the sparsifier cannot serve the group.
    """
    if not 0 < numel < 2**31 - 1:
        raise ValueError(
            f"Expected a group of 1 to {2**31 - 2} coordinates, but got {numel}. Use a finer grouping such as 'bucket'."
        )
    count(ctx.density, numel)  # refuses what a schedule may give that is no density
    wide = sum_dtype(dtype)
    selector = sparsifier.init(numel, ctx.world_size, ctx.density, device)
    return GroupState(memory.init(numel, device, wide), selector, None, candidates=Candidates())


def reduce_group(
    grad: Tensor | Gradient,
    state: GroupState,
    ctx: Context,
    *,
    memory: Memory,
    sparsifier: Sparsifier,
    exchange: Exchange,
) -> Steps[tuple[GroupState, Statistics]]:
    """Replace a group's gradient on this rank by the sparsified average over all ranks.

    Nothing is lost: ``n * update + sum_i residual_i(after) = sum_i (residual_i(before) + gradient_i)`` for every
    coordinate. If a gradient is not finite on any rank, the step is skipped on all: the gradient becomes NaN
    everywhere, selector and counts stay as they were, and finite coordinates wait in the residuals.

    This is :func:`exchange_group`, which has the same arguments, and :func:`settle_group`, where no other group has a
    say in whether the step counts.

    Returns:
        A coroutine that ends with the next state and statistics.
    """
    proposed = yield from exchange_group(grad, state, ctx, memory=memory, sparsifier=sparsifier, exchange=exchange)
    return settle_group(state, proposed, bool(proposed.skipped), memory), proposed.statistics


def exchange_group(
    grad: Tensor | Gradient,
    state: GroupState,
    ctx: Context,
    *,
    memory: Memory,
    sparsifier: Sparsifier,
    exchange: Exchange,
    scale: Tensor | None = None,
    unused: Sequence[slice] = (),
    flush: bool = False,
    anew: bool = False,
    changing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Steps[Proposed]:
    """Absorb a group's gradient and exchange; :func:`settle_group` follows if the step counts.

    At a density of 1, and where it is flushed, the group is exchanged as DDP does it: whatever the sparsifier and the
    exchange are, they are not asked and learn nothing.

    Args:
        grad: (numel,) of this rank, overwritten with the average.
        state: of this group on this rank. Its memory absorbs the gradient, but for coordinates that are not finite.
        ctx: the step; ``counts``, ``union`` and ``disjoint`` are filled in here.
        memory: error feedback.
        sparsifier: selects coordinates.
        exchange: averages the selected values.
        scale: () factor that the loss was multiplied by; what is remembered is free of it, the average has it again.
        unused: coordinates of parameters that no rank used: nothing of them is absorbed or sent.
        flush: send everything, whatever the density is.
        anew: gradients are of other parameters than those before.
        changing: is entered while what is remembered changes; no message is sent meanwhile.

    Returns:
        A coroutine that ends with what the step would settle.
    """
    if isinstance(grad, Tensor):
        grad = Gradient([grad])
    agreement = Agreement.EVERYTHING if flush else sparsifier.agreement
    whole = flush or sends_everything(sparsifier, ctx.density, grad.numel)
    if whole:
        sparsifier, exchange = EVERYTHING, DENSE
    disjoint = sparsifier.agreement is Agreement.DISJOINT
    ctx = ctx._replace(counts=state.counts, union=state.union, told=state.told)
    ctx = ctx._replace(disjoint=disjoint, candidates=state.candidates)
    meter = Meter(ctx.world_size)
    begin = Stamp.now(grad.device)
    given = grad if scale is None else grad.unscaled(scale)
    with changing():
        kept = _kept(memory, state, unused) if unused else ()
        if anew:
            memory.measure_anew_(state.memory)
        absorbed = memory.absorb_(state.memory, given, ctx)
        for place, content in kept:
            place.copy_(content)
    acc, score = _offered(absorbed, unused, sparsifier.reads_runs)
    finite, second = absorbed.finite, absorbed.second
    static = static_shapes(grad.device)
    if static:  # a rank in trouble offers NaN, and nobody waits to know
        ctx = ctx._replace(finite=finite)
    elif not finite:  # it takes part in the survey like the others
        score = torch.zeros_like(acc[:-1])
        acc = torch.full_like(acc, float("nan"))
    selected = sparsifier.select(score, state.selector, ctx)
    if isinstance(selected, Generator):
        selected = yield from meter.watch(selected)
    selection, selector = selected
    ctx = ctx._replace(second=second)
    if state.candidates is not None:
        state.candidates.forget()
    del absorbed, given, score
    if static:  # scores of 16-bit gradients have a vector of their own, which other groups can take
        grad.rooms.clear()
    picked = Stamp.now(grad.device)
    if not exchange.tells_trouble if static else not finite:
        selection = _raise_alarm(acc, selection, finite)
    update = exchange(acc, selection, ctx)
    if isinstance(update, Generator):
        update = yield from meter.watch(update)
    divisor = memory.divisors(state.memory, update, ctx)
    average, rate = update.values, None
    if memory.reads_rates and ctx.rates:
        rate = rates_at(ctx.rates, update.indices, grad.numel, average)
        average = average / rate
    if memory.averages == "moves":  # settling takes weights there
        handed, rounding, skipped = average, None, ~_is_finite(average, update.indices, grad.numel)
    else:
        handed, rounding, skipped = hand_over_(grad, update.indices, average, scale, state.candidates)
    sent = handed
    if rate is not None:
        sent, rounding = handed * rate, None if rounding is None else rounding * rate
    stamps = begin, picked, Stamp.now(grad.device)
    statistics = measure(grad.dtype, grad.numel, agreement, selection, update, ctx, meter.bytes_sent, stamps)
    named = update.union if update.named is None else update.named
    after = state if whole else GroupState(state.memory, selector, update.counts, named, state.candidates)
    return Proposed(update._replace(values=sent), rounding, after, statistics, skipped, handed, divisor)


def rehearse(
    dtype: torch.dtype,
    device: torch.device,
    ctx: Context,
    memory: Memory,
    sparsifier: Sparsifier,
    exchange: Exchange,
    in_runs: bool = False,
) -> None:
    """Take small steps that count for nothing, so that kernels are compiled and compared before the first real one.

    The first time for some parts, a line says so.
    """
    example, what = torch.empty((), device=device), (dtype, device, repr((memory, sparsifier, exchange)), in_runs)
    if not on_cuda.takes(example) or on_cuda.knows(what):
        return
    if ctx.rank == 0:
        say(
            "sparse_ddp: kernels in Triton are compiled and tried, which takes up to a minute where they are not known "
            "from an earlier run."
        )

    def steps() -> None:
        parts: dict[str, Any] = {"memory": memory, "sparsifier": sparsifier}
        numel, density = REHEARSED
        weights = [(slice(0, numel), torch.zeros(numel, dtype=dtype, device=device))]
        small = ctx._replace(density=density, parameters=weights, rates=[(slice(0, numel), 0.5)])
        state = init_group(numel, dtype, device, small, **parts)
        for step, scale in enumerate((None, torch.full((), 2.0, dtype=torch.float32, device=device))):
            given = torch.arange(numel, device=device).to(dtype)
            grad = Gradient([half.clone() for half in given.tensor_split(2)] if in_runs else [given])
            one = exchange_group(grad, state, small._replace(step=step), **parts, exchange=exchange, scale=scale)
            proposed, _ = drive_mirrored(one, ctx.world_size)
            state = settle_group(state, proposed, False, memory)

    def attempt() -> None:
        with suppress(Exception):  # kernels of parts that take no small steps are compiled in their first real one
            steps()

    on_cuda.tried(what, attempt)


def sends_everything(sparsifier: Sparsifier, density: float, numel: int) -> bool:
    """Return whether a group is exchanged as DDP does it, because the density asks for all of its coordinates."""
    return sparsifier.follows_density and count(density, numel) == numel


def settle_group(
    state: GroupState, proposed: Proposed, skipped: bool, memory: Memory, unused: Sequence[slice] = ()
) -> GroupState:
    """Return the state after a step: what was sent leaves the memory, in place, unless the step is skipped.

    Args:
        state: the step began with it.
        proposed: the group's exchange.
        skipped: whether the step counts for nothing, equal on all ranks.
        memory: of the group.
        unused: coordinates of parameters that no rank used, as they were given to :func:`exchange_group`.
    """
    kept = _kept(memory, state, unused) if unused else ()
    if skipped:
        memory.skip_(state.memory)
    else:
        memory.settle_(state.memory, proposed.update, proposed.rounding)
    for place, content in kept:
        place.copy_(content)
    if skipped:
        forget_overflow_(state, memory, len(proposed.statistics.counts))
        return state
    return proposed.after


def forget_overflow_(state: GroupState, memory: Memory, world_size: int) -> None:
    """Forget residuals so large that their sum over ranks may not be finite, after a step that was skipped.

    All later steps would be skipped otherwise.
    """
    residual = memory.residual(state.memory)
    if residual is not None:
        residual.masked_fill_(residual.abs() > torch.finfo(residual.dtype).max / world_size, 0.0)


def _kept(memory: Memory, state: GroupState, unused: Sequence[slice]) -> list[tuple[Tensor, Tensor]]:
    """Return the places and copies of all that is remembered of unused parameters, which stays as it is."""
    vectors = memory.vectors(state.memory).values()
    return [(vector[span], vector[span].clone()) for vector in vectors for span in unused]


def _offered(absorbed: Absorbed, unused: Sequence[slice], in_runs: bool) -> tuple[Tensor, Any]:
    """Return the accumulator and the score that a step selects and sends from.

    Unused parameters must not compete for the density: they are zero in a copy of the accumulator, and in the score.
    The score is one vector, unless it may lie in runs.
    """
    acc, score = absorbed.acc, absorbed.score
    if unused:
        acc = acc.clone()
    for span in unused:
        acc[span].zero_()
        if score is not None:
            score[span].zero_()
    if isinstance(score, InRuns) and not in_runs:
        score = score.place.flat()
    return acc, acc[:-1] if score is None else score


def _raise_alarm(acc: Tensor, selection: Selection, finite: Tensor) -> Selection:
    """Where the gradient is not finite, offer NaN, at coordinate 0 if nothing was picked: all ranks then see it."""
    if static_shapes(acc.device):
        alone = ~finite & (selection.count == 0)
        selection.indices[:1].masked_fill_(alone, 0)
        if selection.spare is not None:
            selection.spare[:1].masked_fill_(alone, False)
        return selection._replace(count=selection.count + alone)
    if selection.count > 0:
        return selection
    indices = selection.indices if selection.indices.numel() else selection.indices.new_zeros(1)
    indices = torch.full_like(indices, acc.numel() - 1)
    indices[0] = 0
    spare = None if selection.spare is None else torch.zeros_like(indices, dtype=torch.bool)
    return selection._replace(indices=indices, count=torch.ones_like(selection.count), spare=spare)


def hand_over_(
    grad: Gradient, indices: Tensor | None, average: Tensor, scale: Tensor | None, candidates: Candidates | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Write an average to the gradient's place, in the gradient's dtype; NaN everywhere if it is not finite.

    Args:
        grad: of this rank.
        indices: see :class:`~lightning_sparse.core.step.Update`.
        average: (u,) in the accumulator's dtype.
        scale: () of the loss, which the gradient has again; None: none.
        candidates: which may have set the place to zero already.

    Returns:
        (u,) what the gradient got, without the scale; (u,) what its dtype has lost of it, None: nothing; and () whether
        the step is skipped.
    """
    if static_shapes(grad.device):
        cleared = candidates is not None and candidates.cleared(grad.runs)
        return on_device.hand_over_(grad.runs, indices, average, scale, cleared)
    values, handed, rounding, skipped = as_gradient(average, grad.dtype, scale)
    scatter_average_(grad, indices, values, candidates)
    for run in grad.runs if skipped else ():
        run.fill_(float("nan"))
    return handed, rounding, skipped


def _is_finite(average: Tensor, indices: Tensor | None, numel: int) -> Tensor:
    """Return () whether an average is finite, wherever its values count."""
    if indices is not None and static_shapes(average.device):
        average = average.masked_fill(indices == numel, 0.0)
    return all_finite(average)


class GroupReducer:
    """Exchanges the gradients of one group, and keeps its state."""

    def __init__(
        self,
        plan: Group,
        parameters: Mapping[str, Parameter],
        settings: SparsificationConfig,
        first: Context,
        flush: bool,
    ) -> None:
        self.plan = plan
        self.spans, self.numel = plan.offsets(), plan.numel
        self.density = settings.density if plan.density is None else Constant(plan.density)
        self.always_whole = self.density == Constant(1.0)
        """True if a density of 1 is all that this group will ever have."""
        # A group that becomes dense must be able to send what it remembers.
        memory = settings.memory_in_use
        if plan.dense and not flush:
            memory = memory.for_dense()
        elif self.always_whole:
            memory = memory.for_whole()
        self.memory: Memory = memory
        self.drift = memory if isinstance(memory, Drift) else None
        """The memory, if weights take the place of gradients."""
        self.sparsifier: Sparsifier = Everything() if plan.dense else settings.sparsifier
        self.sparsified = self.sparsifier.agreement is not Agreement.EVERYTHING
        """True if coordinates are selected, by plan, so that others wait."""
        self.exchange: Exchange = Dense() if plan.dense else settings.exchange_in_use
        selects_in_runs = self.sparsifier.reads_runs or not self.memory.needs_second
        self.in_runs = self.sparsified and self.memory.takes_runs and selects_in_runs
        """True if gradients are exchanged where they lie, also on a device."""
        example = parameters[plan.parameters[0].name]
        self.device, self.dtype = example.device, example.dtype
        self.wide = sum_dtype(self.dtype)
        """Dtype of what is remembered."""
        parts: dict[str, Any] = {"memory": self.memory, "sparsifier": self.sparsifier}
        if plan.numel:
            self.state = init_group(plan.numel, self.dtype, self.device, first, **parts)
            """State that survives a step; the memory's part changes in place."""
        else:  # ranks near this one exchange all of it
            self.state = GroupState(self.memory.init(0, self.device, self.wide), None, None)
        self.statistics: Statistics | None = None
        """Statistics of the last step that exchanged the group, which need not be the latest step, see :attr:`ran`."""
        self.diversity = Diversity()
        """Of the gradients, where second moments travel."""
        self.unused: set[str] = set()
        """Parameters that no rank used in the latest step."""
        self.turn = first.step
        """Exchanges of the group that counted: ranks take turns by it, however many others there are in between."""
        self.measured = 0.0
        """Of which parameters lengths are known, see :func:`composition`; 0: of none."""
        self._composed: tuple[Set[str], float] | None = None
        """The same of a step that left some parameters out, and these."""
        self.bounds = bounds_of(self.spans, self.device)
        self._like = torch.empty((), dtype=self.wide, device=self.device)
        self._copies: Gradient | None = None
        """Weights of this rank that are exchanged, where they lie in several runs and are exchanged as one."""
        self.place: Tensor | None = None
        """(numel,) vector that holds the gradient while it is exchanged in backward, beside ``.grad``; else None."""
        if self.drift and plan.numel:
            self.drift.begin_(self.state.memory, self.weights(parameters))
        self._rooms: dict[torch.dtype, Tensor] = {}
        """Vectors for data without room in the gradient's place, see
        :class:`~lightning_sparse.core.layout.Gradient`."""

    def weights(self, parameters: Mapping[str, Parameter]) -> Gradient:
        """Return the weights of this rank, where they lie.

        Raises:
            ValueError: for one that leaves gaps in memory.
        """
        for name in self.spans:
            filled = fills_memory(parameters[name])
            expect(filled, name, "a parameter without gaps in memory, with memory Drift", f"strides of {name}")
        return Gradient.of([flat for name in self.spans if (flat := flattened(parameters[name])).numel()])

    def prepare(self, ctx: Context) -> None:
        """Compile what steps will need, if anything, before the first of them."""
        if self.sparsified and not self.always_whole and static_shapes(self.device):
            in_runs = self.in_runs and len(self.spans) > 1 and self.dtype in on_device.GRADIENTS
            rehearse(self.dtype, self.device, ctx, self.memory, self.sparsifier, self.exchange, in_runs)

    def selects(self, step: int) -> bool:
        """Return True if not everything is sent at a step, as long as nothing is flushed."""
        numel = self.plan.numel or MANY  # all ranks must find the same, also those that have nothing of it
        return self.sparsified and not sends_everything(self.sparsifier, self.density(step), numel)

    @property
    def remembers(self) -> bool:
        """True if anything of earlier gradients is left; waits for the device."""
        return any(bool(vector.any()) for vector in self.memory.vectors(self.state.memory).values())

    @property
    def drifts(self) -> bool:
        """True if ranks have copies of the weights, which are exchanged behind the optimizer's step."""
        return self.drift is not None

    @property
    def residual(self) -> Tensor | None:
        """(numel,) what this rank has not sent yet; None where nothing is remembered."""
        return self.memory.residual(self.state.memory)

    @property
    def waits(self) -> bool:
        """True if anything has not been sent yet; waits for the device."""
        return self.residual is not None and bool(self.residual.any())

    @property
    def sent(self) -> bool:
        """True if nothing is remembered, or a valid step went by since the group was formed."""
        return self.state.counts is not None or not self.remembers

    @property
    def ran(self) -> bool:
        """True if the group was exchanged in the latest step, because some rank used some of its parameters."""
        return self.statistics is not None and len(self.unused) < len(self.spans)

    def carry(self, name: str, old: GroupReducer) -> None:
        """Take over what another group remembers of a parameter; a group without memory is only made of empty ones."""
        if self.memory.vectors(self.state.memory):
            self.memory.carry_(self.state.memory, self.spans[name], old.memory, old.state.memory, old.spans[name])
        self.diversity = Diversity.of([self.diversity.counters(), old.diversity.counters()])
        self.measured = max(self.measured, old.measured)

    def counters(self) -> dict[str, float]:
        """Return the numbers that a state keeps of the group, beside those of its memory."""
        followed = self.diversity.counters() | {"measured": self.measured} if self.memory.needs_second else {}
        return {"turn": float(self.turn), **followed}

    @property
    def memory_bytes(self) -> int:
        """Bytes that the memory keeps, and vectors for what finds no room in the gradient's place."""
        kept = [*tensors_in(self.state.memory), *self._rooms.values(), *([] if self.place is None else [self.place])]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())

    def exchange_steps(
        self,
        ctx: Context,
        pieces: Mapping[str, Tensor],
        unused: Set[str] = frozenset(),
        scale: Tensor | None = None,
        flush: bool = False,
        changing: Callable[[Set[str]], AbstractContextManager[None]] = lambda names: nullcontext(),
    ) -> Steps[Exchanged]:
        """Absorb and exchange; :meth:`settle` follows if the step counts.

        Args:
            ctx: the step.
            pieces: flat gradients by parameter, whose place averages take.
            unused: parameters of the group that no rank used; not all.
            scale: of the loss, see :func:`~lightning_sparse.engine.pipeline.exchange_group`.
            flush: send everything, this time.
            changing: is entered, with the names of the parameters, while gradients are absorbed.

        Returns:
            A coroutine that ends with what the step would settle.
        """
        anew = self._other_parameters(unused)
        self.unused = set(unused)
        ctx = ctx._replace(step=self.turn)
        grad = given = Gradient.of([piece for name in self.spans if (piece := pieces[name]).numel()], self._rooms)
        if static_shapes(self.device) and not self._reads(given.runs):
            grad = Gradient([given.flat()])
        # Where no rank has used a parameter, there may be an old average, which must neither be accumulated nor
        # changed; and nothing of what is remembered of it may be sent, because nobody would step with it.
        spans = [span for name, span in self.spans.items() if name in unused] if unused else []
        old = [(span, grad[span].clone()) for span in spans if not self.drifts]
        for span, _ in old:
            grad[span].zero_()
        if ctx.parameters is not None:
            used_ones = [p for name, p in zip(self.spans, ctx.parameters, strict=True) if name not in unused]
            ctx = ctx._replace(parameters=used_ones)
        if ctx.rates is not None:
            ctx = ctx._replace(
                rates=[one for name, one in zip(self.spans, ctx.rates, strict=True) if name not in unused]
            )
        used = self.spans.keys() - unused if self.memory.remembers_at_once else set()
        squares = None
        exchanging = exchange_group(
            grad,
            self.state,
            ctx,
            memory=self.memory,
            sparsifier=self.sparsifier,
            exchange=self.exchange,
            scale=scale,
            unused=spans,
            flush=flush,
            anew=anew,
            changing=partial(changing, used),
        )
        if not (self.memory.needs_second and self.diversity.asks(ctx.world_size)):
            proposed = yield from exchanging
        else:
            meter = Meter(ctx.world_size)
            comparing = meter.watch(squares_of(grad.pieces, ctx.step, ctx.world_size, scale))
            both: list[Any] = yield from together([comparing, exchanging])  # scores take the gradient's place
            squares, proposed = both
            ran = proposed.statistics
            proposed = proposed._replace(statistics=ran._replace(bytes_sent=ran.bytes_sent + meter.bytes_sent))
        for span, values in old:
            grad[span].copy_(values)
        if self.drifts:
            self._copies = given if grad is not given else None
        elif grad is not given:
            given.spread_(grad.runs[0])
        average = self.average(proposed.update.indices, proposed.handed, proposed.divisor)
        return Exchanged(proposed, spans, average, squares)

    def _other_parameters(self, unused: Set[str]) -> bool:
        """Return whether a step has gradients of other parameters than those whose lengths are known."""
        if not self.memory.needs_second:
            return False
        if self._composed is None or self._composed[0] != unused:
            self._composed = frozenset(unused), composition(self.spans.keys() - unused)
        before, self.measured = self.measured, self._composed[1]
        return before not in (0.0, self.measured)

    def _reads(self, runs: Sequence[Tensor]) -> bool:
        """Return whether kernels take a gradient in runs on a device; else one vector takes fewer operations."""
        works = self.in_runs and on_cuda.takes(self._like) and not on_cuda.refused
        return works and self.dtype in on_device.GRADIENTS and all(run.dtype == self.dtype for run in runs)

    def average(
        self, indices: Tensor | None, values: Tensor, by: Tensor | None = None, whole: bool | None = None
    ) -> Average:
        """Return an average of this group, see :class:`.Average`."""
        whole = indices is None if whole is None else whole
        return Average(self.spans, indices, values, by, self.bounds, self._like, whole)

    def nothing(self) -> Average:
        """Return the average of a step in which this rank has exchanged no coordinate of the group."""
        return self.average(None, torch.empty(0, dtype=self.dtype, device=self.device))

    def settle(self, made: Exchanged, skipped: bool, union: int | None = None) -> None:
        """Conclude the step when all groups have been exchanged: if one of them skips it, all do.

        Args:
            made: of :meth:`exchange_steps`.
            skipped: the step counts for nothing.
            union: coordinates that ranks have selected, where only the device knew.
        """
        self.statistics = made.proposed.statistics
        self.turn += not skipped
        place = None if self.drift is None else self.drift.copy(self.state.memory)
        kept = [] if place is None else [(place[span], place[span].clone()) for span in made.unused]
        self.state = settle_group(self.state, made.proposed, skipped, self.memory, made.unused)
        if union is not None and not skipped:
            self.state = self.state._replace(told=union)
        for part, values in kept:
            part.copy_(values)
        if self._copies is not None and place is not None:
            self._copies.spread_(place.flat())
            self._copies = None

    def residual_norm(self) -> float:
        """Return the Euclidean norm of this rank's residual; waits for the device."""
        return norm_of(self.residual)


def composition(names: Collection[str]) -> float:
    """Return a number above 0 that tells a set of parameters from others."""
    return 1.0 + zlib.crc32("\n".join(sorted(names)).encode())


class Exchanged(NamedTuple):
    """A step of a group that has been exchanged."""

    proposed: Proposed
    unused: list[slice]
    """Places of parameters that no rank used."""
    average: Average
    squares: Tensor | None = None
    """(2,) what ranks have found of their gradients, see :func:`.squares_of`; None: they have not compared them."""


def hear(
    made: Sequence[Exchanged], facts: Tensor, to_host: Callable[[Tensor], Tensor]
) -> tuple[dict[int, int], list[float]]:
    """Let the host wait once for all that it has to know of a step.

    Args:
        made: of each group.
        facts: (f,) float64 numbers.
        to_host: waits for a tensor.

    Returns:
        Coordinates that ranks have selected, by number of a group, where only a device knew: messages of the next step
        are as long as these ask for. And the facts.
    """
    ends = {number: one.proposed.after.union for number, one in enumerate(made)}
    unions = {number: x for number, x in ends.items() if x is not None and static_shapes(x.device)}
    if unions:
        facts = torch.cat([torch.stack([*unions.values()]).double(), facts])
    told: list[float] = to_host(facts).tolist()
    return dict(zip(unions, map(int, told), strict=False)), told[len(unions) :]


def any_set(flags: Sequence[Tensor], device: torch.device, host_knows: bool) -> Tensor:
    """Return the () flag that is set if one of the () flags is; forms nothing where the host knows that none is."""
    if not flags or (host_knows and not any(map(bool, flags))):
        return torch.zeros((), dtype=torch.bool, device=device)
    return torch.stack(list(flags)).any()


def tensors_in(state: Any) -> Iterator[Tensor]:
    """Iterate over all tensors of a memory's state: dataclasses and tuples of these."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from tensors_in(part)
    elif is_dataclass(state):
        for field in fields(state):
            yield from tensors_in(getattr(state, field.name))
