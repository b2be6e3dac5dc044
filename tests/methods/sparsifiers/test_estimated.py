"""RedSync and GaussianK: the published rules against the oracles, and the bands that the corrected ones keep."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

import lightning_sparse as ls
from tests.covering import covering, in_one_test, in_turns
from tests.reference.estimators import ROUGH, SMOOTH, accumulator, reference_gaussian_k, reference_redsync
from tests.selections import DENSITIES, SIZES, assert_largest, picks, select


class Rule(NamedTuple):
    make: Any
    reference: Callable[..., Any]
    tolerance: float  # of published thresholds in float64
    fewest: Fraction  # corrected picks, in multiples of k
    most: Fraction
    found: set[str]  # kinds for which a corrected threshold is found; others are trimmed
    trimmed: set[str]  # to k
    dense: float  # the density from which on half zeros are trimmed, too
    kind: str
    scale: float  # which changes nothing, nor does its inverse


RULES = {
    "redsync": Rule(
        ls.sparsifiers.RedSync, reference_redsync, 1e-12, Fraction(1), Fraction(2),
        {*SMOOTH}, {*ROUGH} - {"outlier", "few"}, 0.5, "student-3", 1e30,
    ),
    "gaussian_k": Rule(
        ls.sparsifiers.GaussianK, reference_gaussian_k, 1e-10, Fraction(2, 3), Fraction(4, 3),
        {*SMOOTH} - {"uniform"}, {"ties", "constant", "zeros", "single"}, 0.9, "laplace", 1e15,
    ),
}  # fmt: skip
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
KINDS = SMOOTH + ROUGH


@each_rule
@in_one_test("kind, density, dtype", covering(product(KINDS, DENSITIES, [np.float32, np.float64]), together=1))
def test_published_picks_are_those_of_the_reference(rule: Rule, kind: str, density: float, dtype: type) -> None:
    for numel in SIZES:
        acc = accumulator(kind, numel, dtype)
        picked, threshold = rule.reference(acc, round(density * numel))
        selection = select(rule.make(variant="published"), acc, density)
        assert picks(selection) == picked
        rel = 1e-6 if dtype == np.float32 else rule.tolerance
        assert float(selection.threshold) == pytest.approx(threshold, rel=rel)


@each_rule
@in_one_test("kind, density", covering(in_turns(KINDS, DENSITIES), together=1))
def test_corrected_picks_are_the_largest_in_a_band_around_k(rule: Rule, kind: str, density: float) -> None:
    for numel in SIZES:
        acc = accumulator(kind, numel)
        k = round(density * numel)
        selection = select(rule.make(), acc, density)
        picked = picks(selection)
        assert rule.fewest * k <= len(picked) <= rule.most * k
        assert_largest(picked, acc)
        magnitudes = np.abs(acc)
        assert magnitudes[picked].min() >= float(selection.threshold)
        if kind in rule.found:
            assert picked == np.flatnonzero(magnitudes >= float(selection.threshold)).tolist()
        elif kind in rule.trimmed:
            assert len(picked) == k


@pytest.mark.thorough
@each_rule
@pytest.mark.parametrize("density", [*DENSITIES, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_keeps_the_band_and_what_is_largest(
    rule: Rule, kind: str, density: float, request: pytest.FixtureRequest
) -> None:
    acc = accumulator(kind, 10_000)
    k = round(density * acc.size)
    exact = select(rule.make(), acc, density)
    request.getfixturevalue("static_path")
    for step in (0, 1, 12_345):
        selection = select(rule.make(), acc, density, step)
        picked = picks(selection)
        assert selection.indices.numel() == min(int(rule.most * k), acc.size)
        assert selection.indices[len(picked) :].tolist() == [acc.size] * (selection.indices.numel() - len(picked))
        assert rule.fewest * k <= len(picked) <= rule.most * k
        assert len(set(picked)) == len(picked)
        if kind in SMOOTH and (kind != "half zeros" or density < rule.dense):
            assert picked == picks(exact)
            assert float(selection.threshold) == pytest.approx(float(exact.threshold), rel=1e-6)  # other sums
        elif kind in ("single", "few"):  # zeros fill the band, but not in the place of what is larger
            largest = int(rule.fewest * min(k, np.count_nonzero(acc)))
            assert {*np.argsort(-np.abs(acc), kind="stable")[:largest].tolist()} <= {*picked}


@each_rule
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_published_picks_are_thinned_on_a_device_where_they_are_too_many(
    rule: Rule, kind: str, density: float, request: pytest.FixtureRequest
) -> None:
    acc = accumulator(kind, 10_000)
    capacity = min(4 * round(density * acc.size), acc.size)
    exact = picks(select(rule.make(variant="published"), acc, density))
    request.getfixturevalue("static_path")
    selection = select(rule.make(variant="published"), acc, density)
    assert selection.indices.numel() == capacity
    assert len(picks(selection)) == min(len(exact), capacity)
    assert set(picks(selection)) <= set(exact)


@each_rule
@pytest.mark.parametrize("sign", [-1, 1])
def test_scale_does_not_matter(rule: Rule, sign: int) -> None:
    acc = accumulator(rule.kind, 100_000)
    plain = picks(select(rule.make(), acc.astype(np.float32), 0.01))
    assert picks(select(rule.make(), (acc * rule.scale**sign).astype(np.float32), 0.01)) == plain


@each_rule
def test_an_unknown_variant_is_refused(rule: Rule) -> None:
    with pytest.raises(ValueError, match="Expected variant to be 'corrected' or 'published', but got 'best'"):
        rule.make(variant="best")
