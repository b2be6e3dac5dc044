"""Groups and densities that follow from a given profile, in a training that exchanges when its optimizer steps."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.methods.density import count
from lightning_sparse.methods.grouping import ParameterSize, make_plan
from lightning_sparse.tools.advisor.networks import ring
from lightning_sparse.tuning.performance.cost import Line
from lightning_sparse.tuning.performance.profile import GroupCost, LayerTime, Profile
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE

WIDTHS = [20, 40, 30, 50, 10]
FLOOR, CAP = 0.05, 0.5


def profile() -> Profile:
    """The first two layers take long; messages cost 1 ms and 1 us for each coordinate sent."""
    layers = [
        LayerTime(f"{i}", (f"{i}.weight",), a * b, 3e-3 if i < 2 else 1e-4)
        for i, (a, b) in reversed([*enumerate(pairwise(WIDTHS))])
    ]
    costs = [GroupCost(d, Line(0, 0), Line(0, 0), Line(1e-3, d * 1e-6)) for d in (FLOOR, CAP)]
    return Profile(layers, 1e-3, ring(2, 0, 1e9), costs, "comm", (0, 0))


def train() -> tuple[list[tuple[str, int, float]], list[list[int]], Tensor, Tensor]:
    """Groups, coordinates that each step has brought to each, and what averages and residuals hold of all gradients."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS))).double())
    engine = ls.attach(ddp, exchange="reduce_union", density=FLOOR, rules=EVERYTHING_SPARSE)
    sizes = [ParameterSize.of(name, p) for name, p in engine.stepper.parameters.items()]
    plan = make_plan(sizes, ls.tuning.OptimalMerge(), EVERYTHING_SPARSE, profile=profile(), density=FLOOR)
    engine.regroup(ls.tuning.HiddenDensity(FLOOR, CAP).assign(plan, profile()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    brought, given, found = [], torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.randn(8, WIDTHS[0], dtype=torch.float64, generator=generator)).square().mean().backward()
        given = given + torch.cat([p.grad.flatten() for p in engine.stepper.parameters.values()])
        engine.exchange(ddp.parameters())
        grads = {name: p.grad for name, p in engine.stepper.parameters.items()}
        found = found + torch.cat([grad.flatten() for grad in grads.values()])
        brought.append([sum(int(grads[p.name].count_nonzero()) for p in group.parameters) for group in engine.groups])
    left = torch.cat([engine.residual(name) for name in engine.stepper.parameters])
    for total in (given, left):
        dist.all_reduce(total)
    groups = [(group.name, group.numel, group.density) for group in engine.groups]
    return groups, brought, found + left / 2, given / 2


def test_groups_and_densities_of_a_profile_run_in_the_step(two_ranks: Ranks) -> None:
    for groups, brought, found, given in two_ranks(train):
        assert [name for name, *_ in groups] == ["3..1", "0"]
        densities = [density for *_, density in groups]
        assert densities[-1] == FLOOR < max(densities) <= CAP
        for step in brought:
            assert step == [count(density, numel) for _, numel, density in groups]
        torch.testing.assert_close(found, given, rtol=0, atol=1e-14)
