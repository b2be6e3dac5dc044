"""Shares that fill the union."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import lightning_sparse as ls


def alike(steps: int, n: int, numel: int, agreement: float, seed: int = 0) -> torch.Tensor:
    """Gradients of ranks that have a share of their variance in common."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(steps, 1, numel, generator=generator)
    own = torch.randn(steps, n, numel, generator=generator)
    return math.sqrt(agreement) * common + math.sqrt(1 - agreement) * own


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_union_settles_just_below_k_and_never_exceeds_it(n: int, agreement: float) -> None:
    stream = alike(40, n, 20_000, agreement)
    densities = [s.density for s in ls.simulate(stream, sparsifier="union_topk", density=0.01)]
    assert max(densities) <= 0.01
    assert sum(densities[20:]) / 20 > 0.0095
    shared = [s.density for s in ls.simulate(stream, sparsifier="shared_topk", density=0.01)]
    assert sum(shared[20:]) / 20 <= sum(densities[20:]) / 20


def test_each_rank_picks_its_own_largest_in_the_whole_group() -> None:
    stream = alike(3, 4, 5000, 0.3).double()
    residuals = np.zeros((4, 5000))
    ranks_step = ls.simulate(stream, sparsifier="union_topk", density=0.02, exchange="reduce_union")
    for rows, step in zip(stream.numpy(), ranks_step, strict=True):
        acc = residuals + rows
        tops = [np.argsort(-np.abs(a), kind="stable")[:c] for a, c in zip(acc, step.counts.tolist(), strict=True)]
        union = np.unique(np.concatenate(tops))
        assert set(step.indices.tolist()) <= set(union.tolist())
        assert len(step.indices) == min(len(union), 100)
        residuals = acc
        residuals[:, step.indices.numpy()] = 0


def test_fractions_of_a_pick_go_to_the_ranks_in_turns() -> None:
    # k = 6 for 4 ranks: 1.5 each, by ranks that have nothing in common.
    stream = alike(8, 4, 600, 0.0)
    counts = torch.stack([s.counts for s in ls.simulate(stream, sparsifier="union_topk", density=0.01)])
    assert counts[0].tolist().count(1) == counts[0].tolist().count(2) == 2
    assert counts.sum(0).unique().numel() == 1
    # k = 1 for 4 ranks: one of them at a time.
    few = [s.counts for s in ls.simulate(stream, sparsifier="union_topk", density=0.001)]
    assert all(sorted(c.tolist()) == [0, 0, 0, 1] for c in few)
    assert torch.equal(torch.stack(few).sum(0), torch.full((4,), 2))


@pytest.mark.parametrize("max_factor", [1.0, 1.5, 2.0])
def test_shares_stay_within_the_bound_where_all_ranks_pick_the_same(max_factor: float) -> None:
    stream = alike(20, 4, 10_000, 1.0)
    *_, last = ls.simulate(stream, sparsifier=ls.UnionTopK(max_factor=max_factor), density=0.01)
    assert last.counts.tolist() == [max_factor * 25] * 4 or last.counts.sum() == int(4 * 25 * max_factor)
    assert last.indices.numel() == int(last.counts.max())


def test_a_falling_density_does_not_confuse_the_share() -> None:
    # The union of the step before was made for another k: compared with that k, it says what it always says.
    schedule = ls.Warmup(0.2, 0.01, steps=10)
    steps = list(ls.simulate(alike(30, 4, 20_000, 0.0), sparsifier="union_topk", density=schedule))
    assert all(abs(s.density - s.target_density) <= 0.06 * s.target_density for s in steps[2:])


@pytest.mark.parametrize("max_factor", [0.99, 0.0, -1.0, float("inf"), float("nan"), True, "2"])
def test_a_bound_below_1_is_refused(max_factor: float) -> None:
    with pytest.raises(ValueError, match="max_factor to be a finite number of at least 1"):
        ls.UnionTopK(max_factor=max_factor)


def test_the_largest_bound_there_is_works() -> None:
    *_, trace = ls.simulate(torch.ones(20, 2, 50), sparsifier=ls.UnionTopK(max_factor=1e308), density=0.8)
    assert 23 < len(trace.indices) <= 40  # both pick the same, and more and more of it
