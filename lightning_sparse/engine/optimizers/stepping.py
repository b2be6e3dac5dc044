"""The optimizers whose steps exchange gradients: what they hold is exchanged when they step, and their rules act."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from weakref import WeakSet, ref

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.weak import TensorWeakRef

from lightning_sparse.engine.calls import EXCHANGE
from lightning_sparse.engine.delivery import Delivery
from lightning_sparse.engine.executor import Hold
from lightning_sparse.engine.optimizers.binding import OptimizerBinding, holding, in_life
from lightning_sparse.engine.optimizers.kinds import ids_of, rehearses, stepping
from lightning_sparse.engine.optimizers.rules import Arrived, OfGroup
from lightning_sparse.engine.step import PATIENCE, Stepper

TWICE = (
    "{} has called its closure a second time in one step. The gradients of the first call are exchanged already: what "
    "was sent would be lost, or be trained on. Below a density of 1 a closure is called once a step; write SAM as two "
    "steps, and train with LBFGS densely."
)
IGNORED = (
    "{} was given a closure and has stepped without calling it. Gradients are exchanged when the closure has been "
    "called, so that ranks have stepped with their own. Call it before the step, and give the step none."
)
INSIDE = (
    "{} takes a step within a backward, before DistributedDataParallel has all gradients of it. Plain DDP would not "
    "average what it steps with, and ranks would drift apart. Step when backward is over."
)
UNFINISHED = (
    "A backward did not reach all parameters, so that DistributedDataParallel still waits for the gradients of some, "
    "and ranks would step with their own. Wrap the model with find_unused_parameters=True."
)
CAPTURED = (
    "{} takes a step that is captured in a CUDA graph. An exchange has messages between hosts, which a graph does not "
    "repeat. Capture the model alone, before it is wrapped, as torch.cuda.make_graphed_callables does."
)
UNSEEN = (
    f"Weights have changed after {PATIENCE} backwards, and no optimizer of torch has stepped them: gradients are not "
    "averaged, and ranks drift apart. Call engine.exchange(parameters) before a step that is not torch's, also where "
    "an optimizer holds copies of the parameters."
)
TWO = (
    "Two optimizers step {} after one backward. The first one has exchanged its gradient, and the second one would "
    "step with an average that is meant for the first. Call backward before each of the two steps, or let one of them "
    "hold the parameter."
)


class StepBinding(OptimizerBinding):
    """Lets gradients be exchanged when optimizers step; optimizers are found by their first step.

    Args:
        stepper: exchanges gradients.
        left_open: see :class:`.OptimizerBinding`.
        open_exchange: likewise.
        unfinished: whether a backward has handed over some gradients and not all.
    """

    exchanges = True
    _reducer: Stepper  # type: ignore[assignment]

    def __init__(self, stepper: Stepper, left_open: bool, open_exchange: bool, unfinished: Callable[[], bool]) -> None:
        super().__init__(stepper, left_open, open_exchange)  # type: ignore[arg-type]
        self._unfinished = unfinished
        within, beside = Hold(self._runs), Hold()
        stepper.owners = self._owners
        stepper.on_unseen = lambda: self._once(rank_zero_warn, UNSEEN)
        stepper.hold = lambda: holding()[-1] if holding() else within if self._outermost is not None else beside
        self._known: WeakSet[Optimizer] = WeakSet()
        """Optimizers that have stepped parameters of the engine."""
        self._order: list[ref[Optimizer]] = []
        self._checked: WeakSet[Optimizer] = WeakSet()
        """Those that go with the memory."""
        self._depth = 0
        """Steps of optimizers that run within each other."""
        self._averaged: dict[str, tuple[ref[Optimizer], TensorWeakRef]] = {}
        """By parameter, which optimizer has exchanged its gradient last, and the average, unless it is given free."""
        self._empty: list[Parameter] = []
        """Parameters without a gradient while their optimizer passes over a skipped step."""

    def _owners(self, names: Iterable[str]) -> dict[Stepper, list[str]]:
        """Return who exchanges these parameters: of several engines that have one, the one that came last."""
        later = [one for one in reversed(in_life()) if isinstance(one, StepBinding)]
        found: dict[Stepper, list[str]] = {}
        for name in names:
            key = id(self._parameters[name])
            owner = next((one for one in later if key in one._names), self)
            found.setdefault(owner._reducer, []).append(owner._names[key])
        return found

    @property
    def in_use(self) -> list[Optimizer]:
        """The optimizers that were bound, and those that have stepped, in the order in which they came."""
        found = [one for known in self._order if (one := known()) is not None]
        return list({id(one): one for one in (*self.optimizers, *found)}.values())

    def bind(self, optimizers: Optimizer | Iterable[Optimizer]) -> None:
        """See :meth:`.Engine.bind`."""
        super().bind(optimizers)
        self._checked.update(self.optimizers)
        self._known, self._order = WeakSet(), []  # those that step on are found again

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
        held = self._held(optimizer)
        fresh = any(map(self._reducer.is_fresh, held))
        # Gradients may be 0 on one rank alone, and ranks have to decide alike: where there is one to exchange, they do.
        self._rehearsing = rehearses(optimizer) and not fresh
        if self._rehearsing:
            super().before(optimizer)
            return
        if held:
            self._depth += 1
        if held and self._outermost is None:
            self._outermost = optimizer
            self._meet(optimizer, held)
            if fresh:  # also where the step is skipped
                self._alone = None
            elif self._reducer.flushed is None:
                self._count_alone(optimizer, self._mine)
            self._step(optimizer, held)
        for watch in self.watchers:
            watch(optimizer)

    def _held(self, optimizer: Optimizer) -> list[str]:
        """Return the names of the engine's parameters that an optimizer holds, in the order of the model."""
        ids = ids_of(optimizer)
        return [name for key, name in self._mine.items() if key in ids]

    def _meet(self, optimizer: Optimizer, held: Sequence[str]) -> None:
        """Note an optimizer that steps for the first time, and cut groups by what it holds."""
        self._reducer.record.hold(optimizer)
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._order.append(ref(optimizer))
        self._reducer.split(held)

    def _step(self, optimizer: Optimizer, held: Sequence[str]) -> None:
        stepper, inner = self._reducer, stepping(optimizer)
        self._refuse(optimizer, held)
        if bool(getattr(optimizer, "found_inf", None) or 0):  # of a scaler: nobody steps, on any rank
            stepper.leave(held)
            if self.takes(inner):  # which would look for moments where there is a count alone
                self._adam.rehearse(inner, self._served(inner))
            return
        if stepper.flushed is not None:
            self._act(inner, stepper.flushed, 0)
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
            self._averaged[name] = ref(optimizer), TensorWeakRef(grad)
        self._act(inner, exchanged.deliveries, 1)

    def _act(self, inner: Optimizer, deliveries: Mapping[str, Delivery], steps: int) -> None:
        """Let an optimizer's rule act on averages that have taken the place of gradients, after so many steps."""
        arrived = list(self._arrivals(inner, deliveries))
        if self.takes(inner):
            self._adam.before(inner, arrived)
        elif type(inner) is SGD:
            self._momentum.before(inner, self._mine, arrived, self._spends(inner), steps)
        self._adam.leave(inner)

    def exchange(self, names: Sequence[str]) -> bool:
        """See :meth:`.Engine.exchange`."""
        stepper = self._reducer
        if stepper.settings.memory_in_use.needs_second:
            raise RuntimeError(
                "engine.exchange() is for optimizers that torch does not have, and Adam's steps are taken when the "
                "optimizer steps. Leave out the call."
            )
        self._alone = None
        stepper.record.held |= set(names)
        stepper.split(names)
        exchanged = stepper.exchange(names, kind=EXCHANGE)
        stepper.applied()
        stepper.hold().end()
        if exchanged is None or not exchanged.skipped:
            return True
        for p in (stepper.parameters[name] for name in names):
            if p.grad is not None:
                p.grad.zero_()
        self._say_skipped()
        return False

    def _refuse(self, optimizer: Optimizer, held: Sequence[str]) -> None:
        """Refuse steps that would be taken with gradients that are not, or will not be, averages.

        Raises:
            RuntimeError: on all ranks that do the same.
        """
        stepper, problem = self._reducer, ""
        if self._unfinished():
            problem = UNFINISHED
        elif torch._C._current_graph_task_id() != -1 and not stepper.steps_aside:
            problem = INSIDE.format(type(optimizer).__name__)
        elif stepper.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            problem = CAPTURED.format(type(optimizer).__name__)
        for name in held:
            by, average = self._averaged.get(name, (None, None))
            if by is None or average is None or stepper.is_fresh(name):
                continue
            if (left := average()) is not None and stepper.parameters[name].grad is left:
                other = by()
                problem = TWO.format(name) if other is not None and other is not optimizer else problem
        if problem:
            with stepper.failing_together("in the step"):
                raise RuntimeError(problem)

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
        """Act after an optimizer's step.

        Raises:
            RuntimeError: on all ranks, if it has ignored the closure in which gradients would have been exchanged.
        """
        hold = None
        past = self._outermost is None and not self._rehearsing
        if past and self._reducer.local([self._parameters[name] for name in self._held(optimizer)]):
            with self._reducer.failing_together("in the step"):
                raise RuntimeError(IGNORED.format(type(optimizer).__name__))
        if self._outermost is not None and not ids_of(optimizer).isdisjoint(self._mine):
            self._depth -= 1
            if self._depth == 0:
                self._reducer.applied()
                hold, self._outermost = self._reducer.hold(), None
                empty, self._empty = self._empty, []
                for p in empty:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
        if not self._rehearsing and self._outermost is None:
            self._adam.after()
        self._momentum.after()
        if hold is not None:
            hold.end()

    def forget(self) -> None:
        """Undo what :meth:`before` has done, if a step has failed since."""
        if self._outermost is not None and not self._runs(self._depth):
            self._reducer.hold().end()
            self._outermost, self._depth, self._empty = None, 0, []
            self._adam.after()
            self._momentum.forget()

    def _runs(self, more: int = 0) -> bool:
        """Return True if the outermost step that has begun is still running: of one that has failed, no frame is left.

        Args:
            more: frames that have to be there beside it, such as that of a step that begins now.
        """
        frames, frame = 0, sys._getframe()
        while (back := frame.f_back) is not None:
            frame = back
            if frame.f_code.co_name == "wrapper" and isinstance(found := frame.f_locals.get("self"), Optimizer):
                frames += not ids_of(found).isdisjoint(self._mine)
        return frames > more

    def begin_step(self) -> None:
        """Choose the memory by the optimizers that are known, and check those that are new.

        Raises:
            ValueError: for an optimizer that does not go with the memory.
        """
        self._alone = None
        bound = self.optimizers
        self.optimizers = found = self.in_use
        try:
            super().begin_step()
        finally:
            self.optimizers = bound
        self._check([one for one in found if one not in self._checked])
        self._checked.update(found)
        self._reducer.rates.optimizers = found
