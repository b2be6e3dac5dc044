"""What tests do with engines: exchange without an optimizer, close them, and end a step on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from lightning_sparse.engine import Engine


def exchange(engine: Engine) -> bool:
    """Put averages in the place of all gradients; False: skipped."""
    return engine.exchange(engine.stepper.parameters.values())


class Raises:
    """An observer that ends a step on one rank."""

    def __init__(self, rank: int, step: int, error: Exception) -> None:
        self.at, self.error = (rank, step), error

    def before_step(self, engine: Engine) -> None:
        if (dist.get_rank(), engine.step) == self.at:
            raise self.error

    def close(self) -> None:
        pass


@contextmanager
def closing() -> Iterator[None]:
    """In the end, close all engines that were made meanwhile and are open; after an error ranks may wait in them."""
    made: list[Engine] = []
    begin = Engine.__init__

    def note(engine: Engine, *args: Any, **options: Any) -> None:
        begin(engine, *args, **options)
        made.append(engine)

    with mock.patch.object(Engine, "__init__", note):
        yield
    for engine in made:
        if not engine.closed:
            engine.close()
