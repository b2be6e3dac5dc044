"""Picks that fill the union, whatever ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine.state.schema import from_plain, to_plain
from lightning_sparse.methods.density import count
from tests.covering import by_default, covering, in_turns
from tests.static_path import static_path


def alike(steps: int, n: int, numel: int, agreement: float, seed: int = 0) -> torch.Tensor:
    """Gradients of ranks that have a share of their variance in common."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(steps, 1, numel, generator=generator)
    own = torch.randn(steps, n, numel, generator=generator)
    return math.sqrt(agreement) * common + math.sqrt(1 - agreement) * own


def reference_union_top_k(
    stream: np.ndarray, density: float, most: float = 1.0, window: int = 64
) -> Iterator[tuple[list[int], list[int]]]:
    """Slow transcription of the rule, exchanged without rounding: picks of each rank, and the union, at every step."""
    _, n, numel = stream.shape
    k = max(1, int(density * numel))
    residual, needs = np.zeros((n, numel)), [most]
    fill = most
    for step, rows in enumerate(stream):
        acc = residual + rows
        named, spare, counts = set(), set(), []
        for rank in range(n):
            turn = (rank - step) % n
            order = np.argsort(-np.abs(acc[rank]), kind="stable").tolist()
            largest = order[: (k + turn) // n]
            stripe = [j for j in order if j % n == turn and j not in largest]
            others = stripe[: math.floor((fill * k + n - 1 - turn) / n)]
            named.update(largest)
            spare.update(others)
            counts.append(len(largest) + len(others))
        spare -= named
        union, room = sorted(named), k - len(named)
        if len(spare) > room:  # evenly, and others in each step
            total = len(spare)
            chosen = [j for i, j in enumerate(sorted(spare), 1) if (i * room + step) % total < room]
        else:
            chosen = sorted(spare)
        surplus = len(named) + len(spare) - k
        needs.append(min(1.0, max(0.0, 2 * fill if surplus < 0 else fill - surplus / k)))
        first = (step + 1) // window * window + 1  # of the steps in this window
        known = needs[max(1, first - window) :] if step + 1 >= window else needs
        fill = min(most, max(known) + 0.05 + 1 / k)
        union = sorted(union + chosen)
        yield counts, union
        residual = acc
        residual[:, union] = 0


@pytest.mark.parametrize(("agreement", "n"), covering(in_turns([0.0, 0.5, 0.8, 1.0], [2, 4, 8]), together=1))
def test_the_union_holds_k_at_every_step_where_shared_picks_fall_short(n: int, agreement: float) -> None:
    stream = alike(20, n, 20_000, agreement)
    assert {s.density for s in ls.simulate(stream, sparsifier="union_top_k", density=0.01)} == {0.01}
    shared = [s.density for s in ls.simulate(stream, sparsifier="shared_top_k", density=0.01)]
    assert max(shared) <= 0.01
    assert agreement == 0.0 or max(shared) < 0.01


@pytest.mark.parametrize("density", [0.3, 0.5, 0.7, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_high_densities_are_reached_though_all_ranks_agree(n: int, density: float) -> None:
    for numel in (100, 1003):
        steps = ls.simulate(alike(4, n, numel, 1.0), sparsifier="union_top_k", density=density)
        assert {len(s.indices) for s in steps} == {count(density, numel)}


def hot(steps: int, n: int, k: int, share: float, ratio: float) -> torch.Tensor:
    """Noise at density 0.01, and a share of k coordinates that are constant, equal on all ranks and larger."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(steps, n, 100 * k, generator=generator)
    stream[:, :, torch.randperm(100 * k, generator=generator)[: int(share * k)]] = ratio
    return stream


HOT = [(2, 4), (2, 320), (8, 4), (8, 40), (8, 320)]


LONG = [(n, k, steps) for n, steps in ((2, 150), (8, 150), (64, 30)) for k in (4, 40, 320)]


@pytest.mark.parametrize(
    ("run", "ratio", "share"),
    covering(
        product([*((n, k, 20) for n, k in HOT), (64, 40, 7), *LONG], [3.0, 1000.0], [0.25, 0.5]),
        together=1,
        thorough=LONG,
        seen_as=lambda run, ratio, share: (run, (ratio, share)),
    ),
)
@pytest.mark.timeout(600)
def test_what_all_ranks_agree_on_starves_nothing_else(run: tuple[int, int, int], ratio: float, share: float) -> None:
    n, k, steps = run
    seen, short = set(), []
    for step in ls.simulate(hot(steps, n, k, share, ratio), sparsifier="union_top_k", density=0.01):
        assert len(step.indices) == k or step.step >= 64  # after which fewer spare picks are named than might be needed
        short += [len(step.indices) / k] * (len(step.indices) < 0.98 * k)
        assert int(step.counts.max()) <= 2 * -(-k // n)
        seen.update(step.indices.tolist())
    assert len(short) <= steps / 50
    assert len(seen) > k  # not the same ones at every step


def test_one_coordinate_that_dwarfs_all_others_takes_no_more_than_its_place() -> None:
    stream = torch.randn(60, 8, 400, generator=torch.Generator().manual_seed(0))
    stream[:, :, 123] = 1000.0
    steps = list(ls.simulate(stream, sparsifier="union_top_k", density=0.01))
    assert all(len(step.indices) == 4 and 123 in step.indices for step in steps)
    assert len({j for step in steps for j in step.indices.tolist()}) > 120  # of 180 that could be sent


@pytest.mark.parametrize(
    ("n", "numel", "density"),
    by_default(
        [(2, 500, 0.02), (3, 301, 0.6), (8, 400, 0.01), pytest.param(4, 5000, 0.02, marks=pytest.mark.thorough)], 2
    ),
)
def test_picks_are_those_of_the_rule(n: int, numel: int, density: float) -> None:
    stream = alike(140, n, numel, 0.3).double()
    stream[:, :, ::50] *= 4
    expected = reference_union_top_k(stream.numpy(), density)
    steps = ls.simulate(stream, sparsifier="union_top_k", density=density, exchange="reduce_union")
    for (counts, union), step in zip(expected, steps, strict=True):
        assert step.counts.tolist() == counts
        assert step.indices.tolist() == union


@pytest.mark.thorough
def test_fewer_spare_picks_are_named_where_ranks_do_not_meet() -> None:
    steps = list(ls.simulate(alike(130, 8, 20_000, 0.0), sparsifier="union_top_k", density=0.01))
    assert {int(step.counts.sum()) for step in steps[:64]} == {400}  # before anything is known
    assert int(steps[-1].counts.sum()) < 240
    assert float(steps[-1].bytes_sent[0]) < 0.85 * float(steps[0].bytes_sent[0])


def test_fractions_of_a_pick_go_to_the_ranks_in_turns() -> None:
    # k = 6 for 4 ranks: 1.5 each, by ranks that have nothing in common; and as many spare ones.
    stream = alike(8, 4, 600, 0.0)
    counts = torch.stack([s.counts for s in ls.simulate(stream, sparsifier="union_top_k", density=0.01)])
    assert counts[0].tolist() == [3, 3, 3, 3]  # one more of either kind
    few = ls.simulate(stream, sparsifier=ls.sparsifiers.UnionTopK(max_factor=1.0), density=0.01)
    counts = torch.stack([s.counts for s in few])
    assert counts[0].tolist().count(1) == counts[0].tolist().count(2) == 2
    assert counts.sum(0).unique().numel() == 1
    # k = 1 for 4 ranks: one of them at a time.
    few = [s.counts for s in ls.simulate(stream, sparsifier=ls.sparsifiers.UnionTopK(max_factor=1.0), density=0.001)]
    assert all(sorted(c.tolist()) == [0, 0, 0, 1] for c in few)
    assert torch.equal(torch.stack(few).sum(0), torch.full((4,), 2))


@pytest.mark.parametrize("max_factor", [1.0, 1.4, 2.0])
def test_messages_stay_within_the_bound_where_all_ranks_pick_the_same(max_factor: float) -> None:
    stream = alike(20, 4, 10_000, 1.0)
    *_, last = ls.simulate(stream, sparsifier=ls.sparsifiers.UnionTopK(max_factor=max_factor), density=0.01)
    assert abs(int(last.counts.sum()) - 100 * max_factor) <= 1
    assert int(last.counts.max()) <= math.ceil(25 * max_factor)


def test_alone_a_rank_picks_no_more_than_it_sends() -> None:
    steps = ls.simulate(torch.randn(3, 1, 1000), sparsifier="union_top_k", density=0.01)
    assert [step.counts.tolist() for step in steps] == [[10]] * 3


@pytest.mark.parametrize("schedule", [ls.Warmup(0.2, 0.01, steps=10), ls.Warmup(1.0, 0.01, steps=5)])
def test_a_falling_density_is_held_at_every_step(schedule: ls.density.DensitySchedule) -> None:
    for step in ls.simulate(alike(30, 4, 20_000, 0.5), sparsifier="union_top_k", density=schedule):
        assert len(step.indices) == count(step.target_density, 20_000)


@pytest.mark.parametrize("max_factor", [0.99, 0.0, -1.0, float("inf"), float("nan"), True, "2"])
def test_a_bound_below_1_is_refused(max_factor: float) -> None:
    with pytest.raises(ValueError, match="max_factor to be a finite number of at least 1"):
        ls.sparsifiers.UnionTopK(max_factor=max_factor)


def test_the_largest_bound_there_is_works() -> None:
    *_, trace = ls.simulate(torch.ones(20, 2, 50), sparsifier=ls.sparsifiers.UnionTopK(max_factor=1e308), density=0.8)
    assert len(trace.indices) == 40


@pytest.mark.parametrize("factor", [1, 1.0, 2, 1.5])
def test_a_state_is_read_again_whatever_number_the_factor_is(factor: float) -> None:
    sparsifier = ls.sparsifiers.UnionTopK(max_factor=factor)
    state = sparsifier.init(1000, 4, 0.1, torch.device("cpu"))
    _, after = sparsifier.select(torch.randn(1000), state, Context(0, 0.1, 0, 4))
    before = [torch.tensor(x, dtype=torch.float64) for x in after]  # as earlier versions kept them
    assert from_plain(to_plain(after), state) == from_plain(before, state) == after


def test_a_device_makes_as_many_spare_picks_as_a_cpu() -> None:
    n, k, numel = 49, 98, 980
    acc = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    ctx = Context(0, k / numel, 0, n)
    sparsifier = ls.sparsifiers.UnionTopK()
    state = sparsifier.init(numel, n, ctx.density, torch.device("cpu"))
    state = state._replace(fill=(k - n + 1) / k)
    expected, _ = sparsifier.select(acc, state, ctx)
    with static_path():
        for tensors in (False, True):
            known = type(state)(*(torch.tensor(x, dtype=torch.float64) if tensors else x for x in state))
            found, _ = sparsifier.select(acc, known, ctx)
            assert int(found.count) == int(expected.count)
