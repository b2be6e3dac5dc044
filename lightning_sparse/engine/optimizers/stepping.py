"""The optimizers whose steps exchange gradients: what they hold is exchanged when they step, and their rules act."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from weakref import WeakSet, ref

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lightning_sparse.engine.delivery import Delivery
from lightning_sparse.engine.optimizers.binding import OptimizerBinding
from lightning_sparse.engine.optimizers.kinds import ids_of, rehearses, stepping
from lightning_sparse.engine.optimizers.rules import Arrived, OfGroup
from lightning_sparse.engine.step import Stepper

TWICE = (
    "{} has called its closure a second time in one step. The gradients of the first call are exchanged already: what "
    "was sent would be lost, or be trained on. Below a density of 1 a closure is called once a step; write SAM as two "
    "steps, and train with LBFGS densely."
)
TWO = (
    "Two optimizers step {} after one backward. The first one has exchanged its gradient, and the second one would "
    "step with an average that is meant for the first. Call backward before each of the two steps, or let one optimizer "
    "hold the parameter."
)


class StepBinding(OptimizerBinding):
    """Lets gradients be exchanged when optimizers step; optimizers are found by their first step."""

    _reducer: Stepper  # type: ignore[assignment]

    def __init__(self, stepper: Stepper, left_open: bool, open_exchange: bool) -> None:
        super().__init__(stepper, left_open, open_exchange)  # type: ignore[arg-type]
        self._known: WeakSet[Optimizer] = WeakSet()
        """Optimizers that have stepped parameters of the engine."""
        self._order: list[ref[Optimizer]] = []
        self._averaged: dict[str, tuple[ref[Optimizer], Tensor]] = {}
        """By parameter, which optimizer has exchanged its gradient last, and the average."""
        self._empty: list[Parameter] = []
        """Parameters without a gradient while their optimizer passes over a skipped step."""

    @property
    def in_use(self) -> list[Optimizer]:
        """The optimizers that were bound, and those that have stepped, in the order in which they came."""
        found = [one for known in self._order if (one := known()) is not None]
        return list({id(one): one for one in (*self.optimizers, *found)}.values())

    def check_closure(self, optimizer: Optimizer, calls: int) -> None:
        """Refuse a second call of a closure in a step whose gradients are exchanged.

        Raises:
            RuntimeError: on each rank that does so.
        """
        mine = not ids_of(optimizer).isdisjoint(self._mine)
        if calls > 1 and mine and not self._reducer.steps_aside:
            with self._reducer.failing_together("in the step"):
                raise RuntimeError(TWICE.format(type(optimizer).__name__))

    def before(self, optimizer: Optimizer) -> None:
        """Exchange what an optimizer holds, and let its rule act; its gradients are there."""
        names = self._mine
        if rehearses(optimizer):
            super().before(optimizer)
            return
        ids = ids_of(optimizer)
        held = [name for key, name in names.items() if key in ids]
        if held and self._outermost is None:
            self._outermost = optimizer
            self._meet(optimizer, held)
            self._count_alone(optimizer, names)
            self._step(optimizer, held)
        for watch in self.watchers:
            watch(optimizer)

    def _meet(self, optimizer: Optimizer, held: Sequence[str]) -> None:
        """Note an optimizer that steps for the first time, and cut groups by what it holds."""
        self._reducer.record.hold(optimizer)
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._order.append(ref(optimizer))
        self._reducer.split(held)

    def _step(self, optimizer: Optimizer, held: Sequence[str]) -> None:
        stepper, inner = self._reducer, stepping(optimizer)
        self._refuse_two(optimizer, held)
        if bool(getattr(optimizer, "found_inf", None) or 0):  # of a scaler: nobody steps, on any rank
            stepper.leave(held)
            return
        exchanged = stepper.exchange(held, getattr(optimizer, "grad_scale", None))
        if exchanged is None:
            return
        if exchanged.skipped:
            self._pass_over(held)
            self._say_skipped()
            return
        for name in exchanged.deliveries:
            grad = stepper.parameters[name].grad
            assert grad is not None
            self._averaged[name] = ref(optimizer), grad
        arrived = list(self._arrivals(inner, exchanged.deliveries))
        if self.takes(inner):
            self._adam.before(inner, arrived)
        elif type(inner) is SGD:
            self._momentum.before(inner, self._mine, arrived, self._spends(inner), 1)
        self._adam.leave(inner)

    def _refuse_two(self, optimizer: Optimizer, held: Sequence[str]) -> None:
        """Refuse an average that another optimizer has exchanged.

        Raises:
            RuntimeError: on all ranks, which do the same.
        """
        stepper = self._reducer
        for name in held:
            by, average = self._averaged.get(name, (None, None))
            if by is not None and stepper.parameters[name].grad is average and not stepper.is_fresh(name):
                other = by()
                if other is not None and other is not optimizer:
                    with stepper.failing_together("in the step"):
                        raise RuntimeError(TWO.format(name))

    def _arrivals(self, optimizer: Optimizer, deliveries: Mapping[str, Delivery]) -> Iterator[OfGroup]:
        names = self._mine
        for settings in optimizer.param_groups:
            named = [(p, names.get(id(p), "")) for p in settings["params"] if p.grad is not None]
            yield settings, [Arrived(p, n, self._group_of(n), deliveries[n]) for p, n in named if n in deliveries]

    def _pass_over(self, held: Sequence[str]) -> None:
        """Let an optimizer pass over a skipped step: it finds no gradients, and users find zeros afterwards."""
        for p in (self._reducer.parameters[name] for name in held):
            if p.grad is not None:
                p.grad = None
                self._empty.append(p)

    def _say_skipped(self) -> None:
        known = self._reducer.known_counts
        if known.skipped == 1:
            self._once(
                rank_zero_warn,
                f"A gradient was not finite on some rank in the backward after step {known.step}: no rank takes this "
                "step. sparse/steps/skipped counts such steps from now on.",
            )

    def after(self, optimizer: Optimizer) -> None:
        """Act after an optimizer's step."""
        if self._outermost is optimizer:
            self._outermost = None
            empty, self._empty = self._empty, []
            for p in empty:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
        self._adam.after()
        self._momentum.after()

    def forget(self) -> None:
        """Undo what :meth:`before` has done, if a step has failed since."""
        if self._outermost is not None and not _is_stepping(self._outermost):
            self._outermost = None
            self._empty = []
            self._adam.after()
            self._momentum.forget()

    def begin_step(self) -> None:
        """Choose the memory by the optimizers that are known."""
        self._alone = None
        bound = self.optimizers
        self.optimizers = self.in_use
        try:
            super().begin_step()
        finally:
            self.optimizers = bound


def _is_stepping(optimizer: Optimizer) -> bool:
    """Return True within a step of an optimizer, also of one that it calls; a step that has failed has left no trace."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
