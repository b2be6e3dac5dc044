"""Parameters with fewer coordinates than a node has ranks, in groups and optimizers of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import by_default, covering
from tests.nodes.model import weights
from tests.ranks import Ranks
from tests.static_path import static_path
from tests.trainers import EVERYTHING_SPARSE

SHAPES: dict[str, tuple[int, ...]] = {"scale": (), "wide": (41, 9), "pair": (2,), "one": (1, 1)}
"""Coordinates of some are on one rank of a node of two, or four, alone."""
SMALL = ("scale", "one")


class Scaled(nn.Module):
    """The loss is the sum of weights times numbers, which are the gradients."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(self.get_parameter(name) * x).sum() for name, x in gradients.items()]).sum()


def given(step: int, rank: int) -> dict[str, Tensor]:
    """Multiples of 8: means over four ranks are exact."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {name: 8.0 * torch.randint(-9, 10, shape, generator=generator) for name, shape in SHAPES.items()}


def settings_of(which: str, size: int) -> dict[str, Any]:
    sparse = {"rules": EVERYTHING_SPARSE, "grouping": "layer" if which == "layers" else "model"}
    return {"density": 0.1, "watch": None, "node_size": size, "single_device": "sparse", "sparsifier": "top_k"} | (
        {} if which == "dense" else sparse
    )


def optimizers_of(kind: str, ddp: DistributedDataParallel) -> list[torch.optim.Optimizer]:
    """One for each small parameter, and one for the rest."""
    named = {name.removeprefix("module."): p for name, p in ddp.named_parameters()}
    parts = [[named.pop(name)] for name in SMALL] + [[*named.values()]]
    if kind == "adamw":
        return [torch.optim.AdamW(part, lr=0.01) for part in parts]
    return [torch.optim.SGD(part, lr=0.25, momentum=0.5 if kind == "momentum" else 0.0) for part in parts]


def train(which: str, kind: str, size: int, static: bool) -> tuple[list[dict[str, Tensor]], list[list[int]]]:
    """Weights after each step and at last after a flush, and which summaries there are."""
    ddp: Any = DistributedDataParallel(Scaled())
    engine = ls.attach(ddp, **settings_of(which, size)) if size else None
    optimizers = optimizers_of(kind, ddp)
    found, logged = [], list[list[int]]()
    for step in range(6):
        ddp(given(step, dist.get_rank())).backward()
        if engine is not None:
            engine.clip_grad_norm_(optimizers[0].param_groups[0]["params"], 1e9)
        for number, optimizer in enumerate(optimizers if step % 2 else optimizers[::-1]):
            if step == 1 and number == 2:  # the others step alone
                continue
            optimizer.step()
            if engine is not None:
                logged.append([len(engine.summary()), *map(len, engine._group_summaries().values())])
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.append(weights(ddp))
        if engine is not None and step == 3:
            state = engine.state_dict()
            assert engine.load_state_dict(state) == []
    if engine is not None:
        ls.flush(engine, optimizers)
        found.append(weights(ddp))
    return found, logged


def trained(which: str, kind: str, size: int, static: bool) -> tuple[list[dict[str, Tensor]], list[list[int]]]:
    if not static:
        return train(which, kind, size, static)
    with static_path():
        return train(which, kind, size, static)


CASES = [
    (which, kind, size, static)
    for static in (False, True)
    for which in ("dense", "layers", "model")
    for kind in ("sgd", "momentum", "adamw")
    for size in (2, 4)
]


@pytest.mark.parametrize(("which", "kind", "size", "static"), by_default(covering(CASES), 6))
def test_small_parameters_train_as_with_plain_ddp(
    four_ranks: Ranks, which: str, kind: str, size: int, static: bool
) -> None:
    """A single coordinate is always sent."""
    plain = four_ranks(trained, which, kind, 0, False)[0][0]
    of_ranks = four_ranks(trained, which, kind, size, static)
    for found, logged in of_ranks:
        assert logged == of_ranks[0][1] and all(logged[0])
        for now, first in zip(found, of_ranks[0][0], strict=True):
            assert all(torch.equal(now[name], first[name]) and now[name].isfinite().all() for name in SHAPES)
        if kind == "adamw" and which != "dense":  # steps of its own, by other second moments
            continue
        for now, then in zip(found, plain, strict=False):
            assert all(torch.equal(now[name], then[name]) for name in SMALL)
        if kind == "sgd":
            assert all(torch.equal(found[-1][name], plain[-1][name]) for name in SHAPES)
