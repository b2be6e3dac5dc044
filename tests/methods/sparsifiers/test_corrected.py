"""MiCRO and ExDyna with the corrected rules: the density from the first step on, and ranges that tile and balance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine.drivers import drive_mirrored
from lightning_sparse.methods.density import count
from tests.covering import by_default, covering, in_one_test, in_turns
from tests.lockstep import noise

METHODS = [ls.sparsifiers.MiCRO(), ls.sparsifiers.ExDyna(num_blocks=64)]
PUBLISHED = [ls.sparsifiers.MiCRO(variant="published"), ls.sparsifiers.ExDyna(variant="published", num_blocks=64)]
each_method = pytest.mark.parametrize("sparsifier", METHODS, ids=["micro", "exdyna"])


def normal(steps: int, n: int, numel: int, scale: float = 1.0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(n)
    for _ in range(steps):
        yield scale * torch.randn(n, numel, generator=generator)


def accumulated(sparsifier: ls.sparsifiers.Sparsifier, density: float) -> Iterator[tuple[Tensor, Any]]:
    """Accumulators of four ranks, and what is then picked of each."""
    residual = torch.zeros(4, 2000)
    traces = ls.simulate(normal(20, 4, 2000), sparsifier=sparsifier, density=density)
    for rows, trace in zip(normal(20, 4, 2000), traces, strict=True):
        acc = residual + rows
        yield acc, trace
        residual = acc
        residual[:, trace.indices] = 0


@in_one_test("sparsifier, scale, n", covering(product(METHODS, [1e-6, 1.0, 1e6], [1, 2, 4, 8])))
def test_the_density_is_met_at_every_step_whatever_the_scale(
    sparsifier: ls.sparsifiers.Sparsifier, scale: float, n: int
) -> None:
    for trace in ls.simulate(normal(10, n, 8000, scale), sparsifier=sparsifier, density=0.01):
        assert abs(trace.density / 0.01 - 1) <= 0.10
        # In fact it is met exactly: the shares of the ranks are rounded so that they sum to k.
        assert trace.counts.sum() == trace.indices.numel() == 80


@in_one_test("published, scale, n", covering(product(PUBLISHED, [1e-6, 1.0, 1e6], [1, 2, 4, 8]), together=1))
def test_the_published_rule_misses_the_density_on_the_same_streams(
    published: ls.sparsifiers.Sparsifier, scale: float, n: int
) -> None:
    traces = list(ls.simulate(normal(30, n, 8000, scale), sparsifier=published, density=0.01))
    errors = [abs(trace.density / 0.01 - 1) for trace in traces[20:]]
    assert min(errors) > 0.10


@each_method
def test_each_rank_picks_the_largest_of_its_own_range(sparsifier: ls.sparsifiers.Sparsifier) -> None:
    for acc, trace in accumulated(sparsifier, 0.02):
        for rank, (first, last) in enumerate(trace.partition.tolist()):
            picked = trace.indices[(trace.indices >= first) & (trace.indices < last)]
            assert picked.numel() == trace.counts[rank]
            largest = acc[rank, first:last].abs().topk(picked.numel()).indices + first
            assert torch.equal(picked, largest.sort().values)


@each_method
def test_the_threshold_parts_what_is_picked_from_what_is_not_but_for_rounded_shares(
    sparsifier: ls.sparsifiers.Sparsifier,
) -> None:
    # k = 16 and 4 ranks: at most 8 picks a rank, all of whose magnitudes are shared. The count of a rank above any
    # magnitude is then known up to one, the interpolation between neighbours, and so is its share.
    for acc, trace in accumulated(sparsifier, 16 / 2000):
        for rank, (first, last) in enumerate(trace.partition.tolist()):
            above = int((acc[rank, first:last].abs() >= trace.threshold[rank]).sum())
            assert 0 <= int(trace.counts[rank]) - min(above, 8) <= 1


@each_method
@pytest.mark.parametrize("n", [2, 4, 8])
def test_no_rank_sends_more_than_twice_its_share(sparsifier: ls.sparsifiers.Sparsifier, n: int) -> None:
    # All large gradients are in one eighth of the group.
    rows = noise(n, 4000, dtype=torch.float32)
    rows[:, 500:] *= 1e-3
    for trace in ls.simulate([rows] * 5, sparsifier=sparsifier, density=0.05):
        assert trace.counts.sum() == 200
        assert trace.counts.max() <= -(-2 * 200 // n)


@in_one_test(
    "sparsifier, n, numel",
    covering(
        product(METHODS, [1, 2, 4, 8], [1, 2, 7, 31, 33, 257]),
        together=1,
        seen_as=lambda sparsifier, n, numel: ((sparsifier, n), (sparsifier, numel)),
    ),
)
def test_small_groups_are_served_with_at_least_one_pick_and_exactly_k(
    sparsifier: ls.sparsifiers.Sparsifier, n: int, numel: int
) -> None:
    # k < n, numel < n, k = numel: the published rule fails or overshoots at all of these.
    for density in (0.001, 0.3, 1.0):
        k = count(density, numel)
        for trace in ls.simulate(normal(3, n, numel), sparsifier=sparsifier, density=density):
            assert len(trace.indices) == k
            assert trace.counts.sum() == (k if k < numel else n * numel)


@each_method
def test_the_density_holds_when_the_scale_jumps(sparsifier: ls.sparsifiers.Sparsifier) -> None:
    calm, wild = normal(15, 4, 8000), normal(15, 4, 8000, scale=100.0)
    stream = itertools.chain(calm, wild, normal(15, 4, 8000))
    thresholds = []
    for trace in ls.simulate(stream, sparsifier=sparsifier, density=0.01):
        assert trace.counts.sum() == 80
        thresholds.append(float(trace.threshold[0]))
    assert thresholds[15] > 10 * thresholds[14]  # it follows at once


@each_method
@pytest.mark.parametrize("freedom", [2.0, 1.0])
def test_the_density_holds_for_heavy_tails(sparsifier: ls.sparsifiers.Sparsifier, freedom: float) -> None:
    # Student-t with 2 degrees of freedom has no variance, with 1 (Cauchy) no mean.
    torch.manual_seed(0)
    tails = torch.distributions.StudentT(freedom)
    stream = (tails.sample((4, 8000)) for _ in range(20))
    for trace in ls.simulate(stream, sparsifier=sparsifier, density=0.01):
        assert trace.counts.sum() == 80


@each_method
def test_the_density_holds_where_ranks_differ_by_orders_of_magnitude(sparsifier: ls.sparsifiers.Sparsifier) -> None:
    for trace in ls.simulate(
        (rows * torch.tensor([[1e-8], [1e-3], [1.0], [1e4]]) for rows in normal(10, 4, 8000)),
        sparsifier=sparsifier,
        density=0.01,
    ):
        assert trace.counts.sum() == 80


@each_method
def test_ties_are_broken_so_that_k_are_picked(sparsifier: ls.sparsifiers.Sparsifier) -> None:
    for trace in ls.simulate([torch.ones(4, 1000)] * 5, sparsifier=sparsifier, density=0.05):
        assert trace.counts.sum() == trace.indices.numel() == 50


@each_method
@pytest.mark.parametrize("power", by_default([-60, -1, 20]))
def test_scaling_all_gradients_by_a_power_of_two_changes_no_pick(
    sparsifier: ls.sparsifiers.Sparsifier, power: int
) -> None:
    # Exact in floating point as long as nothing overflows or becomes subnormal: gradients 2**-60 are far from both.
    plain = ls.simulate(normal(20, 4, 4000), sparsifier=sparsifier, density=0.02)
    scaled = ls.simulate(normal(20, 4, 4000, scale=2.0**power), sparsifier=sparsifier, density=0.02)
    for a, b in zip(plain, scaled, strict=True):
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.counts, b.counts)
        assert torch.equal(a.update * 2.0**power, b.update)
        assert torch.equal(a.threshold * 2.0**power, b.threshold)


@pytest.mark.parametrize(("numel", "n"), covering(in_turns([1, 3, 100, 101, 103, 9973], [7, 4, 2, 1]), together=1))
def test_ranges_of_micro_differ_by_at_most_one_and_turn_by_one_a_step(numel: int, n: int) -> None:
    traces = list(ls.simulate(normal(2 * n, n, numel), sparsifier="micro", density=0.2))
    for trace in traces:
        assert_tiles(trace.partition, numel)
        sizes = (trace.partition[:, 1] - trace.partition[:, 0]).tolist()
        assert max(sizes) - min(sizes) <= 1
    for before, after in itertools.pairwise(traces):
        assert torch.equal(after.partition, before.partition.roll(-1, dims=0))
    if n <= numel:
        for rank in range(n):
            assert len({tuple(trace.partition[rank].tolist()) for trace in traces[:n]}) == n


def assert_tiles(partition: Tensor, numel: int) -> None:
    """The ranges cover [0, numel) without gap or overlap; empty ones may lie anywhere."""
    spans = sorted((first, last) for first, last in partition.tolist() if first != last)
    assert spans[0][0] == 0
    assert spans[-1][1] == numel
    assert all(last == first for (_, last), (first, _) in itertools.pairwise(spans))
    assert bool((partition[:, 0] <= partition[:, 1]).all())


class Ranges:
    """Feed ExDyna with counts as data and watch its ranges; the ranks' gradients are all zero."""

    def __init__(self, sparsifier: ls.sparsifiers.ExDyna, numel: int, n: int) -> None:
        self.sparsifier, self.numel, self.n, self.step = sparsifier, numel, n, 0
        self.state = sparsifier.init(numel, n, 0.1, torch.device("cpu"))

    def after(self, counts: list[int] | None) -> Tensor:
        """(n, 2) first and past-the-end coordinate of range p = 0 .. n - 1, once these counts (by rank) are known."""
        known = None if counts is None else torch.tensor(counts)
        ctx = Context(step=self.step, density=0.1, rank=0, world_size=self.n, counts=known)
        steps = self.sparsifier.select(torch.zeros(self.numel), self.state, ctx)
        (_, self.state), _ = drive_mirrored(steps, self.n)
        spans = self.sparsifier.ranges(self.numel, self.state, ctx)
        self.step += 1
        return spans.roll(ctx.step, dims=0)  # rank i holds range (step + i) mod n


def test_blocks_go_from_the_loaded_to_the_idle_neighbour() -> None:
    # 1024 coordinates in 8 blocks of 128, 4 for each of two ranges. Rank 0 holds range 0 in step 0, range 1 in step 1.
    ranges = Ranges(ls.sparsifiers.ExDyna(num_blocks=8), 1024, 2)
    assert ranges.after(None).tolist() == [[0, 512], [512, 1024]]
    # Range 0 sent 30, range 1 sent 10; the mean is 20: 1.5 > 1.05 and 0.5 < 1 / 1.05.
    assert ranges.after([30, 10]).tolist() == [[0, 384], [384, 1024]]
    # In step 1 rank 1 held range 0: it sent 30 again, and another block goes.
    assert ranges.after([10, 30]).tolist() == [[0, 256], [256, 1024]]
    # In step 2 rank 0 held range 0: now it is idle, and a block comes back.
    assert ranges.after([10, 30]).tolist() == [[0, 384], [384, 1024]]
    # 21 and 20 are within the tolerance of 5 %: 21 / 20.5 = 1.024.
    assert ranges.after([20, 21]).tolist() == [[0, 384], [384, 1024]]
    # Nobody sent anything.
    assert ranges.after([0, 0]).tolist() == [[0, 384], [384, 1024]]


def test_a_pair_sees_what_the_pair_before_is_expected_to_have_moved() -> None:
    # Loads 24, 15, 22 of three ranges of 4 blocks of 32: mean 20.33, and 61 of 384 picked, so a block is expected to
    # carry int(32 * 61 / 384) = 5. Pair 0, 1: 1.18 and 0.74, a block goes right; the loads are now 19, 20, 22.
    # Pair 1, 2: 20 / 20.33 = 0.98 is not idle, and range 2 (1.08) keeps its blocks. At 0.74 one would have gone left.
    ranges = Ranges(ls.sparsifiers.ExDyna(num_blocks=12), 384, 3)
    ranges.after(None)
    assert ranges.after([24, 15, 22]).tolist() == [[0, 96], [96, 256], [256, 384]]
    # With 18 in range 0 (mean 18.33) the first pair does not move, and range 1 gets a block from the right.
    ranges = Ranges(ls.sparsifiers.ExDyna(num_blocks=12), 384, 3)
    ranges.after(None)
    assert ranges.after([18, 15, 22]).tolist() == [[0, 128], [128, 288], [288, 384]]


def test_a_range_keeps_a_quarter_of_its_fair_share_of_blocks() -> None:
    # 16 blocks of 32, 8 for each of two ranges; at least 16 / (4 * 2) = 2 stay.
    ranges = Ranges(ls.sparsifiers.ExDyna(num_blocks=16), 512, 2)
    ranges.after(None)
    ends = []
    for step in range(10):
        counts = [50, 0] if step % 2 == 0 else [0, 50]  # range 0 is loaded throughout
        ends.append(ranges.after(counts).tolist()[0][1])
    assert ends == [224, 192, 160, 128, 96, 64, 64, 64, 64, 64]


def test_a_larger_move_takes_several_blocks_at_once_but_never_below_the_minimum() -> None:
    ranges = Ranges(ls.sparsifiers.ExDyna(num_blocks=16, move=4), 512, 2)
    ranges.after(None)
    assert ranges.after([50, 0]).tolist() == [[0, 128], [128, 512]]
    assert ranges.after([0, 50]).tolist() == [[0, 128], [128, 512]]  # 4 - 4 would be below 2


def test_alpha_sets_the_tolerated_imbalance() -> None:
    # Loads 12 and 8, mean 10: 1.2 and 0.8. A tolerance of 1.15 (0.87) moves a block, one of 1.25 (0.8) does not.
    for alpha, end in ((1.15, 224), (1.25, 256)):
        ranges = Ranges(ls.sparsifiers.ExDyna(num_blocks=16, alpha=alpha), 512, 2)
        ranges.after(None)
        assert ranges.after([12, 8]).tolist() == [[0, end], [end, 512]]


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_ranges_tile_the_group_after_any_sequence_of_counts(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    numel = data.draw(st.sampled_from([1, 5, 31, 32, 1000, 1025, 4099]))
    num_blocks = data.draw(st.sampled_from([1, 8, 31, 1024]))
    served = num_blocks >= n and numel >= 32 * num_blocks  # by the published variant
    sparsifier = ls.sparsifiers.ExDyna(
        num_blocks=num_blocks,
        move=data.draw(st.sampled_from([1, 2, 5])),
        alpha=data.draw(st.sampled_from([1.0001, 1.05, 3.0])),
        variant=data.draw(st.sampled_from(["corrected", "published"] if served else ["corrected"])),
    )
    ranges = Ranges(sparsifier, numel, n)
    assert_tiles(ranges.after(None), numel)
    start = ranges.state.blocks
    least = start.double().clamp(max=int(start.sum()) / (4 * n))  # a quarter of a fair share
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    high = data.draw(st.sampled_from([1, 3, 1000]))
    for _ in range(60):
        counts = torch.randint(0, high + 1, (n,), generator=generator)
        assert_tiles(ranges.after(counts.tolist()), numel)
        assert int(ranges.state.blocks.sum()) == int(start.sum())
        assert bool((ranges.state.blocks >= least).all())


@pytest.mark.parametrize(
    ("numel", "n", "num_blocks", "size", "blocks"),
    [
        (32 * 1024, 4, 1024, 32, 1024),
        (32 * 1024 + 1, 4, 1024, 32, 1025),  # the remainder is a short last block
        (64 * 1024 - 1, 4, 1024, 32, 2048),  # the largest multiple of 32 that gives at least num_blocks
        (64 * 1024, 4, 1024, 64, 1024),
        (1000, 2, 1024, 32, 32),
        (100, 4, 1024, 6, 17),  # 4 blocks of 32 would be fewer than 4 * 4
        (7, 4, 1024, 1, 7),
        (1, 8, 1024, 1, 1),
    ],
)
def test_blocks_are_multiples_of_32_where_the_group_is_large_enough(
    numel: int, n: int, num_blocks: int, size: int, blocks: int
) -> None:
    assert ls.sparsifiers.ExDyna(num_blocks=num_blocks).layout(numel, n) == (size, blocks)


@pytest.mark.thorough
def test_layered_gradients_end_balanced_and_with_fixed_ranges_they_do_not() -> None:
    # The scale rises threefold along the group. With 80 picks a rank, chance alone gives a ratio of about 1.1.
    scale = torch.linspace(0.5, 1.5, 16_000)
    stream = [scale * rows for rows in normal(80, 4, 16_000)]
    moving = ls.sparsifiers.ExDyna(num_blocks=64, move=2)
    balanced = [trace.padding_ratio for trace in ls.simulate(stream, sparsifier=moving, density=0.02)]
    fixed = [trace.padding_ratio for trace in ls.simulate(stream, sparsifier="micro", density=0.02)]
    assert sum(balanced[:5]) / 5 > 1.5
    assert sum(balanced[-20:]) / 20 < 1.3
    assert sum(fixed[-20:]) / 20 > 1.5


@each_method
def test_every_coordinate_is_sent_in_the_long_run(sparsifier: ls.sparsifiers.Sparsifier) -> None:
    # Error feedback makes what waits grow, so nothing starves, at a density of 5 % after well over 20 steps.
    sent = torch.zeros(500, dtype=torch.bool)
    for trace in ls.simulate([torch.ones(4, 500)] * 60, sparsifier=sparsifier, density=0.05):
        sent[trace.indices] = True
    assert bool(sent.all())
