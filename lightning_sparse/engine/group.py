"""One group: its state, and how its gradient goes from the buckets through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.core.layout import Gradient, sum_dtype
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Agreement, Context
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.delivery import Delivery, Proposed, bounds_of
from lightning_sparse.engine.metrics import Stamp, Statistics, norm_of
from lightning_sparse.engine.pipeline import (
    exchange_group,
    init_group,
    rehearse,
    sends_everything,
    settle_group,
)
from lightning_sparse.engine.state.record import Averages
from lightning_sparse.methods.density import Constant
from lightning_sparse.methods.exchanges import Dense, Exchange
from lightning_sparse.methods.grouping import Group
from lightning_sparse.methods.memory import Memory
from lightning_sparse.methods.sparsifiers import Everything, Sparsifier
from lightning_sparse.ops import static_shapes
from lightning_sparse.ops.sampled import Sampler


class GroupReducer:
    """Exchanges the gradients of one group; keeps its state, and the pieces of its gradient that have arrived."""

    def __init__(
        self,
        plan: Group,
        parameters: Mapping[str, Parameter],
        settings: SparsificationConfig,
        first: Context,
        flush: bool,
    ) -> None:
        self.plan = plan
        self.spans = plan.offsets()
        schedule = settings.density if plan.density is None else Constant(plan.density)
        self.density = schedule.for_group()
        self.always_whole = schedule == Constant(1.0)
        """True if a density of 1 is all that this group will ever have."""
        # A group that becomes dense must be able to send what it remembers.
        memory = settings.memory_in_use
        if plan.dense and not flush:
            memory = memory.for_dense()
        elif self.always_whole:
            memory = memory.for_whole()
        self.memory: Memory = memory
        self.sparsifier: Sparsifier = Everything() if plan.dense else settings.sparsifier
        self.exchange: Exchange = Dense() if plan.dense else settings.exchange
        example = parameters[plan.parameters[0].name]
        self.device, self.dtype = example.device, example.dtype
        self.wide = sum_dtype(self.dtype)
        """Dtype of what is remembered."""
        parts: dict[str, Any] = {"memory": self.memory, "sparsifier": self.sparsifier}
        self.state = init_group(plan.numel, self.dtype, self.device, first, **parts)
        """State that survives a step; the memory's part changes in place."""
        self.statistics: Statistics | None = None
        """Statistics of the last step that exchanged the group, which need not be the latest step, see :attr:`ran`."""
        self.arrived: dict[str, Tensor] = {}
        """Pieces of the gradient, in the buckets, from their arrival to the end of the step."""
        self.untouched: set[str] = set()
        """Parameters that no rank used in the latest step that has settled."""
        self.unused: set[str] = set()
        """Parameters that no rank used in the latest step."""
        self.bounds = bounds_of(self.spans, self.device)
        self._like = torch.empty((), dtype=self.wide, device=self.device)
        self._sampler = Sampler()
        self._keeps = settings.hands_over_later
        self._notes_sent = settings.delay > 0
        self.exchange_made: Exchanged | None = None
        """The exchange of this step, until the next one begins."""
        self._rooms: dict[torch.dtype, Tensor] = {}
        """Vectors for data without room in the gradient's place, see
        :class:`~lightning_sparse.core.layout.Gradient`."""

    def prepare(self, ctx: Context) -> None:
        """Compile what steps will need, if anything, before the first of them."""
        if self.sparsified and not self.always_whole and static_shapes(self.device):
            rehearse(self.dtype, self.device, ctx, self.memory, self.sparsifier, self.exchange)

    def selects(self, step: int) -> bool:
        """Return True if not everything is sent at a step, as long as nothing is flushed."""
        return self.sparsified and not sends_everything(self.sparsifier, self.density(step), self.plan.numel)

    @property
    def sparsified(self) -> bool:
        """True if coordinates are selected, by plan, so that others wait."""
        return self.sparsifier.agreement is not Agreement.EVERYTHING

    @property
    def remembers(self) -> bool:
        """True if anything of earlier gradients is left; waits for the device."""
        return any(bool(vector.any()) for vector in self.memory.vectors(self.state.memory).values())

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
        """True if nothing is remembered, or a valid step went by since the group was formed; waits for the device."""
        stepped = self.state.counts is not None and bool((self.state.counts >= 0).all())
        return stepped or not self.remembers

    @property
    def ran(self) -> bool:
        """True if the group was exchanged in the latest step, because some rank used some of its parameters."""
        return self.statistics is not None and len(self.untouched) < len(self.spans)

    def carry(self, name: str, old: GroupReducer) -> None:
        """Take over what another group remembers of a parameter; a group without memory is only made of empty ones."""
        if self.memory.vectors(self.state.memory):
            self.memory.carry_(self.state.memory, self.spans[name], old.memory, old.state.memory, old.spans[name])

    @property
    def memory_bytes(self) -> int:
        """Bytes that the memory keeps, and vectors for what finds no room in the gradient's place."""
        kept = [*tensors_in(self.state.memory), *self._rooms.values()]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())

    @property
    def complete(self) -> bool:
        """True if all pieces of the gradient are here."""
        return len(self.arrived) == len(self.plan.parameters)

    def exchange_steps(
        self,
        ctx: Context,
        unused: Set[str] = frozenset(),
        scale: Tensor | None = None,
        flush: bool = False,
        changing: Callable[[Set[str]], AbstractContextManager[None]] = lambda names: nullcontext(),
    ) -> Steps[None]:
        """Absorb and exchange; :meth:`settle` follows if the step counts.

        Args:
            ctx: the step.
            unused: parameters of the group that no rank used in this backward.
            scale: of the loss, see :func:`~lightning_sparse.engine.pipeline.exchange_group`.
            flush: send everything, this time.
            changing: is entered, with the names of the parameters, while gradients are absorbed.

        Returns:
            A coroutine that works on the gradients in the buckets.
        """
        self.unused = set(unused)
        if len(unused) == len(self.spans):
            return
        grad = given = self._gradient()
        if static_shapes(self.device):  # of one vector a kernel takes one launch
            grad = Gradient([given.flat()])
        # Their slots in the buckets hold zeros or an old average, which must neither be accumulated nor changed; and
        # DDP throws the result for them away, so that nothing of what is remembered of them may be sent.
        spans = [span for name, span in self.spans.items() if name in unused]
        old = [grad[span].clone() for span in spans]
        for span in spans:
            grad[span].zero_()
        if ctx.parameters is not None:
            used_ones = [p for name, p in zip(self.spans, ctx.parameters, strict=True) if name not in unused]
            ctx = ctx._replace(parameters=used_ones)
        used = self.spans.keys() - unused if self.memory.remembers_at_once else set()
        proposed = yield from exchange_group(
            grad,
            self.state,
            ctx,
            memory=self.memory,
            sparsifier=self.sparsifier,
            exchange=self.exchange,
            scale=scale,
            unused=spans,
            flush=flush,
            changing=lambda: changing(used),
        )
        for span, values in zip(spans, old, strict=True):
            grad[span].copy_(values)
        if grad is not given:
            given.spread_(grad.runs[0])
        delivery = self.delivery(proposed.update.indices, proposed.divisor, ctx.world_size)
        delivery.sample([self.arrived[name] for name in self.spans], scale)
        self.exchange_made = Exchanged(ctx.step, proposed, grad, spans, delivery, scale)

    def delivery(self, indices: Tensor | None, by: Tensor | None, ranks: int, whole: bool | None = None) -> Delivery:
        """Return the facts about averages of this group, see :class:`Delivery`."""
        whole = indices is None if whole is None else whole
        return Delivery(self.spans, indices, by, self.memory, ranks, self.bounds, self._like, whole, self._sampler)

    def note_pause(self, paused: Stamp, resumed: Stamp) -> None:
        """Note that the group, which has just been exchanged, waited in between for others to travel with."""
        if (made := self.exchange_made) is not None:
            statistics = made.proposed.statistics._replace(pause=(paused, resumed))
            self.exchange_made = made._replace(proposed=made.proposed._replace(statistics=statistics))

    @property
    def void(self) -> Tensor | None:
        """() flag: a gradient of this group was not finite on some rank; None if no rank used it."""
        return None if self.exchange_made is None else self.exchange_made.proposed.void

    @property
    def averages(self) -> dict[str, Averages]:
        """Averages of this step, by parameter; of parameters that some rank used."""
        if self.exchange_made is None:
            return {}
        update, delivery = self.exchange_made.proposed.update, self.exchange_made.delivery
        returns = self.residual is not None
        values = update.values if returns or self._keeps else None
        averages = Averages(self.spans, update.indices, values, delivery, returns)
        return dict.fromkeys(self.spans.keys() - self.unused, averages)

    def settle(self, skipped: Tensor) -> Averages | None:
        """Conclude the step when all groups have been exchanged: if one of them skips it, all do.

        Args:
            skipped: () flag: the step counts for nothing.

        Returns:
            What of this rank has left the residual, where averages come late; else None.
        """
        made, self.untouched = self.exchange_made, self.unused
        if made is None:
            return None
        self.statistics = made.proposed.statistics
        held = self._held_at(made.proposed.update.sent) if self._notes_sent else None
        self.state = settle_group(self.state, made.proposed, skipped, self.memory, made.unused)
        if static_shapes(self.device) or not skipped:
            places = None if static_shapes(self.device) else made.proposed.statistics.indices
            self.density.observe(made.step, made.grad, skipped, places, made.scale)
        if held is None or self.residual is None:
            return None
        where, before = held
        return Averages(self.spans, where, before - self.residual[slice(None) if where is None else where])

    def _held_at(self, sent: Tensor | None) -> tuple[Tensor | None, Tensor] | None:
        """Return coordinates, and what the residual holds there; None: there is no residual.

        Args:
            sent: see :class:`~lightning_sparse.core.step.Update`.
        """
        if self.residual is None:
            return None
        where = None if sent is None else sent.clamp(max=self.plan.numel - 1)
        return where, self.residual[slice(None) if where is None else where].clone()

    def scale(self, factors: Mapping[str, float]) -> None:
        """Multiply the residuals of parameters by factors, where there are any."""
        spans = [(span, factors[name]) for name, span in self.spans.items() if name in factors]
        self.memory.scale_(self.state.memory, spans)

    def end_step(self) -> None:
        """Forget the pieces of the gradient, which are answered."""
        self.arrived, self.exchange_made = {}, None

    def residual_norm(self) -> float:
        """Return the Euclidean norm of this rank's residual; waits for the device."""
        return norm_of(self.residual)

    def _gradient(self) -> Gradient:
        """Return the gradient, which lies in the buckets."""
        pieces = (piece for name in self.spans if (piece := self.arrived[name]).numel())
        return Gradient.of(pieces, self._rooms)


class Exchanged(NamedTuple):
    """A step of a group that has been exchanged."""

    step: int
    proposed: Proposed
    grad: Gradient
    """The average."""
    unused: list[slice]
    """Places of parameters that no rank used."""
    delivery: Delivery
    scale: Tensor | None
    """() that the loss, and the average, is multiplied by."""


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
