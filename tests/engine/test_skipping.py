"""Skipped steps are as if they had not been, on one rank and on streams that are played on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import lightning_sparse as ls
from tests.covering import by_default
from tests.ranks import Ranks
from tests.streams import Streams
from tests.trainers import EVERYTHING_SPARSE, flat

SKIPPED = 2
Make = Callable[[Any], Optimizer]
FUSED: dict[str, Make] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "two groups": lambda parameters: torch.optim.Adam([{"params": [p]} for p in parameters], fused=True),
}
OTHERS: dict[str, Make] = {
    "not fused": lambda parameters: torch.optim.Adam(parameters, fused=False),
    "unknown": lambda parameters: type("Own", (torch.optim.SGD,), {})(parameters, lr=0.1, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}


FIRST = ("Adam", "SGD with momentum", "not fused")
"""Of each kind one."""


class Run:
    """A few steps, of which some are skipped."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)))
        self.engine = ls.attach(self.ddp, density=0.1, rules=EVERYTHING_SPARSE, single_device="sparse", watch=None)
        self.optimizer = make(list(self.ddp.parameters()))

    def step(self, skipped: bool = False) -> None:
        self.optimizer.zero_grad()
        (self.ddp(torch.randn(4, 20)).square().mean() * (float("inf") if skipped else 1.0)).backward()
        self.optimizer.step()
        assert not hasattr(self.optimizer, "found_inf")

    def steps(self, skips: set[int]) -> Run:
        for number in range(5):
            self.step(number in skips)
        return self


def equal(a: Run, b: Run) -> bool:
    """Parameters, and what the optimizers remember of each."""
    ours, theirs = (run.optimizer.state_dict() for run in (a, b))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return torch.equal(flat(a.ddp), flat(b.ddp))


@pytest.mark.filterwarnings("ignore:Adagrad. each rank trains a copy")
@pytest.mark.parametrize("where", ["streams", "one_rank"])
@pytest.mark.parametrize("name", by_default(sorted([*FUSED, *OTHERS], key=lambda name: name not in FIRST), 3))
@pytest.mark.parametrize("skips", by_default([{SKIPPED}, {0, 4}], 2))
def test_a_skipped_step_is_as_if_it_had_not_been(
    request: pytest.FixtureRequest, where: str, name: str, skips: set[int]
) -> None:
    request.getfixturevalue(where)
    run = Run({**FUSED, **OTHERS}[name]).steps(skips)
    without = Run({**FUSED, **OTHERS}[name])
    for number in range(5):
        if number in skips:
            torch.randn(4, 20)  # the batch
        else:
            without.step()
    assert equal(run, without)
    assert (run.engine.step, run.engine.skipped_steps) == (5 - len(skips), len(skips))
    for parameter in run.engine.stepper.parameters:
        assert torch.equal(run.engine.residual(parameter), without.engine.residual(parameter))


def test_a_step_that_is_left_out_is_told_once(streams: Streams) -> None:
    with pytest.warns(UserWarning, match="not finite on some rank") as told:
        Run(OTHERS["not fused"]).steps({0, 2})
    assert len([one for one in told if "not finite" in str(one.message)]) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_as_ever(one_rank: None, fused: bool) -> None:
    run = Run(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for skipped in (False, True, False):
        before = flat(run.ddp)
        run.optimizer.zero_grad()
        loss = run.ddp(torch.randn(4, 20)).square().mean() * (float("inf") if skipped else 1.0)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        assert torch.equal(flat(run.ddp), before) == skipped
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("name", ["SGD", "SGD with momentum", "AdamW", "not fused", "unknown"])
def test_residuals_are_free_of_the_scale_of_a_scaler(one_rank: None, name: str) -> None:
    """A power of two, which changes no digits, and of which some come to wait in one step and go in another."""
    plain, scaled = (Run({**FUSED, **OTHERS}[name]) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for _ in range(6):
        x = torch.randn(4, 20)
        for run in (plain, scaled):
            run.optimizer.zero_grad()
            loss = run.ddp(x).square().mean()
            (scaler.scale(loss) if run is scaled else loss).backward()
            scaler.step(run.optimizer) if run is scaled else run.optimizer.step()
        scaler.update()
    assert scaler.get_scale() == 32.0
    assert torch.equal(flat(plain.ddp), flat(scaled.ddp))
    for parameter in plain.engine.stepper.parameters:
        assert torch.equal(plain.engine.residual(parameter), scaled.engine.residual(parameter))


def test_parameters_of_others_are_not_held_back(streams: Streams) -> None:
    run = Run(FUSED["Adam"])
    other = nn.Parameter(torch.ones(3))
    run.optimizer.add_param_group({"params": [other]})
    for skipped in (False, True):
        other.grad = torch.ones(3)
        before, own = other.detach().clone(), flat(run.ddp)
        (run.ddp(torch.randn(4, 20)).square().mean() * (float("inf") if skipped else 1.0)).backward()
        run.optimizer.step()
        assert not torch.equal(other, before)
        assert torch.equal(flat(run.ddp), own) == skipped


def test_after_a_skipped_step_gradients_are_zeros(one_rank: None) -> None:
    run = Run(FUSED["Adam"])
    run.step()
    run.step(skipped=True)
    assert all(p.grad is not None and not p.grad.any() for p in run.ddp.parameters())


def test_flushing_after_a_skipped_backward_leaves_the_skipped_step_out(one_rank: None) -> None:
    run = Run(OTHERS["unknown"])
    run.step()
    run.optimizer.zero_grad()
    (run.ddp(torch.randn(4, 20)).square().mean() * float("inf")).backward()
    ls.flush(run.engine, [run.optimizer])
    run.optimizer.step()
    assert bool(flat(run.ddp).isfinite().all())


def test_a_flush_after_a_skipped_backward_moves_what_has_waited(one_rank: None) -> None:
    run = Run(OTHERS["unknown"])
    run.step()
    run.optimizer.zero_grad()
    (run.ddp(torch.randn(4, 20)).square().mean() * float("inf")).backward()
    before = flat(run.ddp)
    assert ls.flush(run.engine, [run.optimizer]) > 0
    assert not torch.equal(flat(run.ddp), before)
    assert bool(flat(run.ddp).isfinite().all())


def test_gradients_of_one_rank_alone_after_a_skipped_step_are_applied(one_rank: None) -> None:
    run = Run(OTHERS["unknown"])
    run.step(skipped=True)
    run.optimizer.zero_grad()
    before = flat(run.ddp)
    with run.ddp.no_sync():
        run.ddp(torch.randn(4, 20)).square().mean().backward()
    run.optimizer.step()
    assert not torch.equal(flat(run.ddp), before)


def test_an_engine_that_another_one_has_replaced_takes_nothing_away(streams: Streams) -> None:
    run = Run(FUSED["Adam"])
    run.step(skipped=True)
    model = run.ddp.module
    again = DistributedDataParallel(model)
    ls.attach(again, density=0.1, rules=EVERYTHING_SPARSE, single_device="sparse", watch=None)
    for _ in range(3):
        run.optimizer.zero_grad()
        again(torch.randn(4, 20)).square().mean().backward()
        before = flat(again)
        run.optimizer.step()
        assert not torch.equal(flat(again), before)


def dense_bytes(skips: set[int]) -> float:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)))
    engine = ls.attach(ddp, density=0.1, rules=EVERYTHING_SPARSE, watch=None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(4):
        optimizer.zero_grad()
        (ddp(torch.randn(4, 20)).square().mean() * (float("nan") if number in skips else 1.0)).backward()
        optimizer.step()
    assert (engine.step, engine.skipped_steps) == (4 - len(skips), len(skips))
    return engine.stepper.totals.dense_bytes


def test_bytes_of_dense_training_are_those_of_all_steps(two_ranks: Ranks) -> None:
    assert two_ranks(dense_bytes, {1, 2}) == two_ranks(dense_bytes, set())


class Given(nn.Module):
    """A loss whose gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.zeros(30, 40)), nn.Parameter(torch.zeros(300))

    def forward(self, gradients: tuple[Tensor, Tensor]) -> Tensor:
        return (self.weight * gradients[0]).sum() + (self.other * gradients[1]).sum()


def mended(density: float | None, how: str) -> tuple[Tensor, tuple[int, int], list[str]]:
    """What steps have moved and what waits, over the rate, where some numbers are not finite on rank 1.

    Returns:
        The sum, the counts of the engine, and what it has said.
    """
    told: list[str] = []
    model, random = Given(), torch.Generator().manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(model)
    engine = None if density is None else ls.attach(ddp, density=density, rules=EVERYTHING_SPARSE, watch=None)
    held = [model.weight] if how == "held by nobody" else list(model.parameters())
    optimizer = torch.optim.SGD(held, lr=1.0)
    for step in range(5):
        gradients = torch.randn(30, 40, generator=random), torch.randn(300, generator=random)
        if step % 2 and dist.get_rank() == 1:
            gradients[1][:3] = float("nan")
        ddp(gradients).backward()
        for p in held:
            assert p.grad is not None
            if how == "set to 0":
                torch.nan_to_num(p.grad, out=p.grad)
            elif not p.grad.isfinite().all():
                p.grad = None
        with warnings.catch_warnings(record=True, action="always") as caught:
            optimizer.step()
        told += [str(each.message) for each in caught]
        ddp.zero_grad()
    waits = torch.zeros(1500)
    if engine is not None and density != 1:
        waits = torch.cat([engine.residual("weight"), engine.residual("other")])  # type: ignore[list-item]
        dist.all_reduce(waits)
        totals, dense = engine.stepper.totals, engine.stepper.direct_bytes
        assert how == "held by nobody" or totals.dense_bytes == 5 * dense
        assert 2 * dense < totals.sent_bytes < 4 * dense  # of two backwards, and of messages at a density of 0.1
    counts = (5, 0) if engine is None else (engine.step, engine.skipped_steps)
    return flat(model) - waits / dist.get_world_size(), counts, told


@pytest.mark.parametrize("how", ["set to 0", "left out", "held by nobody"])
def test_what_a_script_mends_is_trained_on_as_with_plain_ddp(two_ranks: Ranks, how: str) -> None:
    (plain, *_), _ = two_ranks(mended, None, how)
    assert plain[:1200].all()
    for density in (1.0, 0.1):
        found = two_ranks(mended, density, how)
        for moved, counts, _ in found:
            torch.testing.assert_close(moved, plain, rtol=1e-5, atol=1e-5)
            assert counts == (5, 0)
        said = [told for *_, told in found]
        assert ["averaged densely" in each for each in said[0]] == ([True] if density < 1 else [])
        assert said[1] == []
