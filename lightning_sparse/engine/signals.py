"""Signals wait while parameters or residuals change, so that no handler sees them half-changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]
NAMES = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SAVING = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
"""Signals that ask a process to save its work."""
HELD = (signal.SIGINT, *SAVING)


class Hold:
    """Holds back the signals that have handlers in Python, and delivers them afterwards, in order.

    Only the main thread handles signals; in any other thread, nothing is held.

    Args:
        goes_on: asked when a signal arrives; False: what it is to wait for has ended with an error.
    """

    def __init__(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        self._goes_on = goes_on
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
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            while self._handlers:
                number = next(iter(self._handlers))
                if signal.getsignal(number) == self._note:
                    signal.signal(number, self._handlers[number])
                del self._handlers[number]
        except BaseException:  # of a handler that runs again already
            self.end()
            raise
        if self._pending:
            self._deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in (other for other, _ in self._pending):
            self._pending.append((number, frame))
        if not self._goes_on():
            self.end()

    def _deliver(self) -> None:
        while self._pending:
            number, frame = self._pending.pop(0)
            try:
                handler = signal.getsignal(number)
                if callable(handler):
                    handler(number, frame)
            finally:
                self._deliver()  # the signals after it, if a handler raises
