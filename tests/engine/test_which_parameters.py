"""Rules at work: what stays dense is DDP's average, and what has a density of its own gets its share."""

from __future__ import annotations

import math
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import Engine
from tests.covering import by_default
from tests.engines import exchange
from tests.ranks import Ranks, error_of


def model() -> nn.Sequential:
    """Weights of 1200, 2400 and 160 coordinates, and their biases."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 4))


def gradients(ddp: DistributedDataParallel, batch: Tensor, engine: Engine | None = None) -> dict[str, Tensor]:
    ddp.zero_grad()
    ddp(batch).square().mean().backward()
    if engine is not None:
        exchange(engine)
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None}


def side_by_side(rules: ls.Rules | None, grouping: str) -> Any:
    """Averages by name of plain DDP and of ours in each of some steps, at DDP's parameters; and the groups."""
    plain, ours = DistributedDataParallel(model()), DistributedDataParallel(model())
    engine = ls.attach(ours, sparsifier="exdyna", density=0.05, rules=rules, grouping=grouping)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(5):
        batch = torch.randn(8, 20, generator=generator)
        seen.append((gradients(plain, batch), gradients(ours, batch, engine)))
        for p in [*plain.parameters(), *ours.parameters()]:
            p.data.mul_(0.9)
    plan = engine.groups
    return seen, plan


@pytest.mark.parametrize("grouping", by_default(["layer", "model"]))
def test_small_parameters_are_averaged_as_ddp_does_and_the_others_are_sparse(two_ranks: Ranks, grouping: str) -> None:
    for rules, densities in (
        (None, {"0.weight": 0.05, "2.weight": 0.05}),
        (ls.Rules(densities={"2.*": 0.25}), {"0.weight": 0.05, "2": 0.25}),
        (
            ls.Rules(["0.*"], ["4.bias"], {"4.weight": 0.5, "2.bias": 1.0}),
            {"2.weight": 0.05, "4.bias": 0.05, "4.weight": 0.5, "2.bias": 1.0},
        ),
    ):
        for steps, plan in two_ranks(side_by_side, rules, grouping):
            sparse = [group for group in plan if not group.dense]
            names = [[p.name for p in group.parameters] for group in sparse]
            wanted = {name for given in densities for name in model().state_dict() if name.startswith(given)}
            assert {name for group in names for name in group} == wanted
            for plain, ours in steps:
                for name, average in plain.items():
                    if name not in wanted:
                        assert torch.equal(ours[name], average), name
                for group in names:
                    numel = sum(plain[name].numel() for name in group)
                    [density] = {d for given, d in densities.items() for name in group if name.startswith(given)}
                    # What ExDyna sends is k, whatever the gradients; none of them is 0.
                    sent = sum(int(ours[name].count_nonzero()) for name in group)
                    assert sent == max(1, math.floor(density * numel)), group


def differing() -> str:
    rules = ls.Rules(densities={"0.weight": (0.1, 0.2)[dist.get_rank()]})
    with pytest.raises(RuntimeError, match="The ranks disagree") as caught:
        ls.attach(DistributedDataParallel(model()), rules=rules, grouping="layer")
    return str(caught.value)


def test_ranks_with_other_densities_are_told(two_ranks: Ranks) -> None:
    for told in two_ranks(differing):
        assert "densities={'0.weight': 0.1}" in told
        assert "densities={'0.weight': 0.2}" in told


def optimizers_that_differ(shown: bool) -> str:
    module = model()
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp, timeout=timedelta(seconds=60))
    kind = torch.optim.AdamW if dist.get_rank() else torch.optim.SGD
    optimizer = kind(ddp.parameters(), lr=0.1)
    if shown:
        engine._show([optimizer])
    began = time.monotonic()

    def step() -> None:
        ddp(torch.ones(2, next(module.parameters()).shape[1])).sum().backward()
        optimizer.step()

    told = error_of(step)
    assert time.monotonic() - began < 30
    return told


def test_ranks_with_other_optimizers_are_told(two_ranks: Ranks) -> None:
    for told in two_ranks(optimizers_that_differ, False):
        assert told.startswith("RuntimeError: The ranks disagree")
        assert "memory for the optimizers (Residual" in told and "SecondMoment" in told


def test_ranks_that_were_shown_other_optimizers_are_told_in_backward(two_ranks: Ranks) -> None:
    for told in two_ranks(optimizers_that_differ, True):
        assert "rank 0 ends a backward; rank 1 ends a backward, with other settings or groups than rank 0" in told


def said(options: dict[str, Any], module: Any = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            ls.attach(DistributedDataParallel(module or nn.Linear(3, 3)), **options).close()
    return [str(w.message) for w in caught]


def test_a_model_that_is_too_small_to_sparsify_is_said_so_once(two_ranks: Ranks) -> None:
    first, second = two_ranks(said, {"dense": ["bias"]})
    assert first == [
        "Nothing is sparsified: all 2 parameters stay dense (fewer than 2 dimensions, fewer than 256 coordinates or "
        "named). Set rules=Rules(dense_ndim=0, dense_numel=0) to sparsify small parameters, too."
    ]
    assert second == []
    for options in (
        {"dense": ["*"]},
        {"sparsifier": "everything"},
        {"rules": ls.Rules(dense_ndim=0, dense_numel=0)},
        {"rules": ls.Rules(sparse=["bias"])},
        {"rules": ls.Rules(densities={"weight": 0.5})},
    ):
        assert two_ranks(said, options) == [[], []]
    assert two_ranks(said, {}, nn.Linear(16, 16)) == [[], []]
