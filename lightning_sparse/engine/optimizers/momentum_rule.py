"""The step rule of momentum SGD: what averages have waited for is made up for after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lightning_sparse.core.layout import own
from lightning_sparse.engine.optimizers.arrived import OfGroup
from lightning_sparse.engine.optimizers.momentum import Momentum, Spending, Stepped

WAITED = "waited"
"""Key of the steps since an average arrived in SGD's state of a parameter, see :class:`.Stepped`."""


class MomentumRule:
    """Spends momentum of averages that have waited, also of dense parameters, where all averages come late.

    See :meth:`~lightning_sparse.engine.optimizers.momentum.Spending.spend_`.

    torch's own step is taken as ever; what is spent early is moved from the velocities to the parameters behind it.

    Args:
        name_of: the name of a parameter, given by its id; None where it is not the engine's.
        late: steps between an exchange and the step that applies its averages.
    """

    def __init__(self, name_of: Callable[[int], str | None], late: int) -> None:
        self._name_of, self._late = name_of, late
        self._spending = Spending(late)
        self._noted: list[_Noted] = []
        """The step that an optimizer is taking."""
        self._kept: set[str] = set()
        """Parameters whose residuals were loaded, or that an optimizer has stepped since residuals started empty."""

    def go_on(self, names: Set[str]) -> None:
        """Note that the residuals of these parameters were loaded, and all others start empty."""
        self._kept = set(names)

    def before(self, optimizer: SGD, arrived: Iterable[OfGroup], serves: bool, steps: int) -> None:
        """Note with which averages an optimizer steps, and by which settings.

        Args:
            optimizer: not one around it.
            arrived: what it is about to apply.
            serves: whether its momentum is spent.
            steps: gradients that came since its latest step: 1, or 0 in a flush between two steps.
        """
        kept = optimizer.state
        for parameter in (p for settings in optimizer.param_groups for p in settings["params"]):
            name = self._name_of(id(parameter))
            if name is not None and name not in self._kept:
                self._kept.add(name)
                kept.get(parameter, {}).pop(WAITED, None)  # of residuals that are gone; others may have trained since
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
                if group is None or (everything and not self._late):
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
