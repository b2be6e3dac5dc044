"""The CUDA stream of the groups; on a CPU they run where they are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def side_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream | None:
    """Return a stream for groups; None if a device has no streams."""
    return torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class ExchangeStream:
    """The stream of the groups; if a device has none, they run where they are called.

    Args:
        device: of the gradients.
        priority: of the stream; the lower, the sooner its work runs beside that of others.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.stream = side_stream(device, priority)
        self.host_knows = self.stream is None
        """True if there is no stream, so that results are on the host at once."""
        self._device = device

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

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Queue work on the stream, after all earlier work of the caller's stream, which does not wait for it."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            yield

    def synchronize(self) -> None:
        """Wait until all work is done."""
        if self.stream is not None:
            self.stream.synchronize()
