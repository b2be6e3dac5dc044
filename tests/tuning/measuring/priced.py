"""A clock that only messages move, and two ranks that do the same on a network with a price list."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_sparse.tuning.performance.cost import Line


def set_clock(patch: pytest.MonkeyPatch, now: Callable[[], float]) -> None:
    """All measurements ask this clock."""
    patch.setattr("lightning_sparse.engine.metrics.time", SimpleNamespace(perf_counter=now))


class Priced:
    """A collective of two equal ranks. No time passes between messages."""

    rank, world_size, one_hop = 0, 2, False

    def __init__(self, patch: pytest.MonkeyPatch, *, all_reduce: Line, all_gather: Line) -> None:
        self.prices = {"all_reduce": all_reduce, "all_gather": all_gather}
        self.now = 0.0
        self.seen: dict[str, set[int]] = {name: set() for name in self.prices}
        """Bytes of messages."""
        set_clock(patch, lambda: self.now)

    def all_gather(self, x: Tensor) -> Tensor:
        self._pay("all_gather", x)
        return torch.stack([x, x])

    def all_reduce(self, x: Tensor) -> Tensor:
        self._pay("all_reduce", x)
        return 2 * x

    def start_average(self, x: Tensor, wait: bool) -> Tensor:
        assert wait
        return self.all_reduce(x)

    def _pay(self, name: str, x: Tensor) -> None:
        self.now += self.prices[name](x.nbytes)
        self.seen[name].add(x.nbytes)
