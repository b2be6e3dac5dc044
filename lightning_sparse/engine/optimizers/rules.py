"""Rules for the steps of optimizers: the engine takes Adam's steps, and spends momentum of SGD."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_sparse.core.layout import flattened, laid_out, own, shaped
from lightning_sparse.engine.average import Average
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.optimizers.kinds import holds, refusal, settings_of, stepping
from lightning_sparse.engine.step import Stepper
from lightning_sparse.methods.memory import SecondMoment
from lightning_sparse.ops.adam import Moved, Step, Steps
from lightning_sparse.ops.momentum import Momentum, Spending, Stepped

FEW_GROUPS = 16
"""Parameter groups of an optimizer for each of which all averages of a group of the exchange are looked at."""
STEP = "step"
"""Key of the steps that were taken in torch's state of a parameter."""
_left: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
"""Hooks on the next step of optimizers that take all of their steps again."""
WAITED = "waited"
"""Key of the steps since an average arrived in SGD's state of a parameter, see :class:`.Stepped`."""


class Arrived(NamedTuple):
    """A parameter whose average an optimizer has not applied yet."""

    parameter: Parameter
    """Its ``grad`` is the average."""
    name: str
    group: GroupReducer | None
    """None: its averages are always dense."""
    average: Average
    """Of its group."""


OfGroup = tuple[Mapping[str, Any], Sequence[Arrived]]
"""Of a parameter group of an optimizer: its settings, and what has arrived."""


class AdamRule:
    """Lets averages of :class:`.SecondMoment` act, when an optimizer takes its step.

    ``p -= lr f grad / divisor``, after decoupled weight decay, where the memory knows a divisor and the factor f. While
    the optimizer steps, such parameters have no gradient, so that it passes them over; afterwards they have it again.

    Args:
        keeps_moments: whether moments of the optimizer's own are kept, of parameters that are not stepped by them now.
    """

    def __init__(self, keeps_moments: bool) -> None:
        self._keeps_moments = keeps_moments
        self._steps = Steps()
        self._aside: list[tuple[Parameter, Tensor]] = []
        """Gradients that were taken from parameters while an optimizer steps."""
        self._counting: WeakSet[Optimizer] = WeakSet()
        """Optimizers that have counts of steps that were taken here."""

    @staticmethod
    def memory(
        optimizers: Sequence[Optimizer],
        parameters: Set[int],
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> SecondMoment | None:
        """Return the memory that lets steps of these optimizers be taken here; None: one of them takes its own.

        Args:
            optimizers: all that apply averages.
            parameters: ids of those that are sparsified.
            tell: is given a sentence where optimizers differ in what the memory takes from them.
        """
        holding = [optimizer for optimizer in optimizers if holds(optimizer, parameters)]
        if not holding or any(refusal(optimizer, parameters) for optimizer in holding):
            return None
        settings = settings_of(holding, parameters)
        if len(settings) > 1:
            tell(
                f"Parameters that are sparsified have several pairs of a second beta and eps: {sorted(settings)}. The "
                "largest is taken for all of them."
            )
        return SecondMoment(*max(settings))

    @torch.no_grad()
    def before(self, optimizer: Optimizer, arrived: Iterable[OfGroup], ranks: int) -> None:
        """Step, and take the gradients away.

        Args:
            optimizer: not one around it.
            arrived: what it is about to apply.
            ranks: that averages are means over.
        """
        # As a GradScaler hands them over to fused optimizers: gradients are still scaled, and the step may be none.
        scale, skip = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        divisors: dict[Average, Mapping[str, tuple[Tensor | None, Tensor]]] = {}
        few = len(optimizer.param_groups) <= FEW_GROUPS
        for settings, ones in arrived:
            moved: dict[tuple[Average, float], dict[str, tuple[Tensor, Tensor]]] = {}
            for parameter, name, group, average in ones:
                if group is None or not group.memory.needs_second:
                    continue
                assert parameter.grad is not None
                what = average, group.diversity.factor(ranks)
                moved.setdefault(what, {})[name] = own(parameter), own(parameter.grad)
                # A dense plan has residuals of a loaded state only, and its optimizers step from then on.
                self._take_aside(optimizer, parameter, 1, keeps=self._keeps_moments or group.plan.dense)
            together: dict[float, list[Moved]] = {}
            for (average, longer), those in moved.items():
                by = Step(*_rates(settings, longer), scale, skip)
                sparse = average.arrived({name: part for name, (part, _) in those.items()}) if few else None
                if sparse is not None and self._steps.take_at_(sparse, by):
                    continue
                if average not in divisors:
                    divisors[average] = average.divisors()
                for name, (part, grad) in those.items():
                    indices, divisor = divisors[average][name]
                    divisor = shaped(divisor, part) if indices is None else divisor
                    together.setdefault(longer, []).append(Moved(part, grad, divisor, indices))
            for longer, of_groups in together.items():
                self._steps.take_(of_groups, Step(*_rates(settings, longer), scale, skip))

    @torch.no_grad()
    def rehearse(self, optimizer: Optimizer, served: Collection[int]) -> None:
        """Keep parameters in parts whose steps are taken here from a step that only makes an optimizer's state.

        Args:
            optimizer: that takes it.
            served: ids of these parameters.
        """
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) in served and own(parameter) is not parameter:
                self._take_aside(optimizer, parameter, 0, keeps=self._keeps_moments)

    def _take_aside(self, optimizer: Optimizer, parameter: Parameter, steps: int, keeps: bool) -> None:
        """Take a parameter's gradient away while the optimizer steps, and count steps where it has a part of one.

        Distributed checkpoints cannot load a parameter of which the optimizer has no state at all.

        Args:
            optimizer: that steps.
            parameter: of it.
            steps: that are taken now.
            keeps: whether the optimizer keeps its own state of the parameter.
        """
        assert parameter.grad is not None
        self._aside.append((parameter, parameter.grad))
        parameter.grad = None
        if keeps:
            return
        known = optimizer.state.pop(parameter, {})  # maybe moments of dense steps, or of one without a backward
        if own(parameter) is not parameter:
            self._counting.add(optimizer)
            if optimizer in _left:  # by an earlier engine
                _left.pop(optimizer).remove()
            optimizer.state[parameter] = {STEP: torch.as_tensor(known.get(STEP, 0.0), device="cpu").float() + steps}

    def leave(self, optimizer: Optimizer) -> None:
        """Let an optimizer make its own state of parameters that it steps now, and of which it only has a count."""
        if optimizer in self._counting:
            _forget_counts(optimizer, lambda parameter: parameter.grad is not None)

    def close(self) -> None:
        """Leave all parameters to their optimizers, from their next step on: they may be saved before that."""
        for optimizer in self._counting:
            _left[optimizer] = optimizer.register_step_pre_hook(lambda one, *_: _forget_counts(one, lambda _: True))

    def after(self) -> None:
        """Give parameters their gradients back: a step has ended, or has failed."""
        for parameter, grad in self._aside:
            if parameter.grad is None:  # else a step has failed, and new gradients are here
                parameter.grad = grad
        self._aside = []


def _rates(group: Mapping[str, Any], longer: float) -> tuple[Any, Any]:
    """Return learning rate, and what decay leaves of a parameter: numbers, or () where only the device knows it.

    Args:
        group: settings of an optimizer's.
        longer: factor of the step.
    """
    rate = group["lr"]
    if isinstance(rate, Tensor):
        rate = float(rate) if rate.device.type == "cpu" else rate.view(())
    sign = -1 if group.get("maximize") else 1
    return rate * (longer * sign), 1 - rate * group["weight_decay"]


def _forget_counts(optimizer: Optimizer, which: Callable[[Tensor], bool]) -> None:
    """Remove the state of parameters of which an optimizer only has a count."""
    for parameter, known in list(optimizer.state.items()):
        if known.keys() == {STEP} and which(parameter):
            del optimizer.state[parameter]


class Formed(NamedTuple):
    """The second moment that an optimizer has of a parameter."""

    second: Tensor
    """Corrected for its start at 0, in the parameter's shape."""
    steps: float


def go_on_from_dense(stepper: Stepper, optimizers: Iterable[Optimizer]) -> None:
    """Start second moments where none are known yet, in a step that has just begun; collective.

    An optimizer's v holds squares of averages over ranks, a rank's own squares of one gradient, which are ``f^2`` times
    as large. So they start from that many times the optimizer's, with f as the gradients that are here tell it, which
    is the factor of first steps, too: these are as long as those of dense training. The shortest history of a group
    counts for all of it, and one step where there is none: as Adam's do, second moments without a history start from
    the first gradients then. Where ranks hold states of different parameters, as in ``ZeroRedundancyOptimizer``, all of
    them start from what any of them holds.

    Args:
        stepper: of the groups.
        optimizers: that step parameters.
    """
    groups, parameters, comm, share = stepper.groups, stepper.parameters, stepper.comm, stepper.share
    served = {name: group for group in groups if group.memory.needs_second for name in group.spans}
    if not served:
        return
    if still_open := [group for group in {*served.values()} if group.diversity.is_open(comm.world_size)]:
        squares = stepper.compare([*served])  # on all ranks, also of other parts
        for group in still_open:
            group.diversity.learn(*squares)
    here = _formed(optimizers, {id(parameters[name]): name for name in served})
    found = comm.all_gather_object({name: formed.steps for name, formed in here.items()}, stepper.device)
    holders = {name: rank for rank, each in reversed(list(enumerate(found))) for name in each}
    if not holders:
        return
    known = {name: group.memory.vectors(group.state.memory)["second"] for name, group in served.items()}
    unknown = {name for name in holders if not bool(known[name][served[name].spans[name]].any())}
    fresh = set.intersection(*comm.all_gather_object(unknown, stepper.device))
    for group in groups:
        names = [name for name in group.spans if name in fresh]
        if not names:
            continue
        start = torch.zeros(group.plan.numel, device=stepper.device, dtype=group.wide)
        for name in names:
            if holders[name] == comm.rank:
                parameter, span = own(parameters[name]), group.spans[name]
                second = flattened(laid_out(here[name].second, parameter))
                start[span] = share.part(name, second)
        start = comm.all_reduce(start).mul_(group.diversity.factor(comm.world_size) ** 2)
        steps = min(found[holders[name]][name] if name in fresh else 1.0 for name in group.spans)
        group.memory.start_(group.state.memory, start, [group.spans[name] for name in names], steps)


def _formed(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> dict[str, Formed]:
    """Return what optimizers have formed of the parameters with names by id; by name."""
    formed = {}
    for optimizer in map(stepping, optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {}) if id(parameter) in names else {}
                second, steps = state.get("exp_avg_sq"), float(state.get("step", 0))
                if second is None or steps < 1:
                    continue
                second = own(second)
                if second.shape == own(parameter).shape and bool(second.isfinite().all()):
                    corrected = second / (1 - float(group["betas"][1]) ** steps)
                    formed[names[id(parameter)]] = Formed(corrected, steps)
    return formed


class MomentumRule:
    """Spends momentum of averages that have waited.

    See :meth:`~lightning_sparse.ops.momentum.Spending.spend_`.

    torch's own step is taken as ever; what is spent early is moved from the velocities to the parameters behind it.
    """

    def __init__(self) -> None:
        self._spending = Spending()
        self._noted: list[_Noted] = []
        """The step that an optimizer is taking."""
        self._kept: set[str] = set()
        """Parameters whose residuals were loaded, or that an optimizer has stepped since residuals started empty."""

    def go_on(self, names: Set[str]) -> None:
        """Note that the residuals of these parameters were loaded, and all others start empty."""
        self._kept = set(names)

    def before(
        self, optimizer: SGD, names: Mapping[int, str], arrived: Iterable[OfGroup], serves: bool, steps: int
    ) -> None:
        """Note with which averages an optimizer steps, and by which settings.

        Args:
            optimizer: not one around it.
            names: of the engine's parameters, by id.
            arrived: what it is about to apply.
            serves: whether its momentum is spent.
            steps: gradients that came since its latest step: 1, or 0 in a flush between two steps.
        """
        kept = optimizer.state
        for held in optimizer.param_groups:
            for parameter in held["params"]:
                name = names.get(id(parameter))
                if name is not None and name not in self._kept:
                    self._kept.add(name)
                    kept.get(parameter, {}).pop(WAITED, None)  # of residuals that are gone; others may have trained
        if not serves and not any(WAITED in state for state in kept.values()):
            return
        skip = getattr(optimizer, "found_inf", None)
        for settings, ones in arrived:
            early, whole = [], []
            by = Momentum.of(settings)
            for parameter in settings["params"] if by is None else ():
                kept.get(parameter, {}).pop(WAITED, None)
            for parameter, _, group, delivery in ones if by is not None else ():
                average = parameter, _unchanged(parameter.grad, settings)
                everything = group is None or not group.sparsified or (delivery is not None and delivery.whole)
                if everything:
                    if WAITED in kept.get(parameter, {}):
                        whole.append(average)
                elif serves:
                    early.append(average)
                else:
                    kept.get(parameter, {}).pop(WAITED, None)
            if by is not None and (early or whole):
                self._noted.append(_Noted(optimizer, early, whole, by, skip, steps))

    def after(self) -> None:
        """Spend what is noted."""
        noted, self._noted = self._noted, []
        for optimizer, early, whole, by, skip, steps in noted:
            stepped = []
            for parameter, grad in (*early, *whole):
                state = optimizer.state[parameter]
                velocity, waited = state.get("momentum_buffer"), state.get(WAITED)
                if velocity is None:
                    continue
                if waited is None:
                    waited = torch.zeros_like(parameter, dtype=torch.uint8)
                state[WAITED] = waited.to(torch.uint8)  # torch loads what an optimizer keeps in the parameter's dtype
                stepped.append(Stepped(*map(own, (parameter, grad, velocity, state[WAITED]))))
            self._spending.spend_(stepped, by, skip, steps)
            for parameter, _ in whole:  # nothing of them waits any more
                if skip is None:
                    del optimizer.state[parameter][WAITED]
                else:
                    own(optimizer.state[parameter][WAITED]).mul_(skip > 0)

    def forget(self) -> None:
        """Make up for nothing: the step has failed."""
        self._noted = []


class _Noted(NamedTuple):
    """Parameters of a group of an optimizer's that it steps, and their averages."""

    optimizer: Optimizer
    early: list[tuple[Parameter, Tensor]]
    """Whose averages hold some coordinates."""
    whole: list[tuple[Parameter, Tensor]]
    """Whose averages hold all, also of those that have waited before."""
    by: Momentum
    skip: Tensor | None
    steps: int


def _unchanged(grad: Tensor | None, settings: Mapping[str, Any]) -> Tensor:
    """Return the average as it is after the step, too: ``foreach`` adds Nesterov's velocity to it."""
    assert grad is not None
    foreach = settings["foreach"] or (settings["foreach"] is None and grad.device.type != "cpu")
    copied = settings["weight_decay"] or settings["maximize"] or settings["fused"]
    return grad.clone() if settings["nesterov"] and foreach and not copied else grad
