"""Lengths of gradients, followed: against Python's numbers, in Triton, and what they do to what waits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.ops.length import SIZE, measure
from tests.lockstep import Ranks
from tests.ops.interpreted import in_triton
from tests.reference.length import Length

STREAMS = {
    "steady": [1.0, 1.1, 0.95, 1.0, 1.05] * 6,
    "fall": [10.0] * 10 + [1.0] * 30,
    "spike": [1.0] * 10 + [50.0] + [1.0] * 20,
    "zeros": [0.0, 0.0, 3.0, 3.0, 0.0, 3.0],
    "not finite": [1.0, math.inf, math.nan, 1.0, 5.0, 5.0],
    "wide": [1e-30, 1e-30, 1e30, 1e30, 1e-30],
}


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("name", STREAMS)
def test_factors_are_those_of_the_rule(name: str, kernels: str) -> None:
    lengths = torch.zeros(SIZE, dtype=torch.float64)
    reference, numel, beta2 = Length(), 16, 0.999
    for norm in STREAMS[name]:
        given = torch.tensor(norm, dtype=torch.float64)
        if kernels == "triton":
            with in_triton():
                units = measure(lengths, given, numel, beta2, True)
        else:
            units = measure(lengths, given, numel, beta2, True)
        take, carry = reference([norm / 4] * numel) if math.isfinite(norm) else (math.nan, 1.0)
        assert units.tolist() == pytest.approx([take, carry, beta2 * carry**2], rel=1e-12, nan_ok=True)
    if name == "steady":
        assert lengths[3:].tolist() == [0.0, 0.0]
    if name == "spike":
        assert int(lengths[3]) >= 1


def test_at_density_1_nothing_is_changed() -> None:
    lengths = torch.zeros(SIZE, dtype=torch.float64)
    for norm in (1.0, 1.0, 100.0, 100.0, 0.01):
        units = measure(lengths, torch.tensor(norm, dtype=torch.float64), 4, 0.9, False)
        assert units[:2].tolist() == [1.0, 1.0]


def walk(gradients: Tensor) -> list[Tensor]:
    """Residuals of two ranks, step by step."""
    ranks = Ranks(2, 400, sparsifier=ls.sparsifiers.UnionTopK(), density=0.05, memory=ls.memories.SecondMoment(0.95))
    found = []
    for rows in gradients:
        outcome = ranks.step(rows.expand(2, -1).clone())
        found.append(outcome.states[0].memory.residual[:-1].clone())
    return found


def test_what_waits_falls_with_the_gradients() -> None:
    """Sums of old gradients would otherwise be ten times as long as those of new ones, for hundreds of steps."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(60, 1, 400, generator=generator, dtype=torch.float64)
    sizes = torch.where(torch.arange(60) < 20, 1.0, 0.1).view(-1, 1, 1)
    steady, fallen = walk(noise), walk(noise * sizes)
    assert all(torch.equal(a, b) for a, b in zip(steady[:20], fallen[:20], strict=True))
    ratio = float(fallen[-1].norm() / steady[-1].norm())
    assert 0.08 < ratio < 0.14


def test_a_spike_is_no_longer_than_twice_what_is_usual() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40, 1, 400, generator=generator, dtype=torch.float64)
    spiked = noise.clone()
    spiked[20] *= 50
    usual, now = walk(noise), walk(spiked)
    assert float(now[20].norm()) < 1.5 * float(usual[20].norm())


def test_a_skipped_step_says_nothing_about_lengths() -> None:
    ranks = Ranks(2, 400, sparsifier=ls.sparsifiers.UnionTopK(), density=0.05, memory=ls.memories.SecondMoment(0.95))
    rows = torch.randn(2, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = [state.memory.lengths for state in ranks.step(rows).states]
    rows[1, 7] = math.nan
    after = [state.memory.lengths for state in ranks.step(100 * rows).states]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
