"""Residuals under a changing learning rate: factors by hand, and what is conserved with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine.optimizers.kinds import LearningRates
from tests.covering import by_default
from tests.ranks import Ranks, error_of

SPARSE = ls.Rules(dense_ndim=0, dense_numel=0)


def two_groups() -> tuple[LearningRates, torch.optim.Optimizer]:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    rates = LearningRates({id(first): "first", id(second): "second"})
    unknown = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second, unknown], "lr": 0.5}], lr=1.0)
    rates.follow([optimizer])
    return rates, optimizer


def test_each_parameter_follows_the_rate_of_its_group() -> None:
    rates, optimizer = two_groups()
    assert rates.factors() == {}
    optimizer.param_groups[0]["lr"] = 0.05
    assert rates.factors() == {"first": 2.0}
    assert rates.factors() == {}
    optimizer.param_groups[1]["lr"] = torch.tensor(2.0)
    assert rates.factors() == {"second": 0.25}


def test_rates_of_zero_are_waited_for() -> None:
    rates, optimizer = two_groups()
    first = optimizer.param_groups[0]
    seen = []
    for rate in (0.0, 0.0, 0.25, 0.0, 0.0, 0.5, 0.125):  # as in a warm-up from zero, and a restart
        first["lr"] = rate
        seen.append(rates.factors().get("first"))
    assert seen == [None, None, None, None, None, 0.5, 4.0]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_optimizers_that_scale_gradients_by_themselves_are_refused(kind: Any) -> None:
    rates = LearningRates({})
    with pytest.raises(ValueError, match=f"lr_aware=True needs steps of lr . gradient.*got {kind.__name__}"):
        rates.follow([kind([nn.Parameter(torch.zeros(1))], lr=0.1)])
    assert not rates.optimizers


def train(lr_aware: bool) -> tuple[Tensor, Tensor]:
    """What all steps and the residuals amount to in units of the parameters, and what all gradients do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 10, bias=False)).double()
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, sparsifier="top_k", density=0.05, rules=SPARSE, grouping="model", lr_aware=lr_aware)
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], 0.01)
    engine._show([optimizer])
    local: dict[int, Tensor] = {}
    for number, parameter in enumerate(model.parameters()):
        parameter.register_hook(lambda grad, number=number: local.__setitem__(number, grad.clone()))
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    gradients = torch.zeros_like(start)
    schedule = [(0.01, 0.002), (0.02, 0.002), (0.005, 0.04), (0.005, 0.01), (0.03, 0.02), (0.03, 0.001)]
    for step, rates in enumerate(schedule):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        generator = torch.Generator().manual_seed(10 * step + engine.comm.rank)
        ddp(torch.randn(8, 20, dtype=torch.float64, generator=generator)).square().mean().backward()
        gradients += torch.cat([rate * local[number].flatten() for number, rate in enumerate(rates)])
        optimizer.step()
        optimizer.zero_grad()
    moved = start - torch.cat([p.detach().flatten() for p in model.parameters()])
    waiting = torch.cat([rates[i] * engine.residual(name) for i, name in enumerate(("0.weight", "1.weight"))])
    dist.all_reduce(gradients)
    dist.all_reduce(waiting)
    return moved + waiting / dist.get_world_size(), gradients / dist.get_world_size()


def test_steps_and_residuals_amount_to_all_gradients_times_their_rates(two_ranks: Ranks) -> None:
    for aware in (True, False):
        for got, should in two_ranks(train, aware):
            assert torch.allclose(got, should, rtol=0, atol=1e-14) == aware


def without_optimizer() -> str:
    model = DistributedDataParallel(nn.Linear(20, 20))
    engine = ls.attach(model, rules=SPARSE, lr_aware=True)
    model(torch.ones(1, 20)).sum().backward()
    return error_of(lambda: engine.exchange(model.parameters()))


def test_rates_that_nobody_knows_are_asked_for(two_ranks: Ranks) -> None:
    for message in two_ranks(without_optimizer):
        assert "call engine._show([optimizer])" in message


def test_a_memory_without_residual_has_nothing_to_rescale() -> None:
    with pytest.raises(ValueError, match=r"lr_aware=True rescales residuals, and NoMemory has none"):
        ls.SparseDDPStrategy(memory=ls.memories.NoMemory(), lr_aware=True)


def take_after_a_change(lr_aware: bool) -> Tensor:
    model = nn.Linear(20, 20, bias=False)
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, sparsifier="top_k", density=0.05, rules=SPARSE, lr_aware=lr_aware)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    engine._show([optimizer])
    ddp(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.125
    pending = engine._take_pending()["weight"]
    return pending.flatten().unique()


def test_what_is_pending_is_worth_what_it_was(two_ranks: Ranks) -> None:
    for pending in two_ranks(take_after_a_change, True):
        assert pending.tolist() == [0.0, 4.0]
    for pending in two_ranks(take_after_a_change, False):
        assert pending.tolist() == [0.0, 1.0]


NUMEL, DENSITY = 2048, 0.05
RAW_THRESHOLDS = [
    ls.sparsifiers.MiCRO(variant="published"),
    ls.sparsifiers.ExDyna(variant="published", num_blocks=16),
    ls.sparsifiers.OkTopK(),
    ls.sparsifiers.HardThreshold(0.05),
]
"""Methods whose thresholds are kept from step to step in units of the accumulator."""


def train_on_noise(
    sparsifier: ls.sparsifiers.Sparsifier, rates: list[float], resumed_at: int | None = None, settled: int = 50
) -> list[float]:
    """Bytes sent in each step from `settled` on, over those that pairs of the target would take."""
    model = nn.Linear(NUMEL, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)

    def attached() -> tuple[DistributedDataParallel, ls.Engine]:
        ddp = DistributedDataParallel(model)
        # The natural exchange of Ok-Topk sends equally much whatever is picked.
        exchange = "gather_pairs" if isinstance(sparsifier, ls.sparsifiers.OkTopK) else None
        engine = ls.attach(ddp, sparsifier=sparsifier, density=DENSITY, exchange=exchange, rules=SPARSE, lr_aware=True)
        engine._show([optimizer])
        return ddp, engine

    ddp, engine = attached()
    generator = torch.Generator().manual_seed(engine.comm.rank)
    sent = []
    for step, rate in enumerate(rates):
        if step == resumed_at:
            state = engine.state_dict()
            engine.close()
            ddp, engine = attached()
            assert engine.load_state_dict(state) == []
        optimizer.param_groups[0]["lr"] = rate
        ddp(0.006 * torch.randn(1, NUMEL, generator=generator)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= settled:
            sent.append(1e6 * engine.summary()["traffic/sent_mb"] / (8 * DENSITY * NUMEL))
    return sent


def kind(sparsifier: ls.sparsifiers.Sparsifier) -> str:
    return type(sparsifier).__name__


@pytest.mark.parametrize(
    "sparsifier",
    by_default([*(pytest.param(one, marks=pytest.mark.thorough) for one in RAW_THRESHOLDS[:2]), *RAW_THRESHOLDS[2:]]),
    ids=kind,
)
def test_a_drop_and_a_warm_up_of_the_rate_leave_thresholds_alone(
    two_ranks: Ranks, sparsifier: ls.sparsifiers.Sparsifier
) -> None:
    settled = (
        30 if isinstance(sparsifier, ls.sparsifiers.OkTopK) else 50
    )  # the others take longer to find their threshold
    count = 3 * settled // 5
    sent = two_ranks(train_on_noise, sparsifier, [1.0] * (settled + count) + [0.1] * 2 * count, None, settled)[0]
    usual, after = sent[:count], sent[count:]
    assert max(after) < 2 * max(usual)
    assert 0.7 < (sum(after) / len(after)) / (sum(usual) / len(usual)) < 1.4
    warming = two_ranks(
        train_on_noise, sparsifier, [(step + 1) / (settled + count) for step in range(settled + count)], None, settled
    )[0]
    assert max(warming) < 1.2 * max(usual)
    assert 0.7 < sum(warming) / sum(usual) < 1.4


def test_a_resumed_run_goes_on_with_raised_thresholds(two_ranks: Ranks) -> None:
    rates = [1.0] * 16 + [0.1] * 12
    whole = two_ranks(train_on_noise, RAW_THRESHOLDS[0], rates, None, 0)
    assert two_ranks(train_on_noise, RAW_THRESHOLDS[0], rates, 20, 0) == whole


def test_groups_of_several_rates_take_the_mean_of_the_logarithms() -> None:
    rates, _ = two_groups()
    sizes = {"first": 300, "second": 100}
    assert rates.surplus_of(sizes, 7, 0.5) == 1
    rates.change({"first": 4.0, "second": 0.25}, 7, {"first": 0.5, "second": 0.5})
    assert rates.surplus_of({"first": 300}, 7, 0.5) == pytest.approx(4)
    assert rates.surplus_of({"second": 100}, 7, 0.5) == 1
    assert rates.surplus_of(sizes, 7, 0.5) == pytest.approx(4**0.75)
    assert [rates.surplus_of({"first": 300}, step, 0.5) for step in (8, 9, 30)] == pytest.approx([2, 1, 1])
