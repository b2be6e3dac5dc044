"""RedSync: its published rule against the oracle, and the band that the corrected one keeps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import lightning_sparse as ls
from tests.covering import covering, in_one_test, in_turns
from tests.reference.estimators import ROUGH, SMOOTH, accumulator, reference_redsync
from tests.selections import DENSITIES, SIZES, assert_largest, picks, select


@in_one_test("kind, density, dtype", covering(product(SMOOTH + ROUGH, DENSITIES, [np.float32, np.float64])))
def test_published_picks_are_those_of_the_reference(kind: str, density: float, dtype: type) -> None:
    for numel in SIZES:
        acc = accumulator(kind, numel, dtype)
        picked, threshold = reference_redsync(acc, round(density * numel))
        selection = select(ls.sparsifiers.RedSync(variant="published"), acc, density)
        assert picks(selection) == picked
        assert float(selection.threshold) == pytest.approx(threshold, rel=1e-6 if dtype == np.float32 else 1e-12)


def test_published_counts_are_far_off_and_not_always_on_the_same_side() -> None:
    # What the comparison above covers: too few, too many, within the band, and nothing at all.
    def ratio(kind: str, density: float) -> float:
        return (
            int(select(ls.sparsifiers.RedSync(variant="published"), accumulator(kind, 300_000), density).count)
            / density
            / 3e5
        )

    assert ratio("student-3", 0.1) < 0.1
    assert ratio("uniform", 0.001) > 10
    assert 1 < ratio("normal", 0.001) < 2
    assert ratio("constant", 0.1) == 0


@in_one_test("kind, density", covering(in_turns(SMOOTH + ROUGH, DENSITIES), together=1))
def test_corrected_picks_are_the_k_to_2k_largest(kind: str, density: float) -> None:
    for numel in SIZES:
        acc = accumulator(kind, numel)
        k = round(density * numel)
        selection = select(ls.sparsifiers.RedSync(), acc, density)
        picked = picks(selection)
        assert k <= len(picked) <= 2 * k
        assert_largest(picked, acc)
        magnitudes = np.abs(acc)
        assert magnitudes[picked].min() >= float(selection.threshold)
        if kind in SMOOTH:  # found by bisection, not trimmed
            assert picked == np.flatnonzero(magnitudes >= float(selection.threshold)).tolist()
        elif kind != "outlier":  # no threshold isolates as few, unless the non-zeros are just as many
            assert len(picked) == k or kind == "few"


@pytest.mark.parametrize("density", [*DENSITIES, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("kind", SMOOTH + ROUGH)
def test_a_device_keeps_the_band_and_what_is_largest(kind: str, density: float, request: pytest.FixtureRequest) -> None:
    acc = accumulator(kind, 10_000)
    k = round(density * acc.size)
    exact = select(ls.sparsifiers.RedSync(), acc, density)
    request.getfixturevalue("static_path")
    for step in (0, 1, 12_345):
        selection = select(ls.sparsifiers.RedSync(), acc, density, step)
        picked = picks(selection)
        assert selection.indices.numel() == min(2 * k, acc.size)
        assert selection.indices[len(picked) :].tolist() == [acc.size] * (selection.indices.numel() - len(picked))
        assert k <= len(picked) <= 2 * k
        assert len(set(picked)) == len(picked)
        if kind in SMOOTH and (kind != "half zeros" or density < 0.5):
            assert picked == picks(exact)
            assert float(selection.threshold) == pytest.approx(float(exact.threshold), rel=1e-6)  # other sums
        elif kind in ("single", "few"):  # zeros fill the band, but not in the place of what is larger
            wanted = np.argsort(-np.abs(acc), kind="stable")[: min(k, np.count_nonzero(acc))]
            assert set(wanted.tolist()) <= set(picked)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("kind", SMOOTH + ROUGH)
def test_published_picks_are_thinned_on_a_device_where_they_are_too_many(
    kind: str, density: float, request: pytest.FixtureRequest
) -> None:
    acc = accumulator(kind, 10_000)
    capacity = min(4 * round(density * acc.size), acc.size)
    exact = picks(select(ls.sparsifiers.RedSync(variant="published"), acc, density))
    request.getfixturevalue("static_path")
    selection = select(ls.sparsifiers.RedSync(variant="published"), acc, density)
    assert selection.indices.numel() == capacity
    if len(exact) <= capacity:
        assert picks(selection) == exact
    else:
        assert len(picks(selection)) == capacity
        assert set(picks(selection)) <= set(exact)


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


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(scale: float) -> None:
    acc = accumulator("student-3", 100_000)
    plain = picks(select(ls.sparsifiers.RedSync(), acc.astype(np.float32), 0.01))
    assert picks(select(ls.sparsifiers.RedSync(), (acc * scale).astype(np.float32), 0.01)) == plain


def test_the_mean_of_a_constant_is_not_above_its_maximum() -> None:
    # Sums of 0.1 are rounded; no trial may leave the range of the data.
    for numel in (3, 10, 65_536, 65_537, 200_000):
        selection = select(ls.sparsifiers.RedSync(), np.full(numel, 0.1, dtype=np.float32), 0.3)
        assert float(selection.threshold) == float(np.float32(0.1))
        assert int(selection.count) == max(1, int(0.3 * numel))


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected variant to be 'corrected' or 'published', but got 'best'"):
        ls.sparsifiers.RedSync(variant="best")
