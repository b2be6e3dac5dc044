"""GaussianK: what test_estimated.py has not for both rules."""

from __future__ import annotations

import numpy as np
import pytest

import lightning_sparse as ls
from tests.reference.estimators import SMOOTH, accumulator
from tests.selections import picks, select


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


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_sign_of_the_mean_decides_nothing_in_the_corrected_variant(sign: int) -> None:
    acc = sign * accumulator("shifted", 100_000)
    selection = select(ls.sparsifiers.GaussianK(), acc, 0.01)
    assert picks(selection) == picks(select(ls.sparsifiers.GaussianK(), -acc, 0.01))
    assert 667 <= int(selection.count) <= 1333


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("scale", [1e-42, 1e37])
def test_squares_that_overflow_or_vanish_do_no_harm(scale: float, static: bool, request: pytest.FixtureRequest) -> None:
    if static:
        request.getfixturevalue("static_path")
    acc = (accumulator("normal", 10_000) * scale).astype(np.float32)
    assert np.isfinite(acc).all()
    selection = select(ls.sparsifiers.GaussianK(), acc, 0.01)
    assert 67 <= len(picks(selection)) <= 133
