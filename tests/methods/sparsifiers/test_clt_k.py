"""CLT-k against a transcription: the leader rotates, its largest coordinates count for all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.core.step import Context


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_step_is_that_of_a_transcription(n: int, dtype: type) -> None:
    numel, k = 300, 15
    stream = np.round(np.random.default_rng(n).laplace(size=(3 * n + 1, n, numel)) * 64) / 64  # with ties, exact sums
    residual = np.zeros((n, numel))
    traces = ls.simulate(torch.from_numpy(stream.astype(dtype)), sparsifier="clt_k", density=k / numel)
    for t, trace in enumerate(traces):
        acc = residual + stream[t]
        leader = acc[t % n]
        picked = sorted(sorted(range(numel), key=lambda j: (-abs(leader[j]), j))[:k])
        update = np.zeros(numel)
        update[picked] = acc[:, picked].sum(0) / n
        residual = acc.copy()
        residual[:, picked] = 0
        assert trace.indices.tolist() == picked
        assert trace.counts.tolist() == [k] * n
        np.testing.assert_allclose(trace.update.numpy(), update, rtol=2 * np.finfo(dtype).eps, atol=0)
        norms = np.linalg.norm(residual, axis=1)
        np.testing.assert_allclose(trace.residual_norm.numpy(), norms, rtol=1e-9)
        assert (trace.density, trace.padding_ratio, trace.build_up) == (k / numel, 1.0, 1.0)
    assert t == 3 * n


def test_only_the_leader_searches_its_accumulator(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    module = __import__("lightning_sparse.methods.sparsifiers.clt_k", fromlist=["top_k"])
    monkeypatch.setattr(module, "top_k", lambda x, k, candidates: searched.append(k) or torch.arange(k))
    for step in range(6):
        searched.clear()
        selections = [
            ls.sparsifiers.CLTK().select(torch.ones(50), None, Context(step, 0.1, rank, 3))[0] for rank in range(3)
        ]
        assert searched == [5]
        assert [int(s.count) for s in selections] == [5 * (rank == step % 3) for rank in range(3)]
        for rank, selection in enumerate(selections):
            assert selection.indices.tolist() == ([0, 1, 2, 3, 4] if rank == step % 3 else [50] * 5)
