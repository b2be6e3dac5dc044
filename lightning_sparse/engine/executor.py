"""Where the work of a step runs: in DDP's hook or on a communication thread, on a CUDA stream; and signals that wait.

Signals wait while parameters or residuals change, so that no handler sees them half-changed.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

Job = Callable[[], None]
Handler = Callable[[int, FrameType | None], Any]
NAMES = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SAVING = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
"""Signals that ask a process to save its work."""
HELD = (signal.SIGINT, *SAVING)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for groups, so that they overlap with backward; None if a device has no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class ExchangeStream:
    """The stream of the groups; if a device has none, they run where they are called.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = side_stream(device)
        self.host_knows = self.stream is None
        """True if there is no stream, so that results are on the host at once."""
        self._device = device

    def __call__(self) -> AbstractContextManager[Any]:
        """Return a context in which work is queued on the stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Queue work on the stream, after all earlier work of the caller's stream and before its later work.

        The caller's stream may still read residuals. Memory that groups free must not be reused on either stream while
        the other one uses it.
        """
        if self.stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            yield
        caller.wait_stream(self.stream)

    def ready(self) -> Callable[[], None]:
        """Return a function that makes the stream wait for all work of the caller's stream up to now."""
        if (stream := self.stream) is None:
            return lambda: None
        event = torch.cuda.current_stream(self._device).record_event()
        return lambda: stream.wait_event(event)

    def synchronize(self) -> None:
        """Wait until all work is done."""
        if self.stream is not None:
            self.stream.synchronize()


class Executor:
    """Run jobs inside the hook, one after another, in the order of submission.

    A rank that waits for others in a job on a CPU runs no signal handler meanwhile: handlers that need other ranks,
    such as those that save, need :class:`Threaded`.
    """

    threaded = False
    """True if jobs run beside the thread that submits them."""

    def __init__(self) -> None:
        self.blocked_seconds = 0.0
        """Time that backward was blocked since this was last set to zero."""
        self.error: BaseException | None = None
        """Error of a job, until :meth:`drain` raises it."""

    def submit(self, job: Job) -> None:
        """Run a job now or later."""
        begin = time.perf_counter()
        job()
        self.blocked_seconds += time.perf_counter() - begin

    def drain(self) -> None:
        """Return when all jobs have run; raise the error of a job that failed."""

    def close(self) -> None:
        """End the executor."""


LOOK_SECONDS = 0.05
"""After so long, a thread that waits looks for signals again."""


class Threaded(Executor):
    """Run jobs on one communication thread, while autograd continues.

    Args:
        device: of the gradients.
    """

    threaded = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # Neither this queue nor the lock in drain() holds a lock of its own while a signal handler may run.
        self._jobs: queue.SimpleQueue[tuple[Job, bool] | None] = queue.SimpleQueue()
        """Jobs, and whether they run after an error, too."""
        self._thread = threading.Thread(target=self._work, name="sparse-exchange", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put((job, False))

    def drain(self) -> None:
        begin = time.perf_counter()
        busy = threading.Lock()
        busy.acquire()
        self._jobs.put((busy.release, True))
        # A signal that comes after the interpreter's last look and before the wait would be heard behind it only: a
        # handler on another rank may wait for this one's.
        while not busy.acquire(timeout=LOOK_SECONDS):
            pass
        self.blocked_seconds += time.perf_counter() - begin
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=10)

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (given := self._jobs.get()) is not None:
            job, always = given
            try:
                if always or self.error is None:
                    job()
            except BaseException as error:  # raised again in drain(), on the thread that trains
                self.error = error


def make_executor(chosen: str, device: torch.device, world_size: int, host_knows: bool) -> Executor:
    """Make an executor by the setting's name; "auto": a thread if ranks have no streams and are more than one."""
    threaded = chosen == "thread" or (chosen == "auto" and host_knows and world_size > 1)
    return Threaded(device) if threaded else Executor()


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


@contextmanager
def held(signals: Iterable[int] = HELD) -> Iterator[None]:
    """Hold back signals in this context; they are delivered when it ends."""
    hold = Hold()
    hold.start(signals)
    try:
        yield
    finally:
        hold.end()
