"""Time stamps on a host or a device, and totals of time and bytes over all steps of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch


@cache
def _cuda_is_there() -> bool:
    """Asking torch takes as long as recording an event."""
    return torch.cuda.is_available()


class Stamp(NamedTuple):
    """A point in time, on the host's clock or in a device's stream."""

    host: float
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> Stamp:
        """Return a stamp of now; on CUDA, of the moment at which the current stream arrives here."""
        if device.type != "cuda" or not _cuda_is_there():
            return cls(time.perf_counter(), None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return cls(time.perf_counter(), event)

    def until(self, later: Stamp) -> float:
        """Return the milliseconds between two stamps of one device; waits for the device."""
        if self.event is None or later.event is None:
            return 1e3 * (later.host - self.host)
        for event in (self.event, later.event):  # they may lie in different streams
            event.synchronize()
        return float(self.event.elapsed_time(later.event))

    @property
    def reached(self) -> bool:
        """True if the device has reached the stamp; does not wait."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class Totals:
    """Bytes that this rank has sent in all steps so far, logged or not, and the time that they took."""

    def __init__(self) -> None:
        self.sent_bytes = self.dense_bytes = 0.0
        self._exposed = self._seconds = 0.0
        self._since: float | None = None
        self._paused = False
        self._measuring: list[tuple[Stamp, Stamp]] = []

    def add(self, sent_bytes: float, dense_bytes: float) -> None:
        """Count the bytes that were sent, and those that a dense ring all-reduce would have sent."""
        self.sent_bytes += sent_bytes
        self.dense_bytes += dense_bytes

    def expose(self, begin: Stamp, end: Stamp) -> None:
        """Count the time between two stamps as blocked backward; read later, without a host synchronisation."""
        self._measuring.append((begin, end))
        while self._measuring and all(stamp.reached for stamp in self._measuring[0]):
            self._exposed += max(0.0, Stamp.until(*self._measuring.pop(0))) / 1e3

    @property
    def exposed_seconds(self) -> float:
        """Seconds that backward was blocked; waits for the device."""
        return self._exposed + sum(max(0.0, begin.until(end)) for begin, end in self._measuring) / 1e3

    @property
    def seconds(self) -> float:
        """Wall clock between :meth:`start` and :meth:`pause`."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        """Start the clock."""
        self._since = self._since or time.perf_counter()

    def pause(self) -> None:
        """Stop the clock until :meth:`go_on`."""
        self._paused = self._since is not None
        self._seconds, self._since = self.seconds, None

    def go_on(self) -> None:
        """Start the clock again if it ran when it was paused."""
        if self._paused:
            self.start()

    def state_dict(self) -> dict[str, float]:
        """Return the totals as plain numbers, for a checkpoint."""
        return {
            "sent_bytes": self.sent_bytes,
            "dense_bytes": self.dense_bytes,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from the totals of a checkpoint."""
        self.sent_bytes, self.dense_bytes = state["sent_bytes"], state["dense_bytes"]
        self._seconds, self._exposed, self._measuring = state["seconds"], state["exposed_seconds"], []
        self._since = None if self._since is None else time.perf_counter()
