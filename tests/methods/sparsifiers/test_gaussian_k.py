"""GaussianK: its published rule against the oracle, and the band that the corrected one keeps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import lightning_sparse as ls
from tests.covering import covering, in_one_test, in_turns
from tests.reference.estimators import ROUGH, SMOOTH, accumulator, reference_gaussian_k
from tests.selections import DENSITIES, SIZES, assert_largest, picks, select


@in_one_test("kind, density, dtype", covering(product(SMOOTH + ROUGH, DENSITIES, [np.float32, np.float64])))
def test_published_picks_are_those_of_the_reference(kind: str, density: float, dtype: type) -> None:
    for numel in SIZES:
        acc = accumulator(kind, numel, dtype)
        picked, threshold = reference_gaussian_k(acc, round(density * numel))
        selection = select(ls.sparsifiers.GaussianK(variant="published"), acc, density)
        assert picks(selection) == picked
        assert float(selection.threshold) == pytest.approx(threshold, rel=1e-6 if dtype == np.float32 else 1e-10)


def test_published_counts_follow_the_tail_of_the_data() -> None:
    # What the comparison above covers: within the band, far too many after two halvings, everything, and nothing.
    counts = {
        kind: len(picks(select(ls.sparsifiers.GaussianK(variant="published"), accumulator(kind, 300_000), 0.001)))
        for kind in [*SMOOTH, "zeros"]
    }
    assert counts["normal"] == pytest.approx(300, rel=0.1)
    assert counts["half zeros"] > 10 * 300
    assert counts["shifted"] == 300_000
    assert counts["zeros"] == 0


def test_a_last_correction_that_is_not_used_shows() -> None:
    # Normal data with 5 % of it at ten times the size: the third trial, at 2.25 times the estimate, is still too low.
    generator = np.random.default_rng(0)
    acc = generator.normal(size=100_000) * np.where(generator.random(100_000) < 0.05, 10, 1)
    published, corrected = (
        select(ls.sparsifiers.GaussianK(variant=name), acc, 0.001) for name in ("published", "corrected")
    )
    start = 3.2905267314919255 * acc.std(ddof=1) + acc.mean()
    assert float(published.threshold) == pytest.approx(2.25 * start)
    assert 2.25 * start < float(corrected.threshold) < 3.375 * start
    assert int(published.count) > 133 >= int(corrected.count) >= 67


@in_one_test("kind, density", covering(in_turns(SMOOTH + ROUGH, DENSITIES), together=1))
def test_corrected_picks_are_the_two_to_four_thirds_of_k_largest(kind: str, density: float) -> None:
    for numel in SIZES:
        acc = accumulator(kind, numel)
        k = round(density * numel)
        selection = select(ls.sparsifiers.GaussianK(), acc, density)
        picked = picks(selection)
        assert 2 * k / 3 <= len(picked) <= 4 * k / 3
        assert_largest(picked, acc)
        magnitudes = np.abs(acc)
        assert magnitudes[picked].min() >= float(selection.threshold)
        if kind in SMOOTH and kind != "uniform":  # found by a threshold, not trimmed
            assert picked == np.flatnonzero(magnitudes >= float(selection.threshold)).tolist()
        elif kind in ("ties", "constant", "zeros", "single"):
            assert len(picked) == k


@pytest.mark.parametrize("density", [*DENSITIES, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("kind", SMOOTH + ROUGH)
def test_a_device_keeps_the_band_and_what_is_largest(kind: str, density: float, request: pytest.FixtureRequest) -> None:
    acc = accumulator(kind, 10_000)
    k = round(density * acc.size)
    exact = select(ls.sparsifiers.GaussianK(), acc, density)
    request.getfixturevalue("static_path")
    for step in (0, 1, 12_345):
        selection = select(ls.sparsifiers.GaussianK(), acc, density, step)
        picked = picks(selection)
        assert selection.indices.numel() == min(4 * k // 3, acc.size)
        assert selection.indices[len(picked) :].tolist() == [acc.size] * (selection.indices.numel() - len(picked))
        assert 2 * k / 3 <= len(picked) <= 4 * k / 3
        assert len(set(picked)) == len(picked)
        if kind in SMOOTH and (kind != "half zeros" or density < 0.9):
            assert picked == picks(exact)
            assert float(selection.threshold) == pytest.approx(
                float(exact.threshold), rel=1e-6
            )  # sums are formed in another order
        elif kind in ("single", "few"):  # zeros fill the band, but not in the place of what is larger
            wanted = np.argsort(-np.abs(acc), kind="stable")[: min(k, np.count_nonzero(acc)) * 2 // 3]
            assert set(wanted.tolist()) <= set(picked)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("kind", SMOOTH + ROUGH)
def test_published_picks_are_thinned_on_a_device_where_they_are_too_many(
    kind: str, density: float, request: pytest.FixtureRequest
) -> None:
    acc = accumulator(kind, 10_000)
    capacity = min(4 * round(density * acc.size), acc.size)
    exact = picks(select(ls.sparsifiers.GaussianK(variant="published"), acc, density))
    request.getfixturevalue("static_path")
    selection = select(ls.sparsifiers.GaussianK(variant="published"), acc, density)
    assert selection.indices.numel() == capacity
    if len(exact) <= capacity:
        assert picks(selection) == exact
    else:
        assert len(picks(selection)) == capacity
        assert set(picks(selection)) <= set(exact)


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_sign_of_the_mean_decides_nothing_in_the_corrected_variant(sign: int) -> None:
    acc = sign * accumulator("shifted", 100_000)
    selection = select(ls.sparsifiers.GaussianK(), acc, 0.01)
    assert picks(selection) == picks(select(ls.sparsifiers.GaussianK(), -acc, 0.01))
    assert 667 <= int(selection.count) <= 1333


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_scale_does_not_matter(scale: float) -> None:
    acc = accumulator("laplace", 100_000)
    plain = picks(select(ls.sparsifiers.GaussianK(), acc.astype(np.float32), 0.01))
    assert picks(select(ls.sparsifiers.GaussianK(), (acc * scale).astype(np.float32), 0.01)) == plain


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("scale", [1e-42, 1e37])
def test_squares_that_overflow_or_vanish_do_no_harm(scale: float, static: bool, request: pytest.FixtureRequest) -> None:
    if static:
        request.getfixturevalue("static_path")
    acc = (accumulator("normal", 10_000) * scale).astype(np.float32)
    assert np.isfinite(acc).all()
    selection = select(ls.sparsifiers.GaussianK(), acc, 0.01)
    assert 67 <= len(picks(selection)) <= 133


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected variant to be 'corrected' or 'published', but got 'best'"):
        ls.sparsifiers.GaussianK(variant="best")
