"""A group at work: its state, the pieces of its gradient, and the buckets that wait for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from lightning_sparse.collective import Collective, Metered
from lightning_sparse.density import Constant
from lightning_sparse.exchanges import Dense, Exchange
from lightning_sparse.grouping import Group
from lightning_sparse.hook.settings import Settings
from lightning_sparse.kernels import static_shapes
from lightning_sparse.memory import Memory
from lightning_sparse.pipeline import init_group, reduce_group
from lightning_sparse.sparsifiers import Everything, Sparsifier
from lightning_sparse.statistics import Statistics, residual_norm
from lightning_sparse.types import Context, GroupState


class Delivery:
    """A bucket that waits for the groups that have a piece in it."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self.waiting: set[str] = set()

    def done(self, group: str) -> None:
        """A group has written its pieces."""
        self.waiting.discard(group)
        if not self.waiting:
            self.future.set_result(self.buffer)


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
        self.state: GroupState = init_group(
            plan.numel, self.dtype, self.device, first, memory=self.memory, sparsifier=self.sparsifier
        )
        self.statistics: Statistics | None = None
        self.arrived: dict[str, tuple[Delivery, int]] = {}
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

    def receive(self, name: str, delivery: Delivery, start: int) -> None:
        """The gradient of a parameter lies in a bucket from ``start`` on."""
        self.arrived[name] = (delivery, start)
        delivery.waiting.add(self.plan.name)

    @property
    def complete(self) -> bool:
        """All pieces are here."""
        return len(self.arrived) == len(self.plan.parameters)

    def run(self, ctx: Context, comm: Collective, used: list[bool] | None) -> None:
        """Exchange the group and answer the buckets.

        Args:
            ctx: the step.
            comm: the ranks.
            used: which parameters took part in this backward on this rank; None: all did, on all ranks.
        """
        untouched: list[slice] = []
        asking = Metered(comm)
        if used is not None:
            flags = torch.tensor(used, dtype=torch.uint8, device=self.device)
            # DDP itself waits for the device in this mode, to learn which parameters no rank used.
            anywhere = asking.all_gather(flags).amax(0).tolist()
            untouched = [span for span, touched in zip(self.spans.values(), anywhere, strict=True) if not touched]
        if len(untouched) < len(self.spans):
            flat, in_place = self._gather()
            aside = self._set_aside(flat, untouched)
            self.state, statistics = reduce_group(
                flat,
                self.state,
                ctx,
                memory=self.memory,
                sparsifier=self.sparsifier,
                exchange=self.exchange,
                comm=comm,
            )
            self.statistics = statistics._replace(bytes_sent=statistics.bytes_sent + asking.bytes_sent)
            self.density.observe(ctx.step, flat[: self.plan.numel])
            self._bring_back(flat, untouched, aside)
            if not in_place:
                for span, piece in self._pieces():
                    piece.copy_(flat[span])
        arrived, self.arrived = self.arrived, {}
        for delivery in dict.fromkeys(delivery for delivery, _ in arrived.values()):
            delivery.done(self.plan.name)

    def residual_norm(self) -> float:
        """Euclidean norm of this rank's residual; waits for the device."""
        return residual_norm(self.memory.residual(self.state.memory))

    def _pieces(self) -> list[tuple[slice, Tensor]]:
        pieces = []
        for name, span in self.spans.items():
            delivery, start = self.arrived[name]
            pieces.append((span, delivery.buffer[start : start + span.stop - span.start]))
        return pieces

    def _gather(self) -> tuple[Tensor, bool]:
        """The flat gradient: a view of the bucket if it lies there in one run (CPU), else a copy with a spare slot."""
        first, begin = self.arrived[self.plan.parameters[0].name]
        in_one_run = all(
            delivery is first and start == begin + self.spans[name].start
            for name, (delivery, start) in self.arrived.items()
        )
        if in_one_run and not static_shapes(self.device):
            return first.buffer[begin : begin + self.plan.numel], True
        if self._scratch is None:
            self._scratch = torch.zeros(self.plan.numel + 1, dtype=self.dtype, device=self.device)
        for span, piece in self._pieces():
            self._scratch[span].copy_(piece)
        return self._scratch, False

    def _set_aside(self, flat: Tensor, untouched: list[slice]) -> tuple[list[Tensor], list[Tensor]]:
        """Keep parameters that no rank used out of this step.

        Their slot in the bucket holds zeros or an old average, which must neither be accumulated nor changed; and DDP
        throws the result for them away, so that nothing of their residual may be sent.
        """
        grads = [flat[span].clone() for span in untouched]
        for span in untouched:
            flat[span].zero_()
        return grads, self.memory.set_aside_(self.state.memory, untouched)

    def _bring_back(self, flat: Tensor, untouched: list[slice], aside: tuple[list[Tensor], list[Tensor]]) -> None:
        grads, memory = aside
        for span, grad in zip(untouched, grads, strict=True):
            flat[span].copy_(grad)
        self.memory.bring_back_(self.state.memory, untouched, memory)
