"""When and where groups run: inside DDP's hook or on a communication thread, on a CUDA stream of their own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for groups, so that they run beside backward; None where a device has no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class ExchangeStream:
    """The stream of the groups; where a device has none, they run where they are called.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = side_stream(device)
        self._device = device

    @property
    def host_knows(self) -> bool:
        """Whether there is no stream, so that the host knows what was computed."""
        return self.stream is None

    def __call__(self) -> AbstractContextManager[Any]:
        """On the stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """On the stream, after all that the caller's stream was given so far and before what it is given next.

        The caller's stream may still look at residuals. What groups give back must not be handed out again, to either
        stream, while the other one uses it.
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
        """Let the stream wait, when this is called, for all that the caller's stream was given so far."""
        if (stream := self.stream) is None:
            return lambda: None
        event = torch.cuda.current_stream(self._device).record_event()
        return lambda: stream.wait_event(event)

    def synchronize(self) -> None:
        """Return when all is done."""
        if self.stream is not None:
            self.stream.synchronize()


class Executor(Protocol):
    """Decides when and where groups run; always one after another, in the order in which they were submitted."""

    blocked_seconds: float
    """Time that backward was held up since this was last set to zero."""
    failed: bool
    """True if a job has raised an error that nobody has heard of yet."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job now or later."""

    def drain(self) -> None:
        """Return when all jobs have run; raise what a job raised."""

    def close(self) -> None:
        """End."""


class Inline:
    """Inside the hook."""

    failed = False

    def __init__(self) -> None:
        self.blocked_seconds = 0.0

    def submit(self, job: Callable[[], None]) -> None:
        begin = time.perf_counter()
        job()
        self.blocked_seconds += time.perf_counter() - begin

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class Threaded:
    """On one communication thread, while autograd goes on."""

    def __init__(self, device: torch.device) -> None:
        self.blocked_seconds = 0.0
        self._device = device
        # Neither this queue nor the lock in drain() holds a lock of its own while a signal handler may run.
        self._jobs: queue.SimpleQueue[Callable[[], None] | Gate | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="sparse-exchange", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def drain(self) -> None:
        begin = time.perf_counter()
        gate = Gate()
        self._jobs.put(gate)
        gate.wait()
        self.blocked_seconds += time.perf_counter() - begin
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=10)

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, Gate):
                    job.open()
                elif self._error is None:
                    job()
            except BaseException as error:  # raised again in drain(), on the thread that trains
                self._error = error


class Gate:
    """Where one thread waits for another one, and goes on handling signals."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self) -> None:
        """Return when it is open."""
        self._lock.acquire()

    def open(self) -> None:
        """Let the other one go on."""
        self._lock.release()


def make_executor(chosen: str, device: torch.device, world_size: int, host_knows: bool) -> Executor:
    """By the setting's name; "auto" is a thread between ranks on CPUs, see :attr:`ExchangeStream.host_knows`."""
    threaded = chosen == "thread" or (chosen == "auto" and host_knows and world_size > 1)
    return Threaded(device) if threaded else Inline()
