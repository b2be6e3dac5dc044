"""One pair of torch's hooks around the steps of all optimizers of the process; and signals that wait meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import call
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_sparse.engine.signals import Hold


class Watching(Protocol):
    """What is called around the steps of optimizers."""

    def before(self, optimizer: Optimizer) -> None:
        """Act before a step; gradients are there."""

    def after(self, optimizer: Optimizer) -> None:
        """Act after a step."""

    def forget(self) -> None:
        """Undo what :meth:`before` has done, if a step has failed since."""

    def check_closure(self, optimizer: Optimizer, calls: int, moved: bool) -> None:
        """Look how often an optimizer has called its closure in one step, and whether it has moved weights before."""


class Refusing(Protocol):
    """What may refuse steps of optimizers."""

    def check(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer must not step with the gradients that are there."""


_called: list[ref[Any]] = []
"""Who is called."""
_refusing: WeakSet[Refusing] = WeakSet()
"""Who is asked before them."""
_changes = 0
"""Times that somebody began or ceased to be called."""
_holds: list[Hold] = []
"""Of contexts in which signals wait while optimizers step."""


@contextmanager
def uninterrupted() -> Iterator[Hold]:
    """Hold back signals while optimizers step in this context, but not while their closures run.

    Signals are delivered when the context ends, which may be later than the step. Of optimizers without torch's hooks,
    only signals that the caller holds back are held.

    Yields:
        The :class:`Hold`, so that the caller can start it earlier.
    """
    _register_hooks()
    hold = Hold()
    _holds.append(hold)
    try:
        yield hold
    finally:
        _holds.remove(hold)
        hold.end()


def holding() -> list[Hold]:
    """Return what holds back signals while optimizers step, in contexts of :func:`uninterrupted`."""
    return _holds


def in_life() -> list[Any]:
    """Return those who are called around the steps of optimizers, in the order in which they came."""
    return list(filter(None, map(call, list(_called))))


def changes() -> int:
    """Return how often somebody has begun or ceased to be called."""
    return _changes


def call_around_steps(one: Watching) -> None:
    """Call an object around the steps of all optimizers, as long as it lives; see :func:`leave_alone`."""
    global _changes
    _register_hooks()
    _called.append(ref(one, _leave))
    _changes += 1


def ask_before_steps(one: Refusing) -> None:
    """Let an object refuse steps of all optimizers, as long as it lives."""
    _register_hooks()
    _refusing.add(one)


def leave_alone(one: Watching) -> None:
    """Do not call an object any more."""
    for known in list(_called):
        if known() is one:
            _leave(known)


def _leave(known: ref[Any]) -> None:
    global _changes
    _called[:] = [other for other in _called if other is not known]
    _changes += 1


@cache
def _register_hooks() -> None:
    """Register them once, for all engines: torch goes through hooks when a step begins, before a closure makes others.

    Where an optimizer's step is compiled, they are not.
    """
    register_optimizer_step_pre_hook(torch.compiler.disable(_come_last))  # type: ignore[no-untyped-call]
    register_optimizer_step_post_hook(torch.compiler.disable(_end))  # type: ignore[no-untyped-call]


def _come_last(optimizer: Optimizer, *_: Any) -> None:
    """Put :func:`_begin` behind an optimizer's own hooks, which clip gradients or add noise to them.

    torch asks for the optimizer's own hooks when it has gone through those of all optimizers.
    """
    hooks = optimizer._optimizer_step_pre_hooks
    if next(reversed(hooks.values()), None) is not _last:
        if (handle := _handles.get(optimizer)) is not None:
            handle.remove()
        _handles[optimizer] = optimizer.register_step_pre_hook(_last)


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let bindings act, at once or behind a closure that forms the gradients within the step."""
    for each in in_life():
        each.forget()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):  # some optimizers take something else
        _before(optimizer)
        return None
    calls, before = 0, _versions(optimizer)

    def then_go_on() -> Any:
        nonlocal calls
        for hold in _holds:
            hold.end()
        moved = _versions(optimizer) != before
        result = closure()
        calls += 1
        for each in in_life():
            each.check_closure(optimizer, calls, moved)
        _before(optimizer)
        return result

    if len(args) > 1:
        return (args[0], then_go_on, *args[2:]), kwargs
    return args, {**kwargs, "closure": then_go_on}


def _versions(optimizer: Optimizer) -> int:
    """Return how often anybody has written to weights of an optimizer, but for writes past autograd."""
    return sum(p._version for settings in optimizer.param_groups for p in settings["params"])


_last: Any = torch.compiler.disable(_begin)  # type: ignore[no-untyped-call]
_handles: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()


def _before(optimizer: Optimizer) -> None:
    for one in list(_refusing):
        one.check(optimizer)
    for each in in_life():
        each.before(optimizer)  # signals are heard while ranks wait for each other
    for hold in _holds:
        hold.start()


def _end(optimizer: Optimizer, *_: Any) -> None:
    for each in in_life():
        each.after(optimizer)
