"""The path that groups take on a device, on any device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def static_path() -> Iterator[None]:
    """Static shapes on every device, in every module that asks."""
    modules = [m for name, m in sys.modules.items() if name.startswith("lightning_sparse")]
    asking = [m for m in modules if "static_shapes" in vars(m)]
    assert len(asking) > 4
    before = asking[0].static_shapes
    for module in asking:
        module.static_shapes = lambda device: True
    try:
        yield
    finally:
        for module in asking:
            module.static_shapes = before
