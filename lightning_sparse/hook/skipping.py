"""How an optimizer comes to pass over a void step that the host does not know of yet."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer


class Flags:
    """Flags that optimizers hold during their next step as ``found_inf``, as a ``GradScaler`` hands them over."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()
        self._known: WeakSet[Optimizer] = WeakSet()

    def hand(self, optimizer: Optimizer, void: Tensor) -> None:
        """Let the optimizer's next step do nothing if () the flag, 0.0 or 1.0, is set; for that step alone."""
        self._held[optimizer] = optimizer.found_inf = void  # type: ignore[attr-defined]
        if optimizer not in self._known:
            self._known.add(optimizer)
            optimizer.register_step_post_hook(self._after_step)

    def take_back(self, optimizer: Optimizer) -> None:
        """The step that was meant is over, or did not come."""
        if self._held.pop(optimizer, None) is not None:
            del optimizer.found_inf  # type: ignore[attr-defined]

    def take_all_back(self) -> None:
        """As :meth:`take_back`, of all optimizers."""
        for optimizer in list(self._held):
            self.take_back(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.take_back(optimizer)


def heeds_flags(optimizer: Optimizer) -> bool:
    """Whether an optimizer's next step does nothing at all where ``found_inf`` is set; those of torch that are fused.

    Not SGD with momentum in its first step: it makes the momenta in that step, and would leave them undefined.
    """
    if type(optimizer) not in (Adam, AdamW, SGD) or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    return all(
        group.get("momentum", 0) == 0
        or all(
            isinstance(optimizer.state.get(parameter, {}).get("momentum_buffer"), torch.Tensor)
            for parameter in group["params"]
            if parameter.grad is not None
        )
        for group in optimizer.param_groups
    )
