"""Signals wait while an optimizer steps, so that no handler sees parameters of which half are updated."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.optim import Optimizer

Handler = Callable[[int, FrameType | None], Any]
NAMES = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SAVING = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
"""Signals that ask a process to save its work."""
HELD = (signal.SIGINT, *SAVING)


class Hold:
    """Holds back the signals that have handlers in Python, and delivers them afterwards, in order.

    Only the main thread handles signals: in any other one, nothing is held, and nothing needs to be.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._pending: list[tuple[int, FrameType | None]] = []

    def start(self, signals: Iterable[int] = HELD) -> None:
        """Hold these back, next to those that are held already."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signals:
            handler = signal.getsignal(number)
            if callable(handler) and number not in self._handlers:
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def end(self) -> None:
        """Give the handlers back, and let them run for what has come."""
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
                self._deliver()  # what came after it, where it raises


@contextmanager
def held() -> Iterator[None]:
    """Hold back signals in this context; they are delivered when it ends."""
    hold = Hold()
    hold.start()
    try:
        yield
    finally:
        hold.end()


@contextmanager
def uninterrupted(optimizer: Optimizer) -> Iterator[Hold]:
    """Hold back signals while an optimizer steps in this context, but not while its closure runs.

    They are delivered when the context ends, which may be later than the step. Where the step of an optimizer begins is
    told by torch's hooks: of one without them, as Lightning accepts, nothing is held but what the caller starts.

    Args:
        optimizer: that may step, with a closure or without, any number of times.

    Yields:
        What holds them back, to be started earlier.
    """
    hold = Hold()

    def before(_: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hold signals back where the step begins, as a hook of torch."""
        own, *others = args
        closure = others[0] if others else kwargs.get("closure")
        if closure is None:
            hold.start()
            return args, kwargs

        def open_to_signals() -> Any:
            hold.end()
            result = closure()
            hold.start()
            return result

        if others:
            return (own, open_to_signals, *others[1:]), kwargs
        return args, {**kwargs, "closure": open_to_signals}

    hooked = hasattr(optimizer, "_optimizer_step_pre_hooks")
    watching = optimizer.register_step_pre_hook(before) if hooked else None
    try:
        yield hold
    finally:
        if watching is not None:
            watching.remove()
        hold.end()
