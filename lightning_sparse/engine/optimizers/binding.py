"""What happens around the steps of optimizers: gradients are exchanged before them, and rules act."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lightning_sparse.engine.average import Average
from lightning_sparse.engine.calls import EXCHANGE
from lightning_sparse.engine.optimizers.choice import MemoryChoice
from lightning_sparse.engine.optimizers.drift import DriftRule
from lightning_sparse.engine.optimizers.hooks import call_around_steps, holding, in_life, leave_alone
from lightning_sparse.engine.optimizers.kinds import ids_of, rehearses, stepping
from lightning_sparse.engine.optimizers.left_over import LeftOver
from lightning_sparse.engine.optimizers.rules import AdamRule, Arrived, MomentumRule, OfGroup
from lightning_sparse.engine.signals import Hold
from lightning_sparse.engine.step import Stepper

TWICE = (
    "{} has called its closure a second time in one step. The gradients of the first call are exchanged already: what "
    "was sent would be lost, or be trained on. A closure is called once a step, unless DDP averages by itself, as it "
    "does at a density of 1 without node_size. Write SAM as two steps, and train with LBFGS densely."
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
APART = (
    "Weights are no longer equal on all ranks. Until an optimizer of torch steps, gradients are each rank's own, and a "
    "script that applies them by itself lets ranks drift apart. Call engine.exchange(parameters) before a step that is "
    "not torch's, also where an optimizer holds copies of the parameters. What is written to weights otherwise has to "
    "be equal on all ranks. Go on from a checkpoint that was written before."
)
ALIKE = (
    "The optimizer has left equal weights on all ranks in its first steps, although their gradients differ. If it "
    "exchanges gradients or weights by itself, as distributed forms of Muon do, each rank's gradients move a part of "
    "the weights only: use memory='residual', or the form of the optimizer for one process."
)
CHANGED = (
    "Weights were written to since the last step, while each rank trains a copy of its own (memory Drift). The copies "
    "are averaged densely at the end of the next backward. In each step, that would cost twice as much as DDP."
)
KEPT = (
    "Weights were written to since the last step, and the engine is closed. Each rank keeps what was written to its "
    "own copy (memory Drift), which differs from rank to rank, unless all have written the same. Enter "
    "engine.agreed(together=True) on all ranks before: it averages these weights."
)
MENDED = (
    "Gradients of a backward were not finite on some rank, and an optimizer steps with those that are finite now. Each "
    "such backward is averaged densely before anybody looks at its gradients, as by plain DDP, with as many bytes."
)
MOVED = (
    "{} has moved weights before it called its closure, as SAM does, by gradients that are each rank's own, so that "
    "ranks would not come back to equal weights. Write it as two steps, or train at a density of 1 without node_size."
)
AVERAGE = "_is_an_average"
"""Attribute of gradients that are averages. A weak reference would not let a module's ``to`` replace them."""
TWO = (
    "Two optimizers step {} after one backward. The first one has exchanged its gradient, and the second one would "
    "step with an average that is meant for the first. Call backward before each of the two steps, or let one of them "
    "hold the parameter."
)
PATIENCE = 10
"""Steps alone after which that is said."""
ALONE = (
    "{} without a backward through the wrapped model: gradients are not averaged, unless you do so yourself, and ranks "
    "drift apart. Call the wrapped model, and in Lightning's manual optimization self.manual_backward(loss) in place "
    "of loss.backward()."
)


class OptimizerBinding(MemoryChoice):
    """Lets gradients be exchanged when optimizers step; optimizers are found by their first step.

    Args:
        stepper: exchanges gradients.
        left_open: see :class:`.MemoryChoice`.
        open_exchange: likewise.
        unfinished: whether a backward has handed over some gradients and not all.
    """

    def __init__(self, stepper: Stepper, left_open: bool, open_exchange: bool, unfinished: Callable[[], bool]) -> None:
        super().__init__(stepper, left_open, open_exchange)
        self._unfinished = unfinished
        self.watchers: list[Callable[[Optimizer], None]] = []
        """Called before each step."""
        self._outermost: Optimizer | None = None
        """The optimizer that is taking a step, of nested ones the outermost."""
        self._thread = 0
        """Where it does so."""
        self._rehearsing = False
        """True if the step that an optimizer is taking only makes its state."""
        self._several = any(network.world_size > 1 for network in stepper.networks)
        self._alone: WeakKeyDictionary[Optimizer, int] | None = WeakKeyDictionary() if self._several else None
        """Steps by optimizer, until the first exchange; None from then on, and with one rank."""
        self._adam = AdamRule(keeps_moments=stepper.settings.fallback)  # dense steps go on with them
        self._momentum = MomentumRule()
        self._drift = DriftRule(stepper)
        within, beside = Hold(self._runs), Hold()
        stepper.owners, stepper.rates = self._owners, self._rates
        stepper.on_drift, stepper.on_changed = self._say_apart, self._say_changed
        stepper.moves.on_alike = lambda: self._once(rank_zero_warn, ALIKE)
        stepper.on_mended = lambda: self._once(rank_zero_warn, MENDED)
        stepper.hold = lambda: holding()[-1] if holding() else within if self._outermost is not None else beside
        self._depth = 0
        """Steps of optimizers that run within each other."""
        self._averaged: dict[str, ref[Optimizer]] = {}
        """By parameter, which optimizer has exchanged its gradient last; the average is marked."""
        self._holds: tuple[Optimizer, list[str]] | None = None
        """The optimizer whose step has begun last, and what it holds."""
        self._empty: list[Parameter] = []
        """Parameters without a gradient while their optimizer passes over a skipped step."""
        call_around_steps(self)

    def _owners(self, names: Iterable[str]) -> dict[Stepper, list[str]]:
        """Return who exchanges these parameters: of several engines that have one, the one that came last."""
        later = list(reversed(in_life()))
        if later == [self]:
            return {self._stepper: list(names)}
        found: dict[Stepper, list[str]] = {}
        for name in names:
            key = id(self._parameters[name])
            owner = next((one for one in later if key in one._names), self)
            found.setdefault(owner._stepper, []).append(owner._names[key])
        return found

    def _rates(self) -> dict[str, float]:
        """Return the learning rate of each parameter; of the optimizer that steps, where others hold it, too."""
        found: dict[str, float] = {}
        for optimizer in (*self.optimizers, *([] if self._outermost is None else [self._outermost])):
            for settings in optimizer.param_groups:
                if "lr" in settings:
                    rate = float(settings["lr"])  # whether it is 0 decides what is sent: for a tensor, the host waits
                    found.update((self._names[id(p)], rate) for p in settings["params"] if id(p) in self._names)
        return found

    def know(self, optimizers: Iterable[Optimizer]) -> None:
        """Note optimizers that are about to take the step of a flush."""
        for optimizer in optimizers:
            if held := self._held(optimizer):
                self._meet(optimizer, held)

    def check_closure(self, optimizer: Optimizer, calls: int, moved: bool) -> None:
        """Refuse a second call of a closure in a step whose gradients are exchanged, and one with other weights.

        Raises:
            RuntimeError: on each rank that does so.
        """
        if calls == 1 and not moved:
            return
        if not ids_of(optimizer).isdisjoint(self._mine) and not self._stepper.steps_aside:
            with self._stepper.failing_together("in the step"):
                raise RuntimeError((TWICE if calls > 1 else MOVED).format(type(optimizer).__name__))

    def before(self, optimizer: Optimizer) -> None:
        """Exchange what an optimizer holds, and let its rule act; its gradients are there."""
        held = self._held(optimizer)
        if not held:  # it may run in another thread
            for watch in self.watchers:
                watch(optimizer)
            return
        self._holds = optimizer, held
        fresh = not self._stepper.fresh.isdisjoint(held)
        # Gradients may be 0 on one rank alone, and ranks have to decide alike: where there is one to exchange, they do.
        self._rehearsing = not fresh and rehearses(optimizer)
        if self._rehearsing:
            # The state that is about to be made is that of the memory which suits the optimizer.
            self._meet(optimizer, held)
            self.suit(self.optimizers)
            if self.takes(optimizer):
                self._adam.rehearse(optimizer, self._served(optimizer))
            return
        self._depth += 1
        if self._outermost is None:
            self._outermost, self._thread = optimizer, get_ident()
            self._meet(optimizer, held)
            if fresh:  # also where the step is skipped
                self._alone = None
            elif self._stepper.flushed is None:
                self._count_alone(optimizer, self._mine)
            self._step(optimizer, held)
        for watch in self.watchers:
            watch(optimizer)

    def _held(self, optimizer: Optimizer) -> list[str]:
        """Return the names of the engine's parameters that an optimizer holds, in the order of the model."""
        ids = ids_of(optimizer)
        return [name for key, name in self._mine.items() if key in ids]

    def exchanges(self, parameter: Parameter) -> bool:
        """Return True if the gradient of a parameter would be exchanged if an optimizer stepped it now."""
        return bool(self._stepper.local([parameter]))

    def _meet(self, optimizer: Optimizer, held: Sequence[str]) -> None:
        """Note an optimizer that steps for the first time, and cut groups by what it holds."""
        self._stepper.record.hold(ids_of(optimizer))
        if optimizer not in [known() for known in self._found]:
            self._replace(optimizer)
            self._found.append(ref(optimizer))
        self._stepper.split(held)

    def _step(self, optimizer: Optimizer, held: Sequence[str]) -> None:
        stepper, inner = self._stepper, stepping(optimizer)
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
        by = ref(optimizer)
        for name in (*exchanged.averages, *exchanged.moving):
            grad = stepper.parameters[name].grad
            assert grad is not None
            self._averaged[name] = by
            setattr(grad, AVERAGE, True)
        self._act(inner, exchanged.averages, 1)
        self._drift.before(inner, self._own, exchanged.moving, getattr(optimizer, "grad_scale", None))

    def _act(self, inner: Optimizer, averages: Mapping[str, Average], steps: int) -> None:
        """Let an optimizer's rule act on averages that have taken the place of gradients, after so many steps."""
        arrived = self._arrivals(inner, averages)
        if self.takes(inner):
            self._adam.before(inner, arrived, self._stepper.comm.world_size)
        elif type(inner) is SGD:
            self._momentum.before(inner, self._own, arrived, self._spends(inner), steps)
        self._adam.leave(inner)

    def exchange(self, names: Sequence[str]) -> bool:
        """See :meth:`.Engine.exchange`."""
        stepper = self._stepper
        if stepper.settings.memory_in_use.reads_rates:
            raise RuntimeError(
                "engine.exchange() knows no learning rates, and Residual(rates=True) needs them. Leave rates=False."
            )
        if any(group.drifts for group in stepper.groups if not group.spans.keys().isdisjoint(names)):
            raise RuntimeError(
                "engine.exchange() averages gradients, and memory Drift what optimizers of torch do to weights. Leave "
                "out the call, or choose memory='residual'."
            )
        if stepper.settings.memory_in_use.needs_second:
            raise RuntimeError(
                "engine.exchange() is for optimizers that torch does not have, and Adam's steps are taken when the "
                "optimizer steps. Leave out the call."
            )
        self._alone = None
        stepper.record.held |= set(names)
        stepper.split(names)
        exchanged = stepper.exchange(names, kind=EXCHANGE)
        stepper.applied(names)
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
        stepper, problem = self._stepper, ""
        sparse = not stepper.steps_aside
        waits = self._unfinished() and (self._several or sparse)
        if torch._C._current_graph_task_id() != -1 and (waits or sparse):
            problem = INSIDE.format(type(optimizer).__name__)
        elif waits:
            problem = UNFINISHED
        elif stepper.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            problem = CAPTURED.format(type(optimizer).__name__)
        for name in held:
            by = self._averaged.get(name)
            if by is None or (other := by()) is None or other is optimizer or name in stepper.fresh:
                continue
            if hasattr(stepper.parameters[name].grad, AVERAGE):
                problem = TWO.format(name)
        if problem:
            with stepper.failing_together("in the step"):
                raise RuntimeError(problem)

    def _arrivals(self, optimizer: Optimizer, averages: Mapping[str, Average]) -> Iterator[OfGroup]:
        """Iterate over the groups of an optimizer: their settings, and the averages that they have got."""
        names, groups = self._own, {} if self._stepper.direct else self._stepper.group_of
        for settings in optimizer.param_groups:
            arrived = []
            for p in settings["params"]:
                name = names.get(id(p), "")
                if p.grad is not None and name in averages:
                    group = groups.get(name)
                    whole = group is None or group.always_whole
                    arrived.append(Arrived(p, name, None if whole else group, averages[name]))
            yield settings, arrived

    def _pass_over(self, held: Sequence[str]) -> None:
        """Let an optimizer pass over a skipped step: it finds no gradients, and users find zeros afterwards."""
        for p in (self._stepper.parameters[name] for name in held):
            if p.grad is not None:
                p.grad = None
                self._empty.append(p)

    def _say_skipped(self) -> None:
        known = self._stepper.record.counts
        if known.skipped == 1:
            self._once(
                rank_zero_warn,
                f"A gradient was not finite on some rank in the backward after step {known.step}: no rank takes this "
                "step. sparse/steps/skipped counts such steps from now on.",
            )

    def _say_apart(self) -> None:
        """Warn on each rank that finds it: rank 0 may not be among those whose parts differ."""
        if APART not in self._told:
            self._told.add(APART)
            warnings.warn(APART, stacklevel=2)

    def _say_changed(self) -> None:
        self._once(rank_zero_warn, CHANGED)

    def after(self, optimizer: Optimizer) -> None:
        """Act after an optimizer's step.

        Raises:
            RuntimeError: on all ranks, if it has ignored the closure in which gradients would have been exchanged.
        """
        hold, before = None, self._holds
        held = before[1] if before is not None and before[0] is optimizer else self._held(optimizer)
        if not held:
            return
        self._holds = None
        past = self._outermost is None and not self._rehearsing
        if past and self._stepper.local([self._parameters[name] for name in held]):
            with self._stepper.failing_together("in the step"):
                raise RuntimeError(IGNORED.format(type(optimizer).__name__))
        if self._outermost is not None:
            self._depth -= 1
            if self._depth == 0:
                self._stepper.applied(held)
                self._drift.after()
                hold = self._stepper.hold()
                try:
                    self._stepper.follow()
                finally:
                    self._outermost = None
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
        if self._outermost is not None and self._thread == get_ident() and not self._runs(self._depth):
            self._stepper.hold().end()
            self._outermost, self._depth, self._empty = None, 0, []
            self._adam.after()
            self._momentum.forget()
            self._drift.after(failed=True)

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
        """See :meth:`.MemoryChoice.begin_step`."""
        self._alone = None
        super().begin_step()

    def own_states(self, parked: Mapping[int, str]) -> dict[str, dict[str, torch.Tensor]]:
        """Return what optimizers keep of parameters that drift, also of some that are frozen now: names by id."""
        return self._drift.own_states(self.optimizers, parked)

    @property
    def waiting_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """What optimizers are to keep of parameters that drift, from when they step them next."""
        return self._drift.waiting

    def meet_states(self) -> None:
        """Average what optimizers keep of parameters that drift, between two steps; collective."""
        self._drift.meet(self.optimizers)

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Follow a state that was loaded: what has waited is what it remembers."""
        self._drift.load(state["optimizers"])
        self._momentum.go_on({name for name, vectors in state["parameters"].items() if "residual" in vectors})

    def close(self) -> None:
        """Leave optimizers alone; warn of what ranks have done alone until now, unless an error is the news."""
        self.forget()
        if sys.exc_info()[0] is None:
            if steps := max((self._alone or {}).values(), default=0):
                self._once(rank_zero_warn, ALONE.format("1 step" if steps == 1 else f"{steps} steps"), kind="alone")
            # Who has not written before may have loaded the best weights for the end, which are equal on all ranks.
            if CHANGED in self._told and self._stepper.copies.changed():
                self._once(rank_zero_warn, KEPT)
        self._adam.close()
        self._drift.close()
        if self in in_life():  # it is closed for the first time
            local = set(map(id, self._stepper.local([*self._parameters.values()])))
            LeftOver({name: p for name, p in self._parameters.items() if id(p) in local})
            leave_alone(self)

    def _count_alone(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Count a step with gradients that no exchange has averaged; warn if the user does not seem to know."""
        if self._alone is None:
            return
        sparsified = self._sparsified & names.keys()
        held = (p for group in optimizer.param_groups for p in group["params"] if id(p) in sparsified)
        if any(p.grad is not None for p in held):
            self._alone[optimizer] = steps = self._alone.get(optimizer, 0) + 1
            if steps == PATIENCE:
                self._once(rank_zero_warn, ALONE.format(f"{steps} steps"), kind="alone")
