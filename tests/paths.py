"""Where gradients are exchanged in tests: when optimizers step, or in backward, as long as there are both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

HOME = "lightning_sparse.api.attach"


def in_steps() -> bool:
    """Whether engines that are attached now exchange when optimizers step."""
    return HOME not in sys.modules or sys.modules[HOME].IN_STEPS


@contextmanager
def exchanging(chosen: bool) -> Iterator[None]:
    """Attach engines that exchange when optimizers step, or in backward."""
    from lightning_sparse.api import attach

    before, attach.IN_STEPS = attach.IN_STEPS, chosen
    try:
        yield
    finally:
        attach.IN_STEPS = before
