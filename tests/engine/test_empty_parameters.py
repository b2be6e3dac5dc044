"""Parameters without elements: DDP takes them, and there is nothing to exchange of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import covering, in_one_test, in_turns
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE

EMPTY = ("first", "layer.none", "last")


class WithEmpty(nn.Module):
    """Parameters without elements before, within and after those that have some; two are alone in their layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.zeros(0, 3))
        self.layer = nn.Linear(20, 40)
        self.layer.none = nn.Parameter(torch.zeros(0))
        self.head = nn.Linear(40, 3)
        self.last = nn.Parameter(torch.zeros(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        nothing = self.first.sum() + self.layer.none.sum() + self.last.sum()
        return self.head(self.layer(x).relu()) + nothing


class OnlyEmpty(nn.Module):
    """Nothing to train at all."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.none.sum()


def train(options: dict[str, Any] | None, ddp: dict[str, Any], steps: int = 4) -> list[Tensor]:
    """Parameters; halfway, another engine goes on with the state of the first."""
    model = DistributedDataParallel(WithEmpty(), **ddp)
    engine = None if options is None else ls.attach(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        if engine is not None and step == steps // 2:
            state = engine.state_dict()
            assert not set(EMPTY) & set(state["parameters"])
            engine.close()
            model = DistributedDataParallel(model.module, **ddp)
            engine = ls.attach(model, **options or {})
            assert engine.load_state_dict(state) == []
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()
    if engine is not None:
        engine.summary()
        engine.close()
    return [p.detach() for p in model.parameters()]


@cache
def plainly(ranks: Ranks) -> list[Tensor]:
    """Parameters after the same training with DDP alone."""
    return ranks(train, None, {})[0]


@in_one_test(
    "grouping, rules",
    covering(
        in_turns(
            ["bucket", "layer", "model", ls.grouping.MergeBelow(500)],
            [None, EVERYTHING_SPARSE, ls.Rules(dense=["last"], densities={"layer.none": 0.5})],
        ),
        together=1,
    ),
    apart=0,
)
def test_every_grouping_trains_like_plain_ddp_at_full_density(two_ranks: Ranks, grouping: Any, rules: Any) -> None:
    options = {"grouping": grouping, "rules": rules, "density": 1.0, "sparsifier": "top_k"}
    for parameters in two_ranks(train, options, {}):
        assert all(map(torch.equal, parameters, plainly(two_ranks)))


@pytest.mark.parametrize("keyword", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_every_mode_of_ddp_trains_like_plain_ddp_at_full_density(two_ranks: Ranks, keyword: str) -> None:
    plain = two_ranks(train, None, {keyword: True})[0]
    options = {"grouping": "layer", "rules": EVERYTHING_SPARSE, "density": 1.0, "sparsifier": "top_k"}
    for parameters in two_ranks(train, options, {keyword: True}):
        assert all(map(torch.equal, parameters, plain))


def test_ranks_stay_equal_at_low_density(two_ranks: Ranks) -> None:
    for sparsifier in ("union_top_k", "exdyna", "top_k"):
        options = {"sparsifier": sparsifier, "density": 0.05, "grouping": "layer", "rules": EVERYTHING_SPARSE}
        first, second = two_ranks(train, options, {})
        assert all(map(torch.equal, first, second))


def with_nothing_to_train() -> int:
    model = DistributedDataParallel(OnlyEmpty())
    engine = ls.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):  # long enough for warnings of steps whose gradients nobody averages
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return engine.step


def test_a_model_with_nothing_to_train_trains(two_ranks: Ranks) -> None:
    assert two_ranks(with_nothing_to_train) == [0, 0]  # there is nothing to exchange
