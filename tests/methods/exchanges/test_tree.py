"""The tree by hand: who sends what to whom, what is dropped and where it stays."""

from __future__ import annotations

import pytest
import torch

import lightning_sparse as ls
from tests.lockstep import Ranks, noise


def test_merging_and_dropping_by_hand() -> None:
    # k = 2 of 5. Ranks 0 and 1 merge, then 0 and 2.
    rows = torch.tensor([[4.0, 3, 0, 0, 1], [0, -5, 0, 2, 1], [0, 0, 0, 9, -8]], dtype=torch.float64)
    outcome = Ranks(3, 5, sparsifier=ls.sparsifiers.TopK(), exchange="tree", density=0.4).step(rows)
    # {0: 4, 1: 3} + {1: -5, 3: 2} = {0: 4, 1: -2, 3: 2}: 1 goes on before 3, which rank 0 keeps.
    # {0: 4, 1: -2} + {3: 9, 4: -8}: rank 0 keeps the first two as well.
    assert (3 * outcome.averages[0]).tolist() == [0, 0, 0, 9, -8]
    assert [residual.tolist() for residual in outcome.after] == [[4, -2, 0, 2, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert outcome.statistics[0].counts.tolist() == [2, 2, 2]
    assert int(outcome.statistics[0].union) == 2


def test_a_coordinate_that_one_rank_drops_twice_comes_back_twice() -> None:
    rows = torch.zeros(4, 3, dtype=torch.float64)
    rows[0, 0], rows[1, 1], rows[2, 0], rows[3, 0] = 1, 9, 2, 3
    outcome = Ranks(4, 3, sparsifier=ls.sparsifiers.TopK(), exchange="tree", density=0.34).step(rows)
    assert outcome.averages[0].tolist() == [0, 2.25, 0]
    assert [residual.tolist() for residual in outcome.after] == [[6, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.float64, 8)])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_every_rank_but_the_root_sends_its_pairs_once(n: int, dtype: torch.dtype, width: int) -> None:
    trace = next(ls.simulate([noise(n, 100, dtype=dtype)], sparsifier="gtop_k", density=0.1))
    pairs = 10 * (4 + width)
    counts, broadcast = (n - 1) * 8, (n - 1) / n * pairs
    assert trace.bytes_sent.tolist() == pytest.approx([counts + broadcast + (rank > 0) * pairs for rank in range(n)])


def test_selections_of_unequal_length_are_padded_to_the_longest_which_is_what_remains() -> None:
    rows = torch.zeros(3, 20)
    rows[0, :2] = 5.0
    rows[1, 1:8] = 6.0  # the longest: 7 picks
    trace = next(ls.simulate([rows], sparsifier=ls.sparsifiers.HardThreshold(1.0), density=0.1, exchange="tree"))
    assert trace.bytes_sent.tolist() == pytest.approx([16 + 2 / 3 * 56 + sends * 56 for sends in (0, 1, 1)])
    assert trace.counts.tolist() == [2, 7, 0]
    # {0: 5, 1: 11, 2..7: 6} are 8: the 5 stays.
    assert trace.indices.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert trace.residual_norm.tolist() == [5, 0, 0]


@pytest.mark.parametrize("n", [2, 3, 5, pytest.param(8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("quiet", [False, True], ids=["picks", "nothing-picked"])
def test_one_bad_rank_is_heard_among_large_values_wherever_it_sits(n: int, quiet: bool) -> None:
    for bad in range(n):
        rows = torch.full((n, 50), 1e30, dtype=torch.float64)
        rows[bad] = 1e-3 if quiet else 1.0
        rows[bad, 7] = float("nan")
        # Whoever is in trouble offers NaN at a coordinate where the others have 1e30 or, by turns, nothing.
        rows[:, 0] = rows[:, 0].where(torch.arange(n) % 2 == 0, 0)
        for sparsifier in (ls.sparsifiers.HardThreshold(1.0), ls.sparsifiers.GTopK()):
            outcome = Ranks(n, 50, sparsifier=sparsifier, exchange="tree", density=0.02).step(rows)
            assert bool(torch.isnan(outcome.averages).all())
