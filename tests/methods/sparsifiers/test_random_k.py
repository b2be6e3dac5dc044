"""Random-k: the same draw everywhere, fair to every coordinate, and without a random number generator."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.core.hashing import mix
from lightning_sparse.core.step import Context
from lightning_sparse.methods.sparsifiers.random_k import draw

CPU = torch.device("cpu")
WORD = 2**64


def picks(numel: int, density: float, *, seed: int = 0, step: int = 0, rank: int = 0, n: int = 4) -> list[int]:
    selection, state = ls.sparsifiers.RandomK(seed).select(torch.zeros(numel), None, Context(step, density, rank, n))
    assert state is None
    assert int(selection.count) == selection.indices.numel()
    return selection.indices.tolist()


def transcribed(numel: int, k: int, key: int) -> list[int]:
    """The draw with Python's unbounded integers and the sort left as a sort."""

    def splitmix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % WORD
        return x ^ (x >> 31)

    distance = splitmix(key) % numel
    drawn = []
    for stratum in range(k):
        first, last = stratum * numel // k, (stratum + 1) * numel // k
        word = splitmix((key + (stratum + 1) * 0x9E3779B97F4A7C15) % WORD)
        drawn.append(first + word % 2**63 % (last - first))
    return sorted((j + distance) % numel for j in drawn)


def test_the_mixing_function_is_the_published_one() -> None:
    # The first outputs of SplitMix64 with seed 1234567, as in the test vectors that circulate with it.
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % WORD
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(("numel", "k"), [(1, 1), (7, 1), (7, 3), (7, 7), (1000, 10), (1000, 333), (2**31 - 2, 5)])
@pytest.mark.parametrize("key", [0, 1, 2**63 - 1, 2**63, 0xDEADBEEFCAFEF00D, WORD - 1])
def test_a_draw_equals_that_of_unbounded_integers(numel: int, k: int, key: int) -> None:
    drawn = draw(numel, k, key, CPU).tolist()
    assert drawn == transcribed(numel, k, key)
    assert len(set(drawn)) == k
    assert 0 <= drawn[0] <= drawn[-1] < numel


def test_the_draw_never_changes() -> None:
    # Ranks with different releases or devices must agree.
    assert picks(1000, 0.005) == [82, 217, 358, 668, 766]
    assert picks(1000, 0.005, seed=-3, step=7) == [97, 304, 558, 799, 869]


def test_all_ranks_pick_the_same_and_steps_sizes_and_seeds_differ() -> None:
    own = picks(1000, 0.05)
    for n in (1, 2, 8):
        assert all(picks(1000, 0.05, rank=rank, n=n) == own for rank in range(n))
    others = [picks(1000, 0.05, step=step) for step in range(1, 50)]
    others += [picks(1000, 0.05, seed=seed) for seed in (-1, 1, 2**64 + 1, 10**30)]
    assert len({tuple(p) for p in [own, *others]}) == 54 - 1  # seeds count modulo 2**64: 1 and 2**64 + 1 are one
    shared = [len(set(own) & set(other)) for other in others]
    assert max(shared) < 15  # of 50; 2.5 by chance
    assert [j - 1 for j in picks(1001, 0.05)] != own != picks(1001, 0.05)


def test_no_generator_is_read_or_moved() -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]

    before = states()
    first = picks(1000, 0.1)
    assert states() == before
    torch.manual_seed(12345)
    np.random.seed(1)
    random.seed(1)
    assert picks(1000, 0.1) == first


@pytest.mark.thorough
def test_every_coordinate_is_picked_equally_often() -> None:
    # 7 of 30: strata of 4 and 5, which would favour the short ones if the draw did not move around the group.
    numel, steps = 30, 6_000
    counts = np.zeros(numel)
    pairs = 0
    for step in range(steps):
        drawn = picks(numel, 7.2 / numel, step=step)
        counts[drawn] += 1
        pairs += 0 in drawn and 15 in drawn
    share = 7 / numel
    assert counts.sum() == 7 * steps
    assert np.abs(counts / steps - share).max() < 5 * (share * (1 - share) / steps) ** 0.5
    assert abs(pairs / steps - share**2) < 0.02  # far apart: independent


@pytest.mark.parametrize("numel", [10, 100, 101, 9973])
def test_picks_are_spread_over_the_group(numel: int) -> None:
    for step in range(20):
        drawn = np.array(picks(numel, 0.1, step=step))
        gaps = np.diff(np.append(drawn, drawn[0] + numel))  # around the end
        assert gaps.max() < 2 * -(-numel // len(drawn))


@pytest.mark.thorough
@pytest.mark.parametrize("values", [np.arange(120.0), np.arange(120.0) % 2, np.arange(120) // 5 % 2 * 1.0])
def test_means_vary_no_more_than_those_of_independent_draws(values: np.ndarray) -> None:
    means = [values[draw(120, 12, mix(key), CPU).numpy()].mean() for key in range(4000)]
    assert np.mean(means) == pytest.approx(values.mean(), abs=5 * values.std() / (12 * 4000) ** 0.5)
    assert np.var(means) < 1.1 * values.var() / 12  # the estimate of a variance from 4000 is good to 2 %


def test_the_values_of_all_ranks_travel_at_the_picks_and_nothing_else() -> None:
    stream = torch.randn(5, 4, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    acc = torch.zeros(4, 500, dtype=torch.float64)
    for t, trace in enumerate(ls.simulate(stream, sparsifier=ls.sparsifiers.RandomK(9), density=0.1)):
        acc += stream[t]
        drawn = picks(500, 0.1, seed=9, step=t)
        assert trace.indices.tolist() == drawn
        torch.testing.assert_close(trace.update[drawn], acc[:, drawn].mean(0))
        assert trace.update.count_nonzero() == 50
        acc[:, drawn] = 0
        torch.testing.assert_close(trace.residual_norm, acc.norm(dim=1))
        assert trace.bytes_sent.tolist() == [1.5 * 50 * 8] * 4
        assert (trace.density, trace.padding_ratio) == (0.1, 1.0)


@pytest.mark.parametrize("seed", [1.5, "0", None, True])
def test_a_seed_that_is_no_integer_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="Expected seed to be an integer, but got"):
        ls.sparsifiers.RandomK(seed)
