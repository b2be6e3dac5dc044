"""Split and reduce: where regions begin, what fits into a message, and how much travels."""

from __future__ import annotations

import math

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.core.step import Context, Selection
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.methods.exchanges.balanced import _regions, _split
from tests.covering import covering, in_turns
from tests.lockstep import Ranks, noise
from tests.reference.merged import boundaries_of_regions, split_and_reduce, thinned


def regions(selections: list[Selection], numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What all ranks of a list of selections find: boundaries and counts."""
    n = len(selections)
    contexts = [Context(0, 0.1, rank, n) for rank in range(n)]
    found = drive_ranks([_regions(s, numel, ctx) for s, ctx in zip(selections, contexts, strict=True)])
    assert all(torch.equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))
    return found[0]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_regions_tile_the_group_and_hold_about_equally_many_picks(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for numel, longest in ((1, 1), (5, 5), (300, 3), (300, 40), (100_000, 2000)):
        offers = []
        for rank in range(n):
            # Crowded towards the front, fewer on later ranks, and none on some.
            places = (torch.rand(longest // (1 + rank % 3), generator=generator) ** 2 * numel).long().unique()
            offers.append(places[: len(places) * (rank % 4 != 3)])
        selections = [Selection(torch.cat([p, p.new_full((3,), numel)]), torch.tensor(len(p))) for p in offers]
        bounds, counts = regions(selections, numel)
        assert counts.tolist() == [len(p) for p in offers]
        assert bounds.tolist() == boundaries_of_regions([dict.fromkeys(p.tolist(), 1.0) for p in offers], numel)
        assert (bounds[0], bounds[-1], bounds.numel()) == (0, numel, n + 1)
        assert bool((bounds.diff() >= 0).all())
    held = torch.stack([torch.searchsorted(p, bounds).diff() for p in offers if len(p)]).sum(0)
    assert held.max() < 1.5 * held.sum() / n


@pytest.mark.parametrize("phase", [0, 1, 5, 1000])
@pytest.mark.parametrize("slots", [1, 3, 10, 40])
def test_a_crowded_region_loses_the_same_share_everywhere(slots: int, phase: int) -> None:
    picks = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:30].sort().values
    bounds = torch.tensor([0, 0, 100, 650, 1000])
    rows = _split(torch.cat([picks, torch.full((5,), 1000)]), bounds, slots, phase)
    assert rows.shape == (4, slots)
    for row, first, last in zip(rows, bounds[:-1], bounds[1:], strict=True):
        expected = thinned([j for j in picks.tolist() if first <= j < last], slots, phase)
        assert row.tolist() == expected + [1000] * (slots - len(expected))


def test_every_pick_of_a_crowded_region_has_its_turn() -> None:
    picks, seen = torch.arange(0, 70, 2), set()
    for step in range(35):
        seen |= set(_split(picks, torch.tensor([0, 100]), 10, step)[0].tolist())
    assert seen == set(picks.tolist())


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.float64, 8)])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "sparsifier",
    [ls.sparsifiers.OkTopK(), ls.sparsifiers.TopK(), ls.sparsifiers.HardThreshold(0.5)],
    ids=["ok", "top_k", "hard"],
)
def test_traffic_by_hand(n: int, dtype: torch.dtype, width: int, sparsifier: ls.sparsifiers.Sparsifier) -> None:
    numel, k = 500, 50
    for trace in ls.simulate(
        [noise(n, numel, seed=s, dtype=dtype) for s in range(3)],
        sparsifier=sparsifier,
        density=k / numel,
        exchange="balanced",
    ):
        slots = math.ceil(1.5 * k / n)
        boundaries = 2 * (n - 1) / n * (2 * n - 1) * 8
        pairs = (n - 1) * slots * (4 + width)  # once to their owners, once as sums to everyone
        assert trace.bytes_sent.tolist() == pytest.approx([boundaries + 2 * pairs] * n)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_traffic_stays_within_the_bound_of_the_paper(n: int, density: float) -> None:
    numel = 3000
    k = int(density * numel)
    rows = noise(n, numel, dtype=torch.float32)
    for sparsifier in (ls.sparsifiers.OkTopK(), ls.sparsifiers.HardThreshold(0.1)):
        if density == 1 and sparsifier == ls.sparsifiers.OkTopK():
            continue  # nothing is picked then
        trace = next(ls.simulate([rows], sparsifier=sparsifier, density=density, exchange="balanced"))
        words = float(trace.bytes_sent.max()) / 4
        assert words <= 6 * k * (n - 1) / n + 12 * (n - 1)
        assert words > 6 * k * (n - 1) / n - 1  # no slack either: the bound is what is sent
        assert len(trace.indices) <= k


def test_what_does_not_fit_stays_with_its_rank_and_comes_later() -> None:
    # One rank alone has all picks, and only 15 of its 40 fit into the message for each half.
    rows = torch.zeros(2, 100, dtype=torch.float64)
    rows[1] = torch.arange(100.0)
    ranks = Ranks(2, 100, sparsifier=ls.sparsifiers.HardThreshold(59.5), exchange="balanced", density=0.2)
    offers = [{}, {j: float(j) for j in range(60, 100)}]
    result, taken = split_and_reduce(offers, 100, 20, 0)
    assert (len(result), taken[0], len(taken[1])) == (20, [], 20)
    outcome = ranks.step(rows)
    assert outcome.averages[0].nonzero().flatten().tolist() == sorted(result)
    kept = rows[1].clone()
    kept[taken[1]] = 0
    assert torch.equal(outcome.after[1], kept)
    total = outcome.averages[0].clone()
    for _ in range(5):
        total += ranks.step(torch.zeros_like(rows)).averages[0]
    assert torch.equal(total[60:], rows[1, 60:] / 2)


@pytest.mark.parametrize(("n", "quiet"), covering(in_turns([2, 3, 8], [False, True]), together=1))
def test_one_bad_rank_is_heard_among_large_values_wherever_it_sits(n: int, quiet: bool) -> None:
    for bad in range(n):
        rows = torch.full((n, 50), 1e30, dtype=torch.float64)
        rows[bad] = 1e-3 if quiet else 1.0
        rows[bad, 49] = float("nan")
        rows[:, 0] = rows[:, 0].where(torch.arange(n) % 2 == 0, 0)
        for density in (0.02, 0.5):
            for sparsifier in (ls.sparsifiers.HardThreshold(1.0), ls.sparsifiers.OkTopK()):
                outcome = Ranks(n, 50, sparsifier=sparsifier, exchange="balanced", density=density).step(rows)
                assert bool(torch.isnan(outcome.averages).all())
