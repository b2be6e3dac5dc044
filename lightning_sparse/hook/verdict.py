"""Whether a step counted, as the host learns it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Verdict:
    """A flag that the host may not know yet; on a CUDA stream it is on its way, and only asking waits for it.

    Args:
        void: () whether the step counts for nothing.
        stream: on which the flag is formed; None where the host knows it.
        wait: see :meth:`~lightning_sparse.collective.TorchCollective.wait_until`.
    """

    def __init__(
        self, void: Tensor, stream: torch.cuda.Stream | None, wait: Callable[[Callable[[], bool], str], None]
    ) -> None:
        self._wait = wait
        self._event: torch.cuda.Event | None = None
        self._flag = void
        self.on_device: Tensor | None = None
        """() the flag as 0.0 or 1.0, where it is formed; None where the host knows it."""
        if stream is not None:
            self.on_device = void.float()
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
            self._flag.copy_(void, non_blocking=True)
            self._event = stream.record_event()

    def __bool__(self) -> bool:
        if self._event is not None:
            self._wait(self._event.query, "the exchange")
        return bool(self._flag)
