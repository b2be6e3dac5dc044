"""A group at work: what it remembers from step to step, and its exchange."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.core.checks import expect
from lightning_sparse.core.layout import Gradient, fills_memory, flattened, sum_dtype
from lightning_sparse.core.messages import Meter, Steps, together
from lightning_sparse.core.step import Agreement, Context, GroupState
from lightning_sparse.engine.average import Average, bounds_of
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.diversity import Diversity, squares_of
from lightning_sparse.engine.metrics import Statistics, norm_of
from lightning_sparse.engine.pipeline import (
    Proposed,
    exchange_group,
    init_group,
    rehearse,
    sends_everything,
    settle_group,
)
from lightning_sparse.engine.share import Place
from lightning_sparse.methods.density import Constant
from lightning_sparse.methods.exchanges import Dense, Exchange
from lightning_sparse.methods.grouping import Group
from lightning_sparse.methods.memory import Drift, Memory
from lightning_sparse.methods.sparsifiers import Everything, Sparsifier
from lightning_sparse.ops import on_device, static_shapes
from lightning_sparse.ops.on_cuda import on_cuda

MEASURED = "measured"
"""Name of the counter that says of what lengths are known, see :func:`composition`."""
MANY = 1 << 20
"""Coordinates of which any density below 1 leaves out some."""


class GroupReducer:
    """Exchanges the gradients of one group, and keeps its state."""

    def __init__(
        self,
        plan: Group,
        parameters: Mapping[str, Parameter],
        settings: SparsificationConfig,
        first: Context,
        flush: bool,
        places: Mapping[str, Place] | None = None,
    ) -> None:
        self.plan, self._places = plan, places or {}
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
        """Of what lengths are known, see :func:`composition`; 0: of nothing."""
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

    @property
    def leaves_out(self) -> bool:
        """True if coordinates may ever wait, so that it counts what was learned for their selection."""
        return self.sparsified and not self.always_whole

    def prepare(self, ctx: Context) -> None:
        """Compile what steps will need, if anything, before the first of them."""
        if self.leaves_out and static_shapes(self.device):
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
        followed = self.diversity.counters() | {MEASURED: self.measured} if self.memory.needs_second else {}
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
        """Return whether a step has gradients of other parameters, or parts of them, than those of known length."""
        if not self.memory.needs_second:
            return False
        if self._composed is None or self._composed[0] != unused:
            self._composed = frozenset(unused), composition(self.spans.keys() - unused, self._places)
        before, self.measured = self.measured, self._composed[1]
        return before != self.measured

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


def composition(names: Collection[str], places: Mapping[str, Place]) -> float:
    """Return a number above 0 that tells a set of parameters, and the parts of them that a rank has, from others."""
    facts = [f"{name} {tuple(places[name])}" if name in places else name for name in sorted(names)]
    return 1.0 + zlib.crc32("\n".join(facts).encode())


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
