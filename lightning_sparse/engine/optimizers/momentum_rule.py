"""The step rule of momentum SGD: what averages have waited for is made up for after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.optimizers.momentum import Momentum, Spending, Stepped

WAITED = "waited"
"""Where SGD's state of a parameter keeps the steps since an average arrived, see :class:`.Stepped`."""


class MomentumRule:
    """Spends momentum of averages that have waited.

    See :meth:`~lightning_sparse.engine.optimizers.momentum.Spending.spend_`.

    torch's own step is taken as ever; what is spent early is moved from the velocities to the parameters behind it.

    Args:
        name_of: the name of a parameter, given by its id; None where it is not the engine's.
        group_of: the group of a parameter, by name; None where averages are dense.
        handed_out: names of the parameters that got an average since an optimizer took a step.
        flushed: whether the latest averages are those of a flush between two steps.
        serves: whether this is for an optimizer, which is ``torch.optim.SGD`` then, and none that is around it.
    """

    def __init__(
        self,
        name_of: Callable[[int], str | None],
        group_of: Callable[[str], GroupReducer | None],
        handed_out: Callable[[Optimizer], Set[str]],
        flushed: Callable[[], bool],
        serves: Callable[[Optimizer], bool],
    ) -> None:
        self._name_of = name_of
        self._group_of, self._handed_out, self._flushed, self._serves = group_of, handed_out, flushed, serves
        self._spending = Spending()
        self._noted: list[_Noted] = []
        """The step that an optimizer is taking."""
        self._kept: Set[str] = frozenset()
        """Parameters whose residuals are those of an earlier engine."""
        self._met: WeakSet[Optimizer] = WeakSet()
        """Optimizers that have stepped since the residuals are as they are."""

    def go_on(self, names: Set[str]) -> None:
        """The residuals of these parameters were loaded, and all others start empty."""
        self._kept, self._met = names, WeakSet()

    def before(self, optimizer: Optimizer) -> None:
        """Note with which averages it steps, and by which settings."""
        if type(optimizer) is not SGD:
            return
        if optimizer not in self._met:
            self._met.add(optimizer)
            for parameter, state in optimizer.state.items():
                if (name := self._name_of(id(parameter))) is not None and name not in self._kept:
                    state.pop(WAITED, None)  # of residuals that are gone; others may have trained since
        serves = self._serves(optimizer)
        if not serves and not any(WAITED in state for state in optimizer.state.values()):
            return
        skip, handed_out = getattr(optimizer, "found_inf", None), self._handed_out(optimizer)
        for settings in optimizer.param_groups:
            by = Momentum.of(settings)
            early, whole = [], []
            for parameter in settings["params"]:
                if by is None:
                    optimizer.state.get(parameter, {}).pop(WAITED, None)
                name = self._name_of(id(parameter))
                if by is None or parameter.grad is None or name is None or name not in handed_out:
                    continue
                group = self._group_of(name)
                grad = parameter.grad.clone() if _adds_to_grad(settings, parameter.grad) else parameter.grad
                if group is None or group.all_arrived or not group.sparsified:
                    if WAITED in optimizer.state.get(parameter, {}):
                        whole.append((parameter, grad))
                elif serves:
                    early.append((parameter, grad))
                else:
                    optimizer.state.get(parameter, {}).pop(WAITED, None)
            if by is not None and (early or whole):
                self._noted.append(_Noted(optimizer, early, whole, by, skip, 0 if self._flushed() else 1))

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
                stepped.append(Stepped(parameter, grad, velocity, state[WAITED]))
            self._spending.spend_(stepped, by, skip, steps)
            for parameter, _ in whole:  # nothing of them waits any more
                if skip is None:
                    del optimizer.state[parameter][WAITED]
                else:
                    optimizer.state[parameter][WAITED].mul_(skip > 0)

    def forget(self) -> None:
        """A step that has failed is not made up for."""
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


def _adds_to_grad(settings: Mapping[str, Any], grad: Tensor) -> bool:
    """Whether a step leaves more than the average in ``.grad``: torch adds Nesterov's velocity there in ``foreach``."""
    foreach = settings["foreach"] or (settings["foreach"] is None and grad.device.type != "cpu")
    copied = settings["weight_decay"] or settings["maximize"] or settings["fused"]
    return bool(settings["nesterov"] and foreach and not copied)
