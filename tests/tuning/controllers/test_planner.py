"""Groups and densities that follow from the first steps, with the exchange within backward."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.grouping import ParameterSize, make_plan
from lightning_sparse.tuning.controllers import planner
from lightning_sparse.tuning.controllers.planner import Planner
from tests.ranks import Ranks

EVERYTHING = ls.Rules(dense_ndim=0, dense_numel=0)
WIDTHS = [30, 60, 50, 40, 20]


def train(settings: dict[str, Any], steps: int) -> tuple[list[Any], list[Any], list[int], float, Tensor]:
    """The groups, those that the profile means, messages of each backward, what is lost, and the weights."""
    planner.WARMUP, planner.STEPS = 1, 3
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)]
    ddp = DistributedDataParallel(nn.Sequential(*layers).double(), bucket_cap_mb=0.004)
    engine = ls.attach(ddp, overlap=True, rules=EVERYTHING, watch=None, memory="residual", **settings)
    [observer] = [one for one in engine.observers if isinstance(one, Planner)]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    start = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    given, sent = torch.zeros_like(start), []
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, WIDTHS[0], dtype=torch.float64, generator=generator)).square().mean().backward()
        given += torch.cat([p.grad.flatten() for p in ddp.parameters()])
        waiting = engine.stepper._waiting
        sent.append(0 if waiting is None else len(waiting.sent))
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    waits = torch.cat([engine.residual(name) for name in engine.stepper.parameters])
    for total in (given, waits):
        dist.all_reduce(total)
    lost = float((dist.get_world_size() * (start - weights) / 0.1 + waits - given).abs().max())
    profile, chosen = observer.profile, engine.settings
    assert profile is not None
    assert (profile.overlap, profile.messages) == ("comm", "group")
    sizes = [ParameterSize.of(name, p) for name, p in engine.stepper.parameters.items()]
    plan = make_plan(sizes, chosen.grouping, EVERYTHING, 25, profile, chosen.density(10**9))
    if chosen.density.needs_profile:
        plan = chosen.density.assign(plan, profile)
    return engine.groups, plan, sent, lost, weights


@pytest.mark.parametrize(
    "settings",
    [
        {"grouping": ls.tuning.OptimalMerge(), "density": 0.05},
        {"grouping": ls.tuning.OptimalMerge("published"), "density": ls.Warmup(0.5, 0.05, steps=3)},
        {"grouping": "layer", "density": ls.tuning.HiddenDensity(0.02, 0.5)},
        {"grouping": ls.tuning.OptimalMerge(), "density": ls.tuning.HiddenDensity(0.02, 0.5)},
    ],
    ids=str,
)
def test_groups_follow_from_the_first_steps_and_nothing_is_lost(two_ranks: Ranks, settings: dict[str, Any]) -> None:
    found = two_ranks(train, settings, 9)
    for groups, meant, sent, lost, weights in found:
        assert groups == meant == found[0][0]
        assert sent[:5] == [0] * 5  # steps that are timed, and the one in which groups change
        assert all(1 <= number <= len(groups) for number in sent[5:])
        assert lost < 1e-10
        assert torch.equal(weights, found[0][4])


@pytest.mark.parametrize(
    "settings", [{"grouping": ls.tuning.OptimalMerge()}, {"density": ls.tuning.HiddenDensity()}], ids=str
)
def test_without_overlap_they_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"hides messages behind backward.*or overlap=True"):
        ls.SparseDDPStrategy(**settings)
    assert ls.SparseDDPStrategy(**settings, overlap=True).config.overlap
