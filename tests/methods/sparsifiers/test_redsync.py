"""RedSync: what test_estimated.py has not for both rules."""

from __future__ import annotations

import numpy as np

import lightning_sparse as ls
from tests.reference.estimators import accumulator
from tests.selections import assert_largest, picks, select


def test_published_counts_are_far_off_and_not_always_on_the_same_side() -> None:
    # What the comparison above covers: too few, too many, within the band, and nothing at all.
    def ratio(kind: str, density: float) -> float:
        selection = select(ls.sparsifiers.RedSync(variant="published"), accumulator(kind, 300_000), density)
        return int(selection.count) / density / 3e5

    assert ratio("student-3", 0.1) < 0.1
    assert ratio("uniform", 0.001) > 10
    assert 1 < ratio("normal", 0.001) < 2
    assert ratio("constant", 0.1) == 0


def test_counts_just_below_k_lower_the_corrected_threshold_and_raise_the_published_one() -> None:
    # Mean 1, maximum 9, k = 4: at the middle, 5, there are three, short but not below k / 2.
    acc = np.array([9.0, 6.0, 6.0, 4.0, 4.0] + [0.0] * 24)
    assert acc.mean() == 1
    density = 4 / acc.size
    assert picks(select(ls.sparsifiers.RedSync(variant="published"), acc, density)) == [0]  # at 7 and then at 6
    assert picks(select(ls.sparsifiers.RedSync(), acc, density)) == [0, 1, 2, 3, 4]  # at 3


def test_more_than_reach_the_mean_can_be_wanted() -> None:
    # A tenth of the coordinates carries almost everything; the mean is 0.919.
    acc = np.concatenate([np.full(100, 9.1), np.linspace(0.01, 0.02, 900)])
    picked = picks(select(ls.sparsifiers.RedSync(), acc, 0.3))
    assert 300 <= len(picked) <= 600
    assert_largest(picked, acc)


def test_the_mean_of_a_constant_is_not_above_its_maximum() -> None:
    # Sums of 0.1 are rounded; no trial may leave the range of the data.
    for numel in (3, 10, 65_536, 65_537, 200_000):
        selection = select(ls.sparsifiers.RedSync(), np.full(numel, 0.1, dtype=np.float32), 0.3)
        assert float(selection.threshold) == float(np.float32(0.1))
        assert int(selection.count) == max(1, int(0.3 * numel))
