"""What happens around the steps of all optimizers of the process: listeners are called, and signals wait.

One pair of torch's hooks serves all engines. Signals wait so that no handler sees parameters or residuals half-changed.
"""

from __future__ import annotations

import functools
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Handler = Callable[[int, FrameType | None], Any]
NAMES = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SAVING = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
"""Signals that ask a process to save its work."""
HELD = (signal.SIGINT, *SAVING)
_listeners: list[weakref.ref[StepListener]] = []
"""In the order in which they came."""
_holds: list[Hold] = []
"""Of contexts in which signals wait while optimizers step."""


class Hold:
    """Holds back the signals that have handlers in Python, and delivers them afterwards, in order.

    Only the main thread handles signals; in any other thread, nothing is held.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._pending: list[tuple[int, FrameType | None]] = []

    def start(self, signals: Iterable[int] = HELD) -> None:
        """Hold back these signals, in addition to those that are held already."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signals:
            handler = signal.getsignal(number)
            if callable(handler) and number not in self._handlers:
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def end(self) -> None:
        """Restore the handlers and run them for the signals that have arrived."""
        try:
            while self._handlers:
                number = next(iter(self._handlers))
                if signal.getsignal(number) == self._note:
                    signal.signal(number, self._handlers[number])
                del self._handlers[number]
        except BaseException:  # of a handler that runs again already
            self.end()
            raise
        self._deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in (other for other, _ in self._pending):
            self._pending.append((number, frame))

    def _deliver(self) -> None:
        while self._pending:
            number, frame = self._pending.pop(0)
            try:
                handler = signal.getsignal(number)
                if callable(handler):
                    handler(number, frame)
            finally:
                self._deliver()  # the signals after it, if a handler raises


@contextmanager
def held() -> Iterator[None]:
    """Hold back signals in this context; they are delivered when it ends."""
    hold = Hold()
    hold.start()
    try:
        yield
    finally:
        hold.end()


class StepListener(Protocol):
    """Is called around every step of every optimizer of the process, also of optimizers that nobody bound.

    Also around a step that had begun before it began to listen: a closure may wrap the model again. It is then called
    after a step without having been called before it.
    """

    def before(self, optimizer: Optimizer) -> None:
        """Act before the optimizer's step, when its gradients are there. Of nested ones, the outer one comes first."""

    def after(self, optimizer: Optimizer) -> None:
        """Act after the optimizer's step."""

    def forget(self) -> None:
        """Undo what :meth:`before` has done, if a step has failed since."""

    def holds(self, key: int) -> bool:
        """Return True if it is for a parameter, given by its id."""


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


def listen(listener: StepListener) -> None:
    """Call it from now on, until it leaves or is gone."""
    _register_hooks()
    _listeners.append(weakref.ref(listener, _listeners.remove))


def leave(listener: StepListener) -> None:
    """Call it no more."""
    _listeners[:] = [known for known in _listeners if known() is not listener]


def owner(key: int) -> StepListener | None:
    """Return the latest listener for a parameter, given by its id: an earlier one does nothing for it any more."""
    for known in reversed(_listeners):
        listener = known()
        if listener is not None and listener.holds(key):
            return listener
    return None


def _all() -> list[StepListener]:
    return [listener for known in list(_listeners) if (listener := known()) is not None]


@functools.cache
def _register_hooks() -> None:
    """Register them once, for all engines: torch goes through hooks when a step begins, before a closure makes others.

    Where an optimizer's step is compiled, they are not.
    """
    register_optimizer_step_pre_hook(torch.compiler.disable(_begin))  # type: ignore[no-untyped-call]
    register_optimizer_step_post_hook(torch.compiler.disable(_end))  # type: ignore[no-untyped-call]


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let listeners act, at once or behind a closure that forms the gradients within the step."""
    for each in _all():
        each.forget()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _before(optimizer)
        return None

    def then_go_on() -> Any:
        for hold in _holds:
            hold.end()
        result = closure()
        _before(optimizer)
        return result

    if len(args) > 1:
        return (args[0], then_go_on, *args[2:]), kwargs
    return args, {**kwargs, "closure": then_go_on}


def _before(optimizer: Optimizer) -> None:
    for hold in _holds:
        hold.start()
    for each in _all():
        each.before(optimizer)


def _end(optimizer: Optimizer, *_: Any) -> None:
    for each in _all():
        each.after(optimizer)
