"""What is done in an optimizer's step, around what the optimizer does."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_sparse.optim import weakly

_owners: weakref.WeakValueDictionary[tuple[type, int], AroundSteps] = weakref.WeakValueDictionary()
"""Of the latest engine of each parameter, by kind and the parameter's id: one that was not closed does nothing for a
later one."""


class AroundSteps(ABC):
    """Is called around every step of every optimizer of the process, until it is closed.

    Args:
        names: of parameters, by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        _owners.update({(type(self), key): self for key in names})
        self._hooks = [
            register_optimizer_step_pre_hook(weakly(self._begin)),
            register_optimizer_step_post_hook(weakly(self._end)),
        ]

    @abstractmethod
    def before(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step, and its gradients are there. Of nested ones, the outer one comes first."""

    @abstractmethod
    def after(self) -> None:
        """An optimizer has finished a step."""

    @abstractmethod
    def forget(self) -> None:
        """Undo what :meth:`before` has done, if a step has failed since."""

    def name(self, key: int) -> str | None:
        """Of a parameter, given by its id; None where it is not this engine's, or not any more."""
        return self._names.get(key) if _owners.get((type(self), key)) is self else None

    def close(self) -> None:
        """Leave optimizers alone."""
        self.forget()
        for hook in self._hooks:
            hook.remove()

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The gradients may be formed within the step, by a closure."""
        self.forget()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.before(optimizer)
            return None

        def then_go_on() -> Any:
            result = closure()
            self.before(optimizer)
            return result

        if len(args) > 1:
            return (args[0], then_go_on, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_go_on}

    def _end(self, *_: Any) -> None:
        self.after()
