"""What is done in an optimizer's step, around what the optimizer does."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_numbers = itertools.count()
_called: weakref.WeakValueDictionary[int, AroundSteps] = weakref.WeakValueDictionary()
"""All that are not closed, in the order in which they were made."""
_owners: weakref.WeakValueDictionary[tuple[type, int], AroundSteps] = weakref.WeakValueDictionary()
"""Of the latest engine of each parameter, by kind and the parameter's id: one that was not closed does nothing for a
later one."""


class AroundSteps:
    """Is called around every step of every optimizer of the process, until it is closed.

    Also around a step that has begun before it was made: a closure may wrap the model again.

    Args:
        names: of parameters, by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        _owners.update({(type(self), key): self for key in names})
        self._number = next(_numbers)
        _called[self._number] = self
        _register_hooks()

    def before(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step, and its gradients are there. Of nested ones, the outer one comes first."""

    def after(self, optimizer: Optimizer) -> None:
        """The optimizer has finished a step."""

    def forget(self) -> None:
        """Undo what :meth:`before` has done, if a step has failed since."""

    def name(self, key: int) -> str | None:
        """Of a parameter, given by its id; None where it is not this engine's, or not any more."""
        return self._names.get(key) if _owners.get((type(self), key)) is self else None

    def close(self) -> None:
        """Leave optimizers alone."""
        self.forget()
        _called.pop(self._number, None)


@functools.cache
def _register_hooks() -> None:
    """Once, for all engines: torch goes through the hooks of a step when it begins, before a closure makes others.

    Where an optimizer's step is compiled, they are not.
    """
    register_optimizer_step_pre_hook(torch.compiler.disable(_begin))  # type: ignore[no-untyped-call]
    register_optimizer_step_post_hook(torch.compiler.disable(_end))  # type: ignore[no-untyped-call]


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradients may be formed within the step, by a closure."""
    for each in list(_called.values()):
        each.forget()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _before(optimizer)
        return None

    def then_go_on() -> Any:
        result = closure()
        _before(optimizer)
        return result

    if len(args) > 1:
        return (args[0], then_go_on, *args[2:]), kwargs
    return args, {**kwargs, "closure": then_go_on}


def _before(optimizer: Optimizer) -> None:
    for each in list(_called.values()):
        each.before(optimizer)


def _end(optimizer: Optimizer, *_: Any) -> None:
    for each in list(_called.values()):
        each.after(optimizer)
