"""A group at work: its state, the pieces of its gradient, and the buckets that wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from lightning_sparse.collective import Collective, Metered
from lightning_sparse.density import Constant, GroupDensity
from lightning_sparse.exchanges import Dense, Exchange
from lightning_sparse.grouping import Group
from lightning_sparse.hook.plain import from_plain, to_plain
from lightning_sparse.hook.settings import Settings
from lightning_sparse.kernels import static_shapes
from lightning_sparse.memory import Memory
from lightning_sparse.pipeline import commit_group, exchange_group, init_group
from lightning_sparse.sparsifiers import Everything, Sparsifier
from lightning_sparse.statistics import Statistics, residual_norm
from lightning_sparse.types import Context, GroupState


class Delivery:
    """A bucket of DDP, to be answered in its own buffer when the step is over."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self.spans: dict[str, slice] = {}
        """Where the gradients of parameters lie."""

    def add(self, name: str, start: int, numel: int) -> Tensor:
        """The gradient of a parameter, from ``start`` on."""
        self.spans[name] = slice(start, start + numel)
        return self.buffer[start : start + numel]

    def spoil_(self, void: Tensor, untouched: Set[str], firsts: dict[tuple[int, ...], Tensor]) -> None:
        """Put NaN into the gradients of a step that is void, so that whoever looks at any of them knows.

        Args:
            void: () flag. On a device, where nobody knows whether it is set, one coordinate of each gradient has to do.
            untouched: parameters whose gradient is not of this step.
            firsts: first coordinates of a bucket as tensors on the device, kept from step to step.
        """
        spans = [span for name, span in self.spans.items() if name not in untouched]
        if not static_shapes(void.device):
            for span in spans if void else ():
                self.buffer[span].fill_(float("nan"))
        elif (
            untouched & self.spans.keys()
        ):  # others in every step, maybe: the host does not wait to copy where they are
            for span in spans:
                self.buffer[span.start : span.start + 1].masked_fill_(void, float("nan"))
        else:
            starts = tuple(span.start for span in spans)
            if starts not in firsts:
                firsts[starts] = torch.tensor(starts, device=self.buffer.device)
            places = firsts[starts]
            self.buffer.index_copy_(0, places, self.buffer[places].masked_fill_(void, float("nan")))


class Running:
    """A group at work: its state, and the pieces of its gradient that have arrived."""

    def __init__(
        self,
        plan: Group,
        parameters: dict[str, Parameter],
        settings: Settings,
        first: Context,
        flush: bool,
    ) -> None:
        self.plan = plan
        self.spans = plan.offsets()
        schedule = settings.density if plan.density is None else Constant(plan.density)
        self.density = schedule.for_group()
        # A group that becomes dense must be able to send what it remembers.
        self.memory: Memory = settings.memory.for_dense() if plan.dense and not flush else settings.memory
        self.sparsifier: Sparsifier = Everything() if plan.dense else settings.sparsifier
        self.exchange: Exchange = Dense() if plan.dense else settings.exchange
        example = parameters[plan.parameters[0].name]
        self.device, self.dtype = example.device, example.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        """Of what is remembered."""
        self.state: GroupState = init_group(
            plan.numel, self.dtype, self.device, first, memory=self.memory, sparsifier=self.sparsifier
        )
        self.statistics: Statistics | None = None
        self.arrived: dict[str, Tensor] = {}
        """Pieces of the gradient, in the buckets, from their arrival to the end of the step."""
        self.untouched: set[str] = set()
        """Parameters that no rank used in this step."""
        self.exchanged = False
        """Whether the group has run in this step."""
        self._exchanged: _Exchanged | None = None
        self._scratch: Tensor | None = None

    @property
    def remembers(self) -> bool:
        """Whether anything of earlier gradients is left; waits for the device."""
        return any(bool(vector.any()) for vector in self.memory.vectors(self.state.memory).values())

    @property
    def sent(self) -> bool:
        """Whether nothing is remembered, or a valid step went by since the group was formed; waits for the device."""
        stepped = self.state.counts is not None and bool((self.state.counts >= 0).all())
        return stepped or not self.remembers

    def carry(self, name: str, old: Running) -> None:
        """Take over what another group remembers of a parameter; a group without memory is only made of empty ones."""
        if self.memory.vectors(self.state.memory):
            self.memory.carry_(self.state.memory, self.spans[name], old.memory, old.state.memory, old.spans[name])

    @property
    def version(self) -> GroupVersion:
        """What counts now."""
        return GroupVersion(self, self.state, self.density.learned)

    def load(self, remembered: dict[str, dict[str, Tensor]], counters: dict[str, dict[str, float]]) -> list[str]:
        """Fill a group that has just been formed with what is remembered of its parameters.

        Args:
            remembered: of each parameter, see :meth:`GroupVersion.remembered`.
            counters: of each parameter, see :meth:`GroupVersion.counters`; of different ones, the largest count.

        Returns:
            Sentences about what did not fit.
        """
        notes = []
        vectors = self.memory.vectors(self.state.memory)
        for name, span in self.spans.items():
            for vector, values in remembered[name].items():
                if vector in vectors and values.numel() == span.stop - span.start:
                    vectors[vector][span].copy_(values)
                elif vector in vectors:
                    numel = span.stop - span.start
                    notes.append(f"{name} had {values.numel()} coordinates and has {numel}: its {vector} is dropped.")
                elif bool(values.any()):
                    notes.append(f"{type(self.memory).__name__} keeps no {vector}: that of {name} is dropped.")
        for name, counter in self.memory.counters(self.state.memory).items():
            counter.fill_(max(counters[p].get(name, 0.0) for p in self.spans))
        return notes

    def is_about(self, learned: Mapping[str, Any] | None) -> bool:
        """Whether something was learned about these very parameters, see :meth:`state_dict`."""
        return learned is not None and learned["parameters"] == [p.name for p in self.plan.parameters]

    def understand(self, learned: Mapping[str, Any], world_size: int) -> Learned:
        """What has been learned about a group like this one, see :meth:`state_dict`; changes nothing.

        Raises:
            ValueError: if it does not fit.
        """
        state = learned["state"]
        given = state.get("selector")
        if learned["numel"] != self.plan.numel or not isinstance(given, list) or len(given) != 3:
            raise ValueError(f"Expected what {self.plan.numel} coordinates have taught, but got {learned['numel']}.")
        selector = from_plain(given[0], self.state.selector)
        if isinstance(selector, Tensor):
            selector = selector.to(self.device)
        counts, union = (
            None
            if plain is None
            else from_plain(plain, torch.zeros(shape, dtype=torch.int64, device="cpu")).to(self.device)
            for plain, shape in zip(given[1:], ((world_size,), ()), strict=True)
        )
        if (counts is None) != (union is None):
            raise ValueError("Expected counts and a union, or neither.")
        density = self.density.schedule.for_group()
        density.load_state_dict(state["density"], self.plan.numel, self.device)
        return Learned(selector, counts, union, density)

    def learn(self, learned: Learned) -> None:
        """Go on with what :meth:`understand` gave."""
        self.state = GroupState(self.state.memory, learned.selector, learned.counts, learned.union)
        self.density = learned.density

    def receive(self, name: str, piece: Tensor) -> None:
        """The gradient of a parameter is here, in a bucket."""
        self.arrived[name] = piece

    @property
    def complete(self) -> bool:
        """All pieces are here."""
        return len(self.arrived) == len(self.plan.parameters)

    def run(
        self,
        ctx: Context,
        comm: Collective,
        hosts: Collective,
        used: list[bool] | None,
        scale: Tensor | None,
        flush: bool = False,
    ) -> None:
        """Exchange the group; :meth:`conclude` decides whether that counts.

        Args:
            ctx: the step.
            comm: the ranks.
            hosts: the same ranks, for what their hosts know.
            used: which parameters took part in this backward on this rank; None: all did, on all ranks.
            scale: of the loss, see :func:`~lightning_sparse.pipeline.exchange_group`.
            flush: send everything, this time.
        """
        untouched: dict[str, slice] = {}
        asking = Metered(hosts)
        if used is not None:
            flags = torch.tensor(used, dtype=torch.uint8, device="cpu")
            anywhere = asking.all_gather(flags).amax(0).tolist()
            untouched = {
                name: span for (name, span), touched in zip(self.spans.items(), anywhere, strict=True) if not touched
            }
        self.untouched = set(untouched)
        if len(untouched) == len(self.spans):
            self.exchanged = True
            return
        flat, in_place = self._gather()
        # Their slots in the buckets hold zeros or an old average, which must neither be accumulated nor changed; and
        # DDP throws the result for them away, so that nothing of what is remembered of them may be sent.
        spans = list(untouched.values())
        grads = [flat[span].clone() for span in spans]
        for span in spans:
            flat[span].zero_()
        if ctx.parameters is not None:
            used_ones = [p for name, p in zip(self.spans, ctx.parameters, strict=True) if name not in untouched]
            ctx = ctx._replace(parameters=used_ones)
        after, statistics, void = exchange_group(
            flat,
            self.state,
            ctx,
            memory=self.memory,
            sparsifier=Everything() if flush else self.sparsifier,
            exchange=Dense() if flush else self.exchange,
            comm=comm,
            scale=scale,
            unused=spans,
        )
        if flush:  # nothing to be learned from it
            after = self.state
        places = None if static_shapes(self.device) else statistics.indices
        self._exchanged = _Exchanged(ctx.step, after, void, flat, spans, places)
        self.statistics = statistics._replace(bytes_sent=statistics.bytes_sent + asking.bytes_sent)
        for span, grad in zip(spans, grads, strict=True):
            flat[span].copy_(grad)
        if not in_place:
            for name, span in self.spans.items():
                self.arrived[name].copy_(flat[span])
        self.exchanged = True

    @property
    def void(self) -> Tensor | None:
        """() whether this group's gradient was not finite on some rank; None if no rank used it."""
        return None if self._exchanged is None else self._exchanged.void

    def after(self, void: Tensor) -> GroupVersion:
        """What counts when all groups have run: if the step is void for any of them, it is for this one.

        What counts now stays as it is until the next step begins. To ask twice changes nothing.
        """
        step = self._exchanged
        if step is None:
            return self.version
        state = commit_group(self.state, step.after, void, self.memory, step.unused)
        learned = self.density.learned
        if static_shapes(self.device) or not void:
            learned = self.density.observed(step.step, step.flat[: self.plan.numel], void, step.places)
        return GroupVersion(self, state, learned)

    def adopt(self, version: GroupVersion) -> None:
        """Go on with this version."""
        self.state, self.density.learned = version.state, version.learned

    def end_step(self) -> None:
        """The pieces of the gradient are answered."""
        self.arrived, self.exchanged, self._exchanged = {}, False, None

    def residual_norm(self) -> float:
        """Euclidean norm of this rank's residual; waits for the device."""
        return residual_norm(self.memory.residual(self.state.memory))

    def _gather(self) -> tuple[Tensor, bool]:
        """The flat gradient: a view of the bucket if it lies there in one run (CPU), else a copy with a spare slot."""
        pieces = [self.arrived[name] for name in self.spans]
        first = pieces[0]
        in_one_run = all(
            piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and piece.storage_offset() == first.storage_offset() + span.start
            for piece, span in zip(pieces, self.spans.values(), strict=True)
        )
        if in_one_run and not static_shapes(self.device):
            return first.as_strided((self.plan.numel,), (1,)), True
        if self._scratch is None:
            self._scratch = torch.zeros(self.plan.numel + 1, dtype=self.dtype, device=self.device)
        for piece, span in zip(pieces, self.spans.values(), strict=True):
            self._scratch[span].copy_(piece)
        return self._scratch, False


class GroupVersion(NamedTuple):
    """What counts of a group after a step; never changed, so that it can be read at any moment.

    Its buffers are written to again in the step after the next one.
    """

    group: Running
    state: GroupState
    learned: Any
    """By the density."""

    def remembered(self, name: str) -> dict[str, Tensor]:
        """What is remembered of a parameter: copies on the CPU, by name of the vector."""
        vectors, span = self.group.memory.vectors(self.state.memory), self.group.spans[name]
        return {vector: buffer[span].to("cpu", copy=True) for vector, buffer in vectors.items()}

    def counters(self) -> dict[str, float]:
        """What is remembered of the group as a whole, and with it of each of its parameters."""
        return {name: float(counter) for name, counter in self.group.memory.counters(self.state.memory).items()}

    def scaled(self, factors: Mapping[str, float]) -> GroupVersion:
        """The residuals of parameters multiplied by factors, where there are any."""
        group = self.group
        if not factors.keys() & group.spans.keys():
            return self
        spans = [(span, factors.get(name, 1.0)) for name, span in group.spans.items()]
        return self._replace(state=self.state._replace(memory=group.memory.scale(self.state.memory, spans)))

    def state_dict(self) -> dict[str, Any]:
        """What has been learned about the group, as plain data and tensors on the CPU."""
        group, learned = self.group, (self.state.selector, self.state.counts, self.state.union)
        return {
            "name": group.plan.name,
            "parameters": [p.name for p in group.plan.parameters],
            "numel": group.plan.numel,
            "state": {"selector": to_plain(learned), "density": group.density.state_dict(self.learned)},
        }


class Learned(NamedTuple):
    """What is known of a group but for what it remembers of gradients."""

    selector: Any
    counts: Tensor | None
    union: Tensor | None
    density: GroupDensity


class _Exchanged(NamedTuple):
    """A step of a group that has been exchanged and does not count yet."""

    step: int
    after: GroupState
    void: Tensor
    flat: Tensor
    """The average; (numel,) and maybe a spare slot."""
    unused: list[slice]
    """Where parameters lie that no rank used."""
    places: Tensor | None
    """Coordinates of the average, where the host knows them; None: all."""
