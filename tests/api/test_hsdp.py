"""Sparse HSDP: replicas that FSDP2 shards exchange the parts of their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.hsdp import batches, engine_of, grid, made, sharded, weights
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def train(replicas: int, ranks: int, kind: str, each: int, native: bool, integers: bool = False) -> list[Any]:
    """Weights after each of some steps at density 1, by this library or by FSDP itself."""
    mesh = grid(replicas, ranks)
    model = sharded(made(), mesh if native else mesh["shard"])
    engine = None if native else engine_of(model, mesh, density=1.0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if engine is not None:
        engine.bind([optimizer])
    found = []
    for step in batches(5, each):
        for number, (x, y) in enumerate(step):
            last = number == len(step) - 1
            if native:
                model.set_requires_all_reduce(last)
                mse_loss(model(x), y).backward()
            elif last:
                mse_loss(model(x), y).backward()
            else:
                with engine.no_sync():
                    mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(model))
    if engine is not None:
        engine.close()
    return found


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_density_1_is_native_hsdp_bit_for_bit(four_ranks: Ranks, shape: tuple[int, int], kind: str, each: int) -> None:
    ours, native = (four_ranks(train, *shape, kind, each, one) for one in (False, True))
    for mine, theirs in zip(ours, native, strict=True):
        for now, then in zip(mine, theirs, strict=True):
            assert all(torch.equal(now[name], then[name]) for name in then)
