"""The step rule of Adam and AdamW: takes steps of sparsified parameters in place of the optimizer's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_sparse.core.layout import laid_out, own, shaped
from lightning_sparse.engine.delivery import Delivery
from lightning_sparse.engine.optimizers.arrived import OfGroup
from lightning_sparse.engine.optimizers.kinds import holds, refusal, settings_of
from lightning_sparse.engine.optimizers.scaled import MANY, Lengths, advice, factors_of
from lightning_sparse.methods.memory import SecondMoment
from lightning_sparse.ops.adam import Moved, Step, Steps
from lightning_sparse.ops.length import DECAY
from lightning_sparse.ops.sampled import Sampler

STEP = "step"
"""Key of the steps that were taken in torch's state of a parameter."""
_left: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
"""Hooks on the next step of optimizers that take all of their steps again."""


class AdamRule:
    """Lets averages of :class:`~lightning_sparse.SecondMoment` act, when an optimizer takes its step.

    ``p -= lr sqrt(n) grad / divisor``, after decoupled weight decay, where the memory knows a divisor. While the
    optimizer steps, such parameters have no gradient, so that it passes them over; afterwards they have it again.

    Args:
        lengths: of averages, as optimizers got them.
        tell: is given a sentence where averages were changed otherwise than by a factor.
        keeps_moments: whether moments of the optimizer's own are kept, of parameters that are not stepped by them now.
    """

    def __init__(self, lengths: Lengths, tell: Callable[[str], None], keeps_moments: bool) -> None:
        self._lengths, self._tell, self._keeps_moments = lengths, tell, keeps_moments
        self._steps, self._sampler = Steps(), Sampler()
        self._aside: list[tuple[Parameter, Tensor]] = []
        """Gradients that were taken from parameters while an optimizer steps."""
        self._counting: WeakSet[Optimizer] = WeakSet()
        """Optimizers that have counts of steps that were taken here."""

    @staticmethod
    def memory(
        optimizers: Sequence[Optimizer],
        parameters: Collection[int],
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
    def before(self, optimizer: Optimizer, arrived: Sequence[OfGroup]) -> None:
        """Step, and take the gradients away."""
        # As a GradScaler hands them over to fused optimizers: gradients are still scaled, and the step may be none.
        scale, skip = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        served: dict[Delivery, dict[str, Parameter]] = {}
        for one in (one for _, ones in arrived for one in ones):
            if one.delivery is not None and one.group is not None and one.group.memory.needs_second:
                served.setdefault(one.delivery, {})[one.name] = one.parameter
        for served_one, parameters in served.items():
            self._follow_changes(served_one, parameters, scale)
        divisors = {each: each.divisors() for each in served}
        for settings, ones in arrived:
            moved: dict[int, list[Moved]] = {}
            for parameter, name, group, delivery in ones:
                if group is None or delivery is None or name not in served.get(delivery, {}):
                    continue
                indices, divisor = divisors[delivery][name]
                assert parameter.grad is not None
                part, grad = own(parameter), own(parameter.grad)
                if indices is None:
                    divisor = shaped(divisor, part)
                moved.setdefault(delivery.ranks, []).append(Moved(part, grad, divisor, indices))
                # A dense plan has residuals of a loaded state only, and its optimizers step from then on.
                self._take_aside(optimizer, parameter, 1, keeps=self._keeps_moments or group.plan.dense)
            for ranks, those in moved.items():
                self._steps.take_(those, Step(*_rates(settings, ranks), scale, skip))

    @torch.no_grad()
    def rehearse(self, optimizer: Optimizer, served: Collection[int]) -> None:
        """Keep sharded parameters whose steps are taken here from a step that only makes an optimizer's state.

        Args:
            optimizer: that takes it.
            served: ids of these parameters.
        """
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) in served and own(parameter) is not parameter:
                self._take_aside(optimizer, parameter, 0, keeps=self._keeps_moments)

    def _take_aside(self, optimizer: Optimizer, parameter: Parameter, steps: int, keeps: bool) -> None:
        """Take a parameter's gradient away while the optimizer steps, and count the steps of one that is sharded.

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

    def _follow_changes(self, delivery: Delivery, parameters: Mapping[str, Parameter], scale: Tensor | None) -> None:
        """Let second moments follow what averages were multiplied by since they were handed out."""
        if delivery.handed is None:
            return
        known = [parameters.get(name) for name in delivery.spans]
        gradients = [None if p is None or p.grad is None else laid_out(own(p.grad), own(p)) for p in known]
        factors = factors_of(delivery.handed, gradients, scale, self._sampler)
        if factors.odd is not None and factors.odd > MANY:
            self._tell(advice(parameters, float(factors.odd)))
        decay = min(delivery.memory.second_decay, DECAY)
        delivery.lengthen_(self._lengths.follow(list(delivery.spans), factors.by, decay))

    def after(self) -> None:
        """Give parameters their gradients back: a step has ended, or has failed."""
        for parameter, grad in self._aside:
            if parameter.grad is None:  # else a step has failed, and new gradients are here
                parameter.grad = grad
        self._aside = []


def _rates(group: Mapping[str, Any], ranks: int) -> tuple[Any, Any]:
    """Return learning rate, and what decay leaves of a parameter: numbers, or () where only the device knows it.

    Args:
        group: settings of an optimizer's.
        ranks: that the averages are means over.
    """
    rate = group["lr"]
    if isinstance(rate, Tensor):
        rate = float(rate) if rate.device.type == "cpu" else rate.view(())
    sign = -1 if group.get("maximize") else 1
    return rate * (math.sqrt(ranks) * sign), 1 - rate * group["weight_decay"]


def _forget_counts(optimizer: Optimizer, which: Callable[[Tensor], bool]) -> None:
    """Remove the state of parameters of which an optimizer only has a count."""
    for parameter, known in list(optimizer.state.items()):
        if known.keys() == {STEP} and which(parameter):
            del optimizer.state[parameter]
