"""Nothing that a part of a replica was given is missing, whatever happens."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import lightning_sparse as ls
from lightning_sparse.hsdp.source import apart
from tests.covering import by_default
from tests.engine.state.history import History
from tests.hsdp.model import grid
from tests.ranks import Ranks
from tests.sums import Sums


class OfShards(History):
    """With FSDP2 within each replica."""

    def __init__(self, seed: int, dense: bool, shape: tuple[int, int]) -> None:
        self.mesh = grid(*shape)
        super().__init__(seed, dense)

    def made(self) -> Any:
        (self.number, _), self.several = self.mesh.get_coordinate(), self.mesh.size(0)  # type: ignore[misc]
        self.group = self.mesh.get_group(0)
        return fully_shard(Sums().double(), mesh=self.mesh["shard"])

    def attach(self) -> None:
        self.engine = ls.attach_hsdp(self.module, self.mesh, **self.settings)

    def loss(self, without: Collection[str]) -> Tensor:
        loss: Tensor = self.module(self.number, without)
        return loss

    def alone(self) -> AbstractContextManager[None]:
        return apart(self.module)


def history(seed: int, shape: tuple[int, int]) -> tuple[int, int]:
    return OfShards(seed, seed % 4 == 1, shape).run(25)


CELLS = [(seed, (4, 1) if seed % 3 == 0 else (2, 2)) for seed in range(1, 41)]


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize(("seed", "shape"), by_default(CELLS))
def test_whatever_happens_no_part_loses_anything(four_ranks: Ranks, seed: int, shape: tuple[int, int]) -> None:
    taken, *others = four_ranks(history, seed, shape)
    assert all(other == taken for other in others)
    assert taken[0] > 10
