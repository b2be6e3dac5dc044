"""gTop-k against a transcription of the merge, for any number of ranks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from tests.covering import covering, in_one_test
from tests.reference.merged import reference_gtop_k


@in_one_test(
    "n, grain, dtype",
    covering(
        product(range(1, 10), [0, 4], [np.float32, np.float64]),
        together=1,
        seen_as=lambda n, grain, dtype: (n, (grain, dtype)),
    ),
)
def test_every_step_is_that_of_the_reference(n: int, grain: int, dtype: type) -> None:
    numel, density = 211, 0.05
    shared = np.random.default_rng(100).laplace(size=(12, 1, numel))  # what ranks have in common makes sums meet
    stream = shared + np.random.default_rng(n).laplace(size=(12, n, numel))
    if grain:
        stream = np.round(stream * grain) / grain  # many equal magnitudes: the lower coordinate goes first
    stream = stream.astype(dtype)
    traces = ls.simulate(torch.from_numpy(stream), sparsifier="gtop_k", density=density)
    eps = np.finfo(dtype).eps
    for trace, record in zip(traces, reference_gtop_k(iter(stream), density), strict=True):
        assert trace.counts.tolist() == record.counts
        assert trace.indices.tolist() == record.indices
        assert len(record.indices) == 10
        # Residuals that take back what was dropped are rounded once more than the transcription's.
        np.testing.assert_allclose(trace.update.numpy(), record.update, rtol=64 * eps, atol=64 * eps)
        norms = np.linalg.norm(record.residual.astype(np.float64), axis=1)
        np.testing.assert_allclose(trace.residual_norm.numpy(), norms, rtol=64 * eps)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 16])
def test_the_density_is_k_whatever_n_is(n: int) -> None:
    rows = torch.randn(n, 2000, generator=torch.Generator().manual_seed(n))
    trace = next(ls.simulate([rows], sparsifier="gtop_k", density=0.01))
    assert (len(trace.indices), trace.build_up, trace.padding_ratio) == (20, 1.0, 1.0)


def test_one_rank_alone_sends_its_top_k() -> None:
    stream = torch.randn(5, 1, 500, generator=torch.Generator().manual_seed(0))
    own, merged = (list(ls.simulate(stream, sparsifier=name, density=0.05)) for name in ("top_k", "gtop_k"))
    assert all(torch.equal(a.update, b.update) for a, b in zip(own, merged, strict=True))


def test_where_ranks_pick_the_same_the_result_is_their_top_k() -> None:
    [row] = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    rows = torch.stack([row * scale for scale in (1.0, 0.5, 2.0, 4.0, 0.25)])
    trace = next(ls.simulate([rows], sparsifier="gtop_k", density=0.02))
    picked = row.abs().topk(10).indices.sort().values
    assert torch.equal(trace.indices, picked)
    torch.testing.assert_close(trace.update[picked], rows.mean(0)[picked])


def test_what_one_branch_drops_and_another_keeps_is_not_lost() -> None:
    # Coordinate 0: ranks 0 and 2 pick it. Rank 0 drops its 3 against the 5 of rank 1; rank 2's 4 stands against rank
    # 3's 1 but not against 5. In step 2 both are sent from where they are.
    first = torch.tensor([[3.0, 0, 0], [0, 5, 0], [4, 0, 0], [0, 0, 1]])
    steps = list(ls.simulate([first, torch.zeros(4, 3)], sparsifier="gtop_k", density=0.34))
    assert steps[0].update.tolist() == [0, 1.25, 0]
    # Rank 0 dropped 3 and 4, both at coordinate 0; rank 2 dropped the 1 of rank 3.
    assert steps[0].residual_norm.tolist() == [7, 0, 1, 0]
    assert steps[1].update.tolist() == [1.75, 0, 0]
    # With 6 at coordinate 0 on rank 2, the 3 of rank 0 is dropped although the coordinate is in the result: by the
    # published rule it would not be in the update nor in any residual.
    first[2, 0] = 6
    steps = list(ls.simulate([first, torch.zeros(4, 3)], sparsifier="gtop_k", density=0.34))
    assert steps[0].update.tolist() == [1.5, 0, 0]
    assert steps[0].residual_norm.tolist() == [pytest.approx(34**0.5), 0, 1, 0]  # 3 and 5 on rank 0


@pytest.mark.thorough
def test_averages_over_time_are_those_of_the_gradients() -> None:
    # With a constant gradient everything is sent in the end: what is kept back stays bounded.
    rows = torch.randn(3, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total, steps = torch.zeros(100, dtype=torch.float64), 200
    for trace in ls.simulate((rows for _ in range(steps)), sparsifier="gtop_k", density=0.1):
        total += trace.update
    torch.testing.assert_close(total / steps, rows.mean(0), rtol=0, atol=0.2)
