"""Top-k against the oracle, with both ways of releasing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from tests.covering import covering
from tests.reference.partitioned import reference_top_k

RELEASES = {"own": "gather_pairs", "union": "reduce_union"}


@pytest.mark.parametrize(
    ("group", "release", "dtype", "grain"),
    covering(
        product(
            [(2, 500, 0.05), (4, 333, 0.02), (3, 50, 0.5), (1, 500, 0.05)],
            RELEASES,
            [np.float32, np.float64],
            [0, 4],
        )
    ),
)
def test_every_step_is_that_of_the_reference(
    group: tuple[int, int, float], release: str, dtype: type, grain: int
) -> None:
    n, numel, density = group
    stream = np.random.default_rng(n).laplace(size=(25, n, numel))
    if grain:
        stream = np.round(stream * grain) / grain  # many equal magnitudes: the lower coordinate goes first
    stream = stream.astype(dtype)
    traces = ls.simulate(torch.from_numpy(stream), sparsifier="top_k", density=density, exchange=RELEASES[release])
    for trace, record in zip(traces, reference_top_k(iter(stream), density, release=release), strict=True):
        assert trace.counts.tolist() == record.counts
        assert trace.indices.tolist() == record.indices
        assert trace.threshold is None
        assert trace.partition is None
        # Both sum in rank order; a few units in the last place are allowed for the order of sum and division.
        np.testing.assert_allclose(trace.update.numpy(), record.update, rtol=4 * np.finfo(dtype).eps, atol=0)
        norms = np.linalg.norm(record.residual.astype(np.float64), axis=1)
        np.testing.assert_allclose(trace.residual_norm.numpy(), norms, rtol=1e-6)


@pytest.mark.parametrize("release", RELEASES)
def test_a_small_group_sends_one_coordinate_a_rank_with_either_release(release: str) -> None:
    # The published code of the union release rounds 0.2 picks to none and never sends anything.
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    trace = next(ls.simulate([rows], sparsifier="top_k", density=0.05, exchange=RELEASES[release]))
    assert trace.counts.tolist() == [1, 1]
    assert trace.indices.tolist() == [0, 3]


def test_the_union_grows_with_the_ranks_and_never_beyond_their_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 4, 8):
        rows = torch.randn(n, 5000, generator=generator)
        trace = next(ls.simulate([rows], sparsifier="top_k", density=0.01))
        assert trace.counts.tolist() == [50] * n
        assert 50 <= trace.indices.numel() <= 50 * n
        assert trace.build_up == trace.indices.numel() / 50
        assert trace.padding_ratio == 1.0


def test_permuting_the_ranks_permutes_nothing_but_the_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    stream = (torch.randn(20, 4, 200, generator=generator) * 64).round() / 64  # sums are exact in any order
    for exchange in RELEASES.values():
        plain, turned = (
            [t.update for t in ls.simulate(s, sparsifier="top_k", density=0.05, exchange=exchange)]
            for s in (stream, stream[:, [2, 0, 3, 1]])
        )
        assert torch.equal(torch.stack(plain), torch.stack(turned))
