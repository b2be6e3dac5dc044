"""The engine equals the algorithm in one file of plain torch; this file is compared with what the method promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse import minimal
from tests.covering import by_default
from tests.lockstep import noise
from tests.ranks import Ranks
from tests.test_imports import imported

RATE, STEPS = 0.1, 150
"""Only after 64 steps a rank makes fewer spare indices, as many as were needed."""
MOVES: list[Any] = [{}, {"momentum": 0.9, "weight_decay": 0.01}]


class Small(nn.Module):
    """Matrices, and what stays dense: vectors, and a matrix of 240 coordinates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(20, 60), nn.LayerNorm(60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU())
        self.head = nn.Linear(60, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return (self.head(self.body(x)) - x[:, :4].sin()).square().mean()


def batches(rank: int, inputs: int, steps: int = STEPS) -> list[Tensor]:
    """With so many inputs; the others are 0, so that many gradients have one magnitude."""
    generator = torch.Generator().manual_seed(100 + rank)
    made = [torch.randn(8, 20, generator=generator) for _ in range(steps)]
    for x in made:
        x[:, inputs:] = 0
    return made


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def attached(model: nn.Module, density: float, **options: Any) -> tuple[DistributedDataParallel, ls.Engine]:
    ddp = DistributedDataParallel(model)
    return ddp, ls.attach(
        ddp, sparsifier="union_top_k", grouping="model", density=density, memory="residual", **options
    )


def train(by_engine: bool, density: float, inputs: int, moves: dict[str, float], **options: Any) -> Tensor:
    """The parameters after each step."""
    model: nn.Module = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, **moves)
    if by_engine:
        model, _ = attached(model, density, exchange="reduce_union", **options)
    else:
        minimal.sparsify(model, optimizer, density)
    after = []
    for batch in batches(dist.get_rank() if dist.is_initialized() else 0, inputs):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        after.append(flat(model))
    return torch.stack(after)


CELLS = [(density, inputs, moves) for moves in MOVES for inputs in (20, 5) for density in (0.05, 0.6, 0.001)]


@pytest.mark.parametrize(("density", "inputs", "moves"), by_default([CELLS[0], CELLS[-2], *CELLS[1:-2], CELLS[-1]], 2))
@pytest.mark.parametrize("n", by_default([3, 2]))
def test_the_engine_equals_it_bit_for_bit(
    two_ranks: Ranks, three_ranks: Ranks, n: int, density: float, inputs: int, moves: dict[str, float]
) -> None:
    ranks = two_ranks if n == 2 else three_ranks
    plain = ranks(train, False, density, inputs, moves)
    engine = ranks(train, True, density, inputs, moves)
    assert not torch.equal(plain[0][0], plain[0][-1])
    assert all(torch.equal(one, plain[0]) for one in plain + engine)


def alongside(steps: int) -> list[tuple[Tensor, Tensor, float, float]]:
    """Train by the engine with its default exchange, and let the file exchange the same residuals and gradients.

    Returns:
        Both updates of each step, (d,); the largest difference of dense gradients; and the largest magnitude that this
        rank offered.
    """
    model = Small()
    ddp, engine = attached(model, 0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    twin = Small()
    plain = minimal.Sparsified(twin, 0.05)
    names = {id(p): name for name, p in twin.named_parameters()}
    ours, found = dict(model.named_parameters()), []
    for batch in batches(dist.get_rank(), 20, steps):
        twin.load_state_dict(model.state_dict())
        twin.zero_grad()
        twin(batch).backward()
        waiting = [engine.residual(names[id(p)]) for p in plain.sparse]
        plain.residual = torch.cat([x for x in waiting if x is not None])
        offered = plain.residual + torch.cat([gradient(p) for p in plain.sparse])
        plain.exchange()
        optimizer.zero_grad()
        ddp(batch).backward()
        optimizer.step()
        theirs = {id(p): gradient(ours[names[id(p)]]) for p in twin.parameters()}
        updates = [torch.cat(list(map(gradient, plain.sparse))), torch.cat([theirs[id(p)] for p in plain.sparse])]
        dense = max(float((gradient(p) - theirs[id(p)]).abs().max()) for p in plain.dense)
        found.append((*updates, dense, float(offered.abs().max())))
    return found  # type: ignore[return-value]  # of four


def gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad.flatten().clone()


@pytest.mark.parametrize("n", [2, 3])
def test_the_default_exchange_equals_it_but_for_the_rounding_of_its_wire(
    two_ranks: Ranks, three_ranks: Ranks, n: int
) -> None:
    found = (two_ranks if n == 2 else three_ranks)(alongside, 50)
    for step in zip(*found, strict=True):
        # A rank's largest value has more than half of its levels: a step is less than twice its share of them.
        rounding = max(largest for *_, largest in step) / (32767 // n)
        for exact, packed, dense, _ in step:
            assert dense == 0 and torch.equal(packed, step[0][1])
            assert not packed[exact == 0].any()  # the union is the same
            assert 0 < (packed - exact).abs().max() <= rounding


def offered(steps: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor, int, Tensor]:
    """Step with gradients that ranks have half in common.

    Returns:
        Accumulators and updates of each step, the residual, k, and how far the bias has moved.
    """
    model = nn.Linear(40, 50).to(dtype)
    begin = model.bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sparsified = minimal.sparsify(model, optimizer, density=0.05)
    common, own = (noise(steps, 2050, seed=seed, dtype=dtype) for seed in (9, dist.get_rank()))
    accs, updates = [], []
    for row in common + own:
        model.weight.grad, model.bias.grad = row[:2000].view(50, 40).clone(), row[2000:].clone()
        accs.append(sparsified.residual + row[:2000])
        optimizer.step()
        updates.append(gradient(model.weight))
    return accs, updates, sparsified.residual, sparsified.k, begin - model.bias.detach()


@pytest.mark.parametrize("n", [2, 3])
def test_it_keeps_what_the_method_promises(two_ranks: Ranks, three_ranks: Ranks, n: int) -> None:
    made = (two_ranks if n == 2 else three_ranks)(offered, STEPS, torch.float64)
    accs = [torch.stack(acc) for acc, *_ in made]
    updates, k = torch.stack(made[0][1]), made[0][3]
    assert k == 100
    assert all(torch.equal(torch.stack(one[1]), updates) for one in made)
    assert torch.allclose(n * updates, sum(accs) * (updates != 0), rtol=0, atol=1e-12)  # type: ignore[arg-type]
    assert all(not residual[updates[-1] != 0].any() for _, _, residual, *_ in made)
    given = sum(noise(STEPS, 2050, seed=9) + noise(STEPS, 2050, seed=rank) for rank in range(n)).sum(0)  # type: ignore[attr-defined]
    left = sum(residual for _, _, residual, *_ in made)
    # Sums of these numbers are exact, and so is their mean over two ranks.
    assert torch.allclose(n * updates.sum(0) + left, given[:2000], rtol=0, atol=0 if n == 2 else 1e-10)
    assert all(torch.allclose(n * moved, given[2000:], rtol=0, atol=1e-10) for *_, moved in made)
    sent = (updates != 0).sum(1)
    assert (sent[:64] == k).all() and (sent <= k).all() and sent.double().mean() > 0.99 * k
    for acc in accs:
        last = acc.abs().topk(k // n, dim=1).values[:, -1:]  # several may have this magnitude
        assert (updates[acc.abs() > last] != 0).all()


def test_one_process_needs_no_group() -> None:
    assert not dist.is_initialized()
    model, stream = Small(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sparsified, updates = minimal.Sparsified(model, 0.05), []
    for batch in batches(0, 20):
        optimizer.zero_grad()
        model(batch).backward()
        stream.append(torch.cat([gradient(p) for p in sparsified.sparse]))
        dense = [gradient(p) for p in sparsified.dense]
        sparsified.exchange()
        assert all(torch.equal(gradient(p), before) for p, before in zip(sparsified.dense, dense, strict=True))
        updates.append(torch.cat([gradient(p) for p in sparsified.sparse]))
        optimizer.step()
    options: dict[str, Any] = {"sparsifier": "union_top_k", "exchange": "reduce_union", "density": 0.05}
    simulated = ls.simulate(torch.stack(stream).unsqueeze(1), **options)
    assert all(torch.equal(one.update, update) for one, update in zip(simulated, updates, strict=True))


def test_one_process_with_a_group_trains_as_the_engine(one_rank: None) -> None:
    plain = train(False, 0.05, 20, {})
    assert torch.equal(plain, train(True, 0.05, 20, {}, single_device="sparse"))


def test_parameters_need_neither_gradients_nor_company() -> None:
    model = nn.ModuleList([nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    minimal.sparsify(model, optimizer, density=0.1)
    model[0](torch.ones(1, 20)).square().sum().backward()
    optimizer.step()
    assert int(gradient(model[0].weight).count_nonzero()) == 80 and not gradient(model[1].weight).any()


@pytest.mark.parametrize(
    ("model", "density"), [(nn.Linear(20, 20), 1.0), (nn.Linear(20, 20), 0), (nn.Linear(2, 2), 0.1)]
)
def test_what_cannot_be_sparsified_is_refused(model: nn.Module, density: float) -> None:
    with pytest.raises(ValueError, match=r"Expected a density in \(0, 1\) and a matrix to sparsify, but got "):
        minimal.sparsify(model, torch.optim.SGD(model.parameters(), lr=1.0), density)


def test_it_is_short_and_needs_torch_alone() -> None:
    path = Path(minimal.__file__)
    assert len(path.read_text().splitlines()) <= 150
    assert {name.split(".")[0] for name in imported(path)} <= {"__future__", "functools", "math", "torch"}
