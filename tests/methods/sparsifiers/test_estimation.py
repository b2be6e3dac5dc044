"""The survey that finds one threshold for all ranks, against sorting everything; and the published controller."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Context, Selection
from lightning_sparse.engine.drivers import drive_mirrored, drive_ranks
from lightning_sparse.methods.sparsifiers.estimation import follow, force_one, pick_jointly, split


def survey(candidates: list[np.ndarray], k: int, points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What ranks tell each other: magnitudes at evenly spaced order statistics, which ones, and sizes. In numpy."""
    n = len(candidates)
    most = min(k, sum(map(len, candidates)), math.ceil(2 * k / n))
    grid = np.linspace(1, most, min(most, points)).round()
    heard = np.zeros((n, len(grid)))
    for rank, magnitudes in enumerate(candidates):
        ordered = np.sort(magnitudes)[::-1][:most]
        for slot, order in enumerate(grid.astype(int)):
            heard[rank, slot] = ordered[order - 1] if order <= len(ordered) else 0.0
    return heard, grid, np.array([min(len(magnitudes), most) for magnitudes in candidates], dtype=float)


def shares_of(candidates: list[np.ndarray], k: int, points: int) -> tuple[list[int], float, np.ndarray]:
    heard, grid, sizes = survey(candidates, k, points)
    given = [torch.from_numpy(x) for x in (heard, grid, sizes)]
    shares, threshold = split(*given, k)
    assert shares.dtype == torch.int64
    return shares.tolist(), float(threshold), grid


def exact_shares(candidates: list[np.ndarray], k: int) -> list[int]:
    """Sort all candidates of all ranks, where none offers more than twice its share; count whose the k largest are."""
    most = min(k, math.ceil(2 * k / len(candidates)))
    offered = [(-m, rank) for rank, values in enumerate(candidates) for m in np.sort(values)[::-1][:most]]
    chosen = [rank for _, rank in sorted(offered)[:k]]
    return [chosen.count(rank) for rank in range(len(candidates))]


@settings(deadline=None, max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=8).filter(any),
    k=st.integers(1, 300),
    points=st.sampled_from([8, 13, 32]),
    kind=st.sampled_from(["normal", "cauchy", "ties", "zeros", "equal", "scales"]),
    seed=st.integers(0, 2**16),
)
def test_shares_sum_to_k_and_stay_within_what_each_rank_has(
    sizes: list[int], k: int, points: int, kind: str, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    candidates = []
    for rank, size in enumerate(sizes):
        magnitudes = np.abs(generator.normal(size=size))
        if kind == "cauchy":
            magnitudes = np.abs(generator.standard_cauchy(size=size))
        elif kind == "ties":
            magnitudes = np.round(magnitudes)
        elif kind == "zeros":
            magnitudes *= generator.random(size) < 0.1
        elif kind == "equal":
            magnitudes[:] = 1.0
        elif kind == "scales":
            magnitudes *= 10.0 ** (-4 * rank)
        candidates.append(magnitudes)
    shares, threshold, grid = shares_of(candidates, k, points)
    _, _, available = survey(candidates, k, points)
    assert sum(shares) == min(k, int(available.sum()))
    assert all(0 <= share <= size for share, size in zip(shares, available, strict=True))
    assert math.isfinite(threshold)
    assert threshold >= 0
    if kind in ("normal", "cauchy", "scales") and sum(shares) == k:
        # Between shared order statistics the count of a rank is known up to the gap g of the grid. Counts are off by at
        # most g at the threshold found, so their sum by n g, which moves the count of one rank by as much at the right
        # threshold; rounding adds one.
        gap = np.diff(grid, prepend=0).max()
        for share, exact in zip(shares, exact_shares(candidates, k), strict=True):
            assert abs(share - exact) <= (len(sizes) + 1) * gap + 1


@pytest.mark.parametrize("points", [8, 32])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_shares_of_like_ranks_are_within_a_grid_step_of_sorting_everything(n: int, points: int) -> None:
    # The bound above is for the worst case. On normal data the errors of ranks cancel: one step of the grid is enough.
    generator = np.random.default_rng(n)
    for _ in range(20):
        candidates = [np.abs(generator.normal(size=2000)) for _ in range(n)]
        shares, threshold, grid = shares_of(candidates, 200, points)
        exact = exact_shares(candidates, 200)
        assert max(abs(a - b) for a, b in zip(shares, exact, strict=True)) <= np.diff(grid).max() + 1
        kth = np.sort(np.concatenate(candidates))[::-1][199]
        assert threshold == pytest.approx(kth, rel=0.02)


def split_of(heard: list[list[float]], grid: list[int], sizes: list[int], k: int) -> tuple[list[int], float]:
    as_double = (torch.tensor(x, dtype=torch.float64) for x in (heard, grid, sizes))
    shares, threshold = split(*as_double, k)
    return shares.tolist(), float(threshold)


def test_split_by_hand() -> None:
    # Ranks hold 9, 7, 5, 3 and 8, 6, 4, 2, all of it shared. At 6, rank 1 has 2 and rank 0 (between 7 and 5) 2.5; at 7,
    # rank 0 has 2 and rank 1 (between 8 and 6) 1.5. 4 are reached at 7 - 1 * 0.5 = 6.5: 2.25 and 1.75, rounded 2 and 2.
    assert split_of([[9, 7, 5, 3], [8, 6, 4, 2]], [1, 2, 3, 4], [4, 4], 4) == ([2, 2], 6.5)


def test_the_remainder_goes_to_the_largest_fraction_and_then_to_the_lower_rank() -> None:
    # Ten equal candidates a rank, k = 10 of 40: 2.5 each.
    assert split_of([[1.0] * 5] * 4, [1, 2, 3, 4, 5], [5] * 4, 10)[0] == [3, 3, 2, 2]
    # 3 of 3 + 1 candidates at the same magnitude: 2.25 and 0.75, and the larger fraction is rank 1's.
    assert split_of([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], [1, 2, 3], [3, 1], 3)[0] == [2, 1]


def test_a_rank_without_candidates_has_no_share() -> None:
    assert split_of([[0.0, 0.0], [5.0, 4.0]], [1, 2], [0, 2], 2)[0] == [0, 2]
    assert split_of([[0.0, 0.0], [5.0, 4.0]], [1, 2], [0, 2], 3)[0] == [0, 2]  # all there is


def test_zeros_are_candidates_too_when_nothing_else_is_left() -> None:
    shares, threshold = split_of([[3.0, 0.0], [0.0, 0.0]], [1, 2], [2, 2], 3)
    assert sum(shares) == 3
    assert shares[0] >= 1
    assert 0 <= threshold < 3


@pytest.mark.parametrize("power", [-100, 3, 200])
def test_split_does_not_depend_on_a_power_of_two(power: int) -> None:
    heard = torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sort(descending=True)[0]
    grid, sizes = torch.arange(1, 16, 2.0, dtype=torch.float64), torch.full((4,), 15.0, dtype=torch.float64)
    shares, threshold = split(heard, grid, sizes, 20)
    scaled, moved = split(heard * 2.0**power, grid, sizes, 20)
    assert torch.equal(scaled, shares)
    assert moved == threshold * 2.0**power


def test_picking_jointly_takes_its_share_largest_first_and_pads_to_the_longest() -> None:
    # Rank 0 of 2 owns coordinates 2 to 5. Rank 1 is heard to have 6 and 1. k = 3: 9, 6 and the 5 of rank 0.
    acc = torch.tensor([100.0, 100.0, 9.0, -5.0, 0.5, 0.0, 100.0])
    spans = torch.tensor([[2, 6], [0, 2]])
    ctx = Context(step=0, density=0.5, rank=0, world_size=2)
    # The other rank, which has one pick and as many slots.
    beside = torch.tensor([6.0, -1.0, 0, 0, 0, 0, 0])
    asked = []

    def pick(acc: torch.Tensor, rank: int) -> Steps[Selection]:
        steps = pick_jointly(acc, spans, 3, ctx._replace(rank=rank))
        message = next(steps)
        asked.append((message.kind, message.x.tolist()))
        try:
            steps.send((yield message))
        except StopIteration as end:
            return end.value
        raise AssertionError("a second message")

    selection, other = drive_ranks([pick(acc, 0), pick(beside, 1)])
    assert asked == [("all_gather", [9.0, 5.0, 0.5]), ("all_gather", [6.0, 1.0, 0.0])]
    assert selection.indices.tolist() == [2, 3]
    assert int(selection.count) == 2
    # At 6 the ranks have 1.75 and 1, at 5 they have 2 and 1.2: 3 are reached 5/9 of the way down.
    assert float(selection.threshold) == pytest.approx(6 - 5 / 9, rel=1e-12)
    assert (selection.aligned, selection.total) == (True, 3)
    assert other.indices.tolist() == [0, 7]
    assert int(other.count) == 1
    assert other.threshold == selection.threshold


@pytest.mark.parametrize(("n", "points"), [(1, 32), (8, 32), (16, 16), (32, 8), (64, 8)])
def test_the_survey_is_short_and_shorter_with_more_ranks(n: int, points: int) -> None:
    bounds = torch.arange(n + 1) * 100
    spans = torch.stack([bounds[:-1], bounds[1:]], dim=1)
    ctx = Context(step=0, density=0.5, rank=0, world_size=n)
    _, messages = drive_mirrored(pick_jointly(torch.rand(100 * n), spans, 50 * n, ctx), n)
    assert [(message.kind, message.x.numel()) for message in messages] == [("all_gather", points)]


# k = 1000: 0.909 and 1.1 are the edges of the published band. There is no dead zone: inside it the threshold rises.
@pytest.mark.parametrize(
    ("picked", "factor"),
    [(0, 0.995), (500, 0.995), (909, 0.995), (910, 1.00125), (1000, 1.00125), (1100, 1.00125), (1101, 1.005)],
)
def test_the_threshold_follows_the_count_of_all_ranks(picked: int, factor: float) -> None:
    counts = torch.tensor([picked // 2, picked - picked // 2])
    threshold = torch.tensor(0.25, dtype=torch.float64)
    moved = follow(threshold, counts, 1000, 1.1, 0.005)
    assert moved.dtype == torch.float64
    assert float(moved) == 0.25 * factor
    assert threshold == 0.25


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 10**6), st.floats(1.01, 3), st.floats(0.001, 0.5))
def test_too_many_never_lower_the_threshold_and_too_few_never_raise_it(
    picked: int, k: int, beta: float, gamma: float
) -> None:
    moved = float(follow(torch.tensor(1.0, dtype=torch.float64), torch.tensor([picked]), k, beta, gamma))
    assert 1 - gamma <= moved <= 1 + gamma
    if picked > k:
        assert moved > 1
    if picked < k / (beta + 0.01):  # the lower edge is rounded to three digits
        assert moved < 1


def test_before_the_first_counts_the_threshold_stays() -> None:
    threshold = torch.tensor(0.25, dtype=torch.float64)
    assert follow(threshold, None, 10, 1.1, 0.005) is threshold


def test_a_rank_that_found_nothing_is_given_one_coordinate_that_rotates() -> None:
    empty = Selection(torch.empty(0, dtype=torch.int64), torch.tensor(0))
    forced = [force_one(empty, 10, 13, step) for step in range(5)]
    assert [selection.indices.tolist() for selection in forced] == [[10], [11], [12], [10], [11]]
    assert [int(selection.count) for selection in forced] == [1] * 5
    found = force_one(Selection(torch.tensor([11, 12]), torch.tensor(2)), 10, 13, 0)
    assert (found.indices.tolist(), int(found.count)) == ([11, 12], 2)
    padded = force_one(Selection(torch.tensor([99, 99]), torch.tensor(0)), 10, 13, 1)
    assert (padded.indices.tolist(), int(padded.count)) == ([11, 99], 1)
