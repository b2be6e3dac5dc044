"""The step rule of Adam and AdamW: takes steps of sparsified parameters in place of the optimizer's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparse.core.layout import shaped
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.optimizers.kinds import holds, ids_of, refusal, settings_of, stepping
from lightning_sparse.engine.optimizers.scaled import MANY, Lengths, advice, factors_of
from lightning_sparse.methods.memory import SecondMoment
from lightning_sparse.ops.adam import Moved, Step, Steps
from lightning_sparse.ops.length import DECAY


class AdamRule:
    """Lets averages of :class:`~lightning_sparse.SecondMoment` act, when an optimizer takes its step.

    ``p -= lr sqrt(n) grad / divisor``, after decoupled weight decay, where the memory knows a divisor. While the
    optimizer steps, such parameters have no gradient, so that it passes them over; afterwards they have it again.

    Args:
        name_of: the name of a parameter, given by its id; None where it is not the engine's.
        group_of: the group of a parameter, by name; None where averages are dense.
        handed_out: names of the parameters that got an average since an optimizer took a step.
        world_size: n.
        lengths: of averages, as optimizers got them.
        tell: is given a sentence where averages were changed otherwise than by a factor.
        keeps_moments: whether moments of the optimizer's own are kept, of parameters that are not stepped by them now.
    """

    def __init__(
        self,
        name_of: Callable[[int], str | None],
        group_of: Callable[[str], GroupReducer | None],
        handed_out: Callable[[Optimizer], Set[str]],
        world_size: int,
        lengths: Lengths,
        tell: Callable[[str], None],
        keeps_moments: bool,
    ) -> None:
        self._name_of, self._lengths = name_of, lengths
        self._tell, self._keeps_moments = tell, keeps_moments
        self._group_of, self._handed_out = group_of, handed_out
        self._factor = math.sqrt(world_size)
        self._steps = Steps()
        self._aside: list[tuple[Parameter, Tensor]] = []
        """Gradients that were taken from parameters while an optimizer steps."""

    @staticmethod
    def memory(
        optimizers: Sequence[Optimizer],
        parameters: Collection[int],
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> SecondMoment | None:
        """The memory that lets steps be taken here, for these optimizers; None: one of them takes its own.

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

    def takes(self, optimizer: Optimizer) -> bool:
        """Whether steps of some of an optimizer's parameters are taken here, also within one that is around it."""
        served = {key for key in ids_of(optimizer) if self._owned(key) is not None}
        return bool(served) and refusal(optimizer, served) is None

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Step, and take the gradients away."""
        if stepping(optimizer) is not optimizer or not self.takes(optimizer):
            return
        names = self._handed_out(optimizer)
        # As a GradScaler hands them over to fused optimizers: gradients are still scaled, and the step may be none.
        scale, skip = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        served = [(settings, list(self._served(settings, names))) for settings in optimizer.param_groups]
        self._follow_changes([one for _, ones in served for one in ones], scale)
        divisors = {owner: owner.divisors() for owner in {one.owner for _, ones in served for one in ones}}
        for settings, ones in served:
            moved = []
            for parameter, owner, name in ones:
                indices, divisor = divisors[owner][name]
                assert parameter.grad is not None
                if indices is None:
                    divisor = shaped(divisor, parameter)
                moved.append(Moved(parameter, parameter.grad, divisor, indices))
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None
                if not self._keeps_moments:  # of dense steps, or of one without a backward
                    optimizer.state.pop(parameter, None)
            if moved:
                self._steps.take_(moved, Step(*self._rates(settings), scale, skip))

    def _follow_changes(self, served: Sequence[_Served], scale: Tensor | None) -> None:
        """Let second moments follow what averages were multiplied by since they were handed out."""
        stepped: dict[GroupReducer, dict[str, Parameter]] = {}
        for parameter, owner, name in served:
            stepped.setdefault(owner, {})[name] = parameter
        for owner, parameters in stepped.items():
            if owner.handed is None:
                continue
            gradients = [parameters[name].grad if name in parameters else None for name in owner.spans]
            factors = factors_of(owner.handed, gradients, scale)
            if factors.odd is not None and factors.odd > MANY:
                self._tell(advice(parameters, float(factors.odd)))
            decay = min(owner.memory.second_decay, DECAY)
            owner.lengthen_(self._lengths.follow(list(owner.spans), factors.by, decay))

    def _rates(self, group: Mapping[str, Any]) -> tuple[Any, Any]:
        """Learning rate, and what decay leaves of a parameter: numbers, or () on the device where only it knows."""
        rate = group["lr"]
        if isinstance(rate, Tensor):
            rate = float(rate) if rate.device.type == "cpu" else rate.view(())
        sign = -1 if group.get("maximize") else 1
        return rate * (self._factor * sign), 1 - rate * group["weight_decay"]

    def _served(self, settings: Mapping[str, Any], handed_out: Set[str]) -> Iterator[_Served]:
        """Parameters of a parameter group whose steps are taken here."""
        for parameter in settings["params"]:
            owned = None if parameter.grad is None else self._owned(id(parameter))
            if owned is not None and owned[1] in handed_out:
                yield _Served(parameter, *owned)

    def _owned(self, key: int) -> tuple[GroupReducer, str] | None:
        """Group and name of a parameter, given by its id, whose steps are taken here; else None."""
        name = self._name_of(key)
        group = None if name is None else self._group_of(name)
        return None if name is None or group is None or not group.memory.needs_second else (group, name)

    def after(self) -> None:
        """Give parameters their gradients back: a step has ended, or has failed."""
        for parameter, grad in self._aside:
            if parameter.grad is None:  # else a step has failed, and new gradients are here
                parameter.grad = grad
        self._aside = []


class _Served(NamedTuple):
    """A parameter whose step is taken here."""

    parameter: Parameter
    owner: GroupReducer
    name: str
