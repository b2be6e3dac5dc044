"""Hard-threshold against the oracle, its default magnitude, and settings it refuses."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from tests.covering import covering, in_one_test
from tests.reference.partitioned import reference_hard_threshold

RELEASES = {"own": "gather_pairs", "union": "reduce_union"}


@in_one_test(
    "shape, threshold, release, dtype",
    covering(product([(4, 333), (2, 500), (1, 500)], [0.7, 4.0, 50.0], RELEASES, [np.float32, np.float64])),
)
def test_every_step_is_that_of_the_reference(
    shape: tuple[int, int], threshold: float, release: str, dtype: type
) -> None:
    n, numel = shape
    stream = np.random.default_rng(n).laplace(size=(25, n, numel))
    # Values at the threshold itself: 0.7 is rounded to the dtype of the gradients, and reached.
    stream[::5, :, :10] = threshold
    stream = stream.astype(dtype)
    traces = ls.simulate(
        torch.from_numpy(stream),
        sparsifier=ls.sparsifiers.HardThreshold(threshold),
        density=0.01,
        exchange=RELEASES[release],
    )
    for trace, record in zip(traces, reference_hard_threshold(iter(stream), threshold, release=release), strict=True):
        assert trace.counts.tolist() == record.counts
        assert trace.indices.tolist() == record.indices
        assert trace.threshold.tolist() == [threshold] * n
        # Both sum in rank order; a few units in the last place are allowed for the order of sum and division.
        np.testing.assert_allclose(trace.update.numpy(), record.update, rtol=4 * np.finfo(dtype).eps, atol=0)
        norms = np.linalg.norm(record.residual.astype(np.float64), axis=1)
        np.testing.assert_allclose(trace.residual_norm.numpy(), norms, rtol=1e-6)


@pytest.mark.parametrize(
    ("model_numel", "threshold"),
    # k = 25 of this group alone, or 2500 of the whole model: 1 / (2 sqrt(k)).
    [(None, 0.1), (250_000, 0.01)],
)
def test_the_default_threshold_comes_from_the_picks_over_the_whole_model(
    model_numel: int | None, threshold: float
) -> None:
    ctx = Context(step=0, density=0.01, rank=0, world_size=2, model_numel=model_numel)
    selection, state = ls.sparsifiers.HardThreshold().select(torch.zeros(2500), None, ctx)
    assert float(selection.threshold) == threshold
    # It follows a schedule: that of a warm-up's first step would let nearly everything pass later on.
    later, _ = ls.sparsifiers.HardThreshold().select(torch.zeros(2500), state, ctx._replace(step=1, density=0.04))
    assert float(later.threshold) == threshold / 2
    given, _ = ls.sparsifiers.HardThreshold(0.5).select(torch.zeros(2500), None, ctx._replace(density=0.04))
    assert float(given.threshold) == 0.5


def test_the_density_follows_the_scale_of_the_gradients() -> None:
    rows = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0))
    counts = [
        int(next(ls.simulate([rows * scale], sparsifier=ls.sparsifiers.HardThreshold(2.0), density=0.01)).counts.sum())
        for scale in (0.1, 1.0, 10.0)
    ]
    # Magnitudes beyond 20, 2 and 0.2 among 20 000 normal ones: none, 4.55 % and 84.15 %, with standard deviations of 30
    # and 52; five of them are allowed.
    assert counts[0] == 0
    assert counts[1] == pytest.approx(910, abs=150)
    assert counts[2] == pytest.approx(16_829, abs=260)


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("nan"), float("inf"), "0.1"])
def test_a_threshold_that_is_no_positive_magnitude_is_refused(threshold: float) -> None:
    with pytest.raises(
        ValueError, match=r"positive finite magnitude or None, but got .*use the sparsifier 'everything'"
    ):
        ls.sparsifiers.HardThreshold(threshold)
