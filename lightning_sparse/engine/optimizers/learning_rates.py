"""Rescaling of residuals when the learning rate changes (``lr_aware``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_sparse.engine.optimizers.kinds import adapts


class LearningRates:
    """Follows the learning rate of every parameter.

    A residual e that was accumulated at a rate ``lr_old`` stands for a step of ``lr_old e``. At ``lr_new`` it has to be
    ``e lr_old / lr_new`` to stand for the same. At a rate of 0 there are no steps to stand
    for: residuals are left as they are until the rate is above 0 again.

    After a drop residuals are larger than gradients at the new rate would make them. What waits is renewed about once
    in ``1 / density`` steps, and as fast this *surplus* fades: it is multiplied by ``lr_old / lr_new`` when the rate
    changes, by ``1 - density`` in every step, and never falls below 1: after a rise gradients fill the residuals again
    within a few steps. A threshold in units of the accumulator is right for residuals without surplus.

    Args:
        names: of parameters, by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._optimizers: list[Optimizer] = []
        self.latest: dict[str, float] = {}
        """Latest rate above 0, by parameter; replaced and never changed."""
        self.surplus: dict[str, tuple[float, int]] = {}
        """The surplus of each parameter after the last change of its rate, and the step of that change; 1 without an
        entry. Replaced, too."""

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Read rates from these from now on.

        Raises:
            ValueError: for an optimizer that does not multiply gradients by its rate alone, such as Adam.
        """
        chosen = list(optimizers)
        for optimizer in chosen:
            if adapts(optimizer):
                raise ValueError(
                    f"lr_aware=True needs steps of lr * gradient, as torch.optim.SGD takes them, but got "
                    f"{type(optimizer).__name__}, which divides gradients by a size of its own: there is no factor "
                    "that would keep the residual's share of a step. Leave lr_aware=False."
                )
        self._optimizers = chosen

    def load(self, latest: Mapping[str, float], surplus: Mapping[str, Sequence[Any]]) -> None:
        """Go on with what an engine's state holds."""
        self.latest = dict(latest)
        self.surplus = {name: (value, step) for name, (value, step) in surplus.items()}

    @property
    def known(self) -> bool:
        """True if there is an optimizer to follow."""
        return bool(self._optimizers)

    def surplus_of(self, numels: Mapping[str, int], step: int, density: float) -> float:
        """Return the surplus of a group: the geometric mean over its coordinates, as one threshold serves all of them.

        Args:
            numels: coordinates of its parameters, by name.
            step: the current one; void steps do not count.
            density: of the group.
        """
        if not self.surplus:
            return 1.0
        logs = sum(numel * math.log(self._surplus_at(name, step, density)) for name, numel in numels.items())
        return math.exp(logs / sum(numels.values()))

    def change(self, factors: Mapping[str, float], step: int, density: Mapping[str, float]) -> None:
        """Note what residuals have been multiplied by before a step.

        Args:
            factors: see :meth:`factors`.
            step: the current one.
            density: of each parameter's group.
        """
        self.surplus = self.surplus | {
            name: (max(1.0, self._surplus_at(name, step, density[name]) * factor), step)
            for name, factor in factors.items()
        }

    def _surplus_at(self, name: str, step: int, density: float) -> float:
        surplus, since = self.surplus.get(name, (1.0, step))
        return max(1.0, surplus * (1 - density) ** max(0, step - since))

    def factors(self) -> dict[str, float]:
        """Return ``lr_old / lr_new`` of the parameters whose rate has changed since the last call."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        rates = {
            name: rate
            for group in groups
            if (rate := float(group["lr"])) > 0
            for parameter in group["params"]
            if (name := self._names.get(id(parameter))) is not None
        }
        before, self.latest = self.latest, {**self.latest, **rates}
        return {name: before[name] / rate for name, rate in rates.items() if before.get(name, rate) != rate}
