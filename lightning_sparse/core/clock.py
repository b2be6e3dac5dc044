"""How long something took, on a host or a device, and what all steps of a run took and sent together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch


class Stamp(NamedTuple):
    """A point in time, on the host's clock or in a device's stream."""

    host: float
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> Stamp:
        """This moment; on CUDA, the moment the current stream gets here."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return cls(time.perf_counter(), None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return cls(time.perf_counter(), event)

    def until(self, later: Stamp) -> float:
        """Milliseconds between two stamps of one device; waits for the device."""
        if self.event is None or later.event is None:
            return 1e3 * (later.host - self.host)
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event))

    @property
    def reached(self) -> bool:
        """Whether the device has come so far; does not wait."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class Totals:
    """What this rank has sent in all steps so far, also in those that nobody logs, and how long that took."""

    def __init__(self) -> None:
        self.sent_bytes = self.dense_bytes = 0.0
        self._exposed = self._seconds = 0.0
        self._since: float | None = None
        self._paused = False
        self._measuring: list[tuple[Stamp, Stamp]] = []

    def add(self, sent_bytes: float, dense_bytes: float) -> None:
        """Count what was sent, and what a dense ring all-reduce would have sent."""
        self.sent_bytes += sent_bytes
        self.dense_bytes += dense_bytes

    def expose(self, begin: Stamp, end: Stamp) -> None:
        """Backward stood still in between; looked at when the device has got there, so that nobody waits."""
        self._measuring.append((begin, end))
        while self._measuring and self._measuring[0][1].reached:
            self._exposed += max(0.0, Stamp.until(*self._measuring.pop(0))) / 1e3

    @property
    def exposed_seconds(self) -> float:
        """How long backward waited; waits for the device."""
        return self._exposed + sum(max(0.0, begin.until(end)) for begin, end in self._measuring) / 1e3

    @property
    def seconds(self) -> float:
        """Wall clock between :meth:`start` and :meth:`pause`."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        """Let the clock run."""
        self._since = self._since or time.perf_counter()

    def pause(self) -> None:
        """Stop the clock, for a while."""
        self._paused = self._since is not None
        self._seconds, self._since = self.seconds, None

    def go_on(self) -> None:
        """Let the clock run if it did when it was paused."""
        if self._paused:
            self.start()

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, for a checkpoint."""
        return {
            "sent_bytes": self.sent_bytes,
            "dense_bytes": self.dense_bytes,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on counting from there."""
        self.sent_bytes, self.dense_bytes = state["sent_bytes"], state["dense_bytes"]
        self._seconds, self._exposed, self._measuring = state["seconds"], state["exposed_seconds"], []
        self._since = None if self._since is None else time.perf_counter()
