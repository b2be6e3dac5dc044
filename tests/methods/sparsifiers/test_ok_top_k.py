"""Ok-Topk against a transcription, the exact top-k of the sum, and the paper's bound on traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from lightning_sparse import ops
from lightning_sparse.core.step import Context
from tests.covering import covering, in_one_test
from tests.reference.merged import reference_ok_top_k


@dataclass(frozen=True)
class Listed(ls.density.DensitySchedule):
    """A density for each step."""

    densities: Sequence[float]

    def __call__(self, step: int) -> float:
        return self.densities[step]


def layered(steps: int, n: int, numel: int, seed: int = 0) -> np.ndarray:
    """Gradients of a few layers with very different scales, partly common to the ranks."""
    generator = np.random.default_rng(seed)
    scale = np.repeat([4.0, 0.5, 2.0, 0.1], -(-numel // 4))[:numel]
    return scale * (generator.laplace(size=(steps, 1, numel)) + generator.laplace(size=(steps, n, numel)))


@in_one_test(
    "n, rule, dtype",
    covering(
        product([3, 4, 7, 2, 1], [(1, 1.5), (5, 1.2), (1000, 1.012)], [np.float32, np.float64]),
        together=1,
        seen_as=lambda n, rule, dtype: (n, (rule, dtype)),
    ),
)
def test_every_step_is_that_of_the_reference(n: int, rule: tuple[int, float], dtype: type) -> None:
    interval, gain = rule
    stream = layered(25, n, 203, seed=n).astype(dtype)
    sparsifier = ls.sparsifiers.OkTopK(interval=interval, gain=gain)
    traces = ls.simulate(torch.from_numpy(stream), sparsifier=sparsifier, density=0.1)
    for trace, record in zip(traces, reference_ok_top_k(iter(stream), 0.1, interval=interval, gain=gain), strict=True):
        assert trace.threshold.tolist() == record.thresholds
        assert trace.counts.tolist() == record.counts
        assert trace.indices.tolist() == record.indices
        np.testing.assert_array_equal(trace.update.numpy(), record.update)
        norms = np.linalg.norm(record.residual.astype(np.float64), axis=1)
        np.testing.assert_allclose(trace.residual_norm.numpy(), norms, rtol=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "crowded"])
def test_the_update_is_the_top_k_of_the_sum_of_the_picks(n: int, crowded: bool) -> None:
    # Where messages are long enough: with picks of which most are in a tenth of the group, because the regions follow.
    numel, k = 20_000, 1000
    rows = torch.randn(n, numel, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    if crowded:
        rows[:, : numel // 10] *= 10
    trace = next(ls.simulate([rows], sparsifier="ok_top_k", density=k / numel))
    total = torch.zeros(numel, dtype=torch.float64)
    for row in rows:
        own = row.abs().topk(k).indices
        total[own] += row[own]
    expected = total.abs().topk(k).indices.sort().values
    assert torch.equal(trace.indices, expected)
    torch.testing.assert_close(trace.update[expected], total[expected] / n)
    assert trace.density == k / numel


def test_between_estimates_the_threshold_follows_the_count() -> None:
    # Rank and group alone. 10 of 100 are wanted.
    sparsifier, k = ls.sparsifiers.OkTopK(interval=10, gain=1.5), 10
    ctx = Context(step=0, density=0.1, rank=0, world_size=1)
    ramp = torch.arange(1.0, 101.0)
    selection, state = sparsifier.select(ramp, sparsifier.init(100, 1, 0.1, ramp.device), ctx)
    assert (selection.indices.tolist(), float(selection.threshold)) == (list(range(90, 100)), 91)
    assert (float(state.threshold), int(state.target)) == (91, k)
    # 6 of them reach it: 6 < 2/3 * 10. 13 > 5/4 * 10. 12 and 7 are in the band.
    for reaching, factor in ((6, 1 / 1.5), (7, 1), (12, 1), (13, 1.5)):
        acc = torch.zeros(100)
        acc[:reaching] = -92.0
        selection, after = sparsifier.select(acc, state, ctx._replace(step=3))
        assert (int(selection.count), float(selection.threshold)) == (reaching, 91)
        assert (float(after.threshold), int(after.target)) == (91 * factor, k)
        assert (float(state.threshold), int(state.target)) == (91, k)
    # Half or twice as many: not the threshold of this gradient any more; nor of another density.
    for reaching, good in ((4, False), (5, True), (19, True), (20, False)):
        acc = torch.linspace(1, 2, 100)
        acc[:reaching] = 100.0
        selection, after = sparsifier.select(acc, state, ctx._replace(step=3))
        assert int(after.target) == (k if good else 0)
        again, _ = sparsifier.select(ramp * 1000, after, ctx._replace(step=4))
        assert (int(again.count) == k) == (not good)
    selection, after = sparsifier.select(ramp, state, ctx._replace(step=3, density=0.2))
    assert (int(selection.count), int(after.target)) == (20, 20)


def test_a_step_that_is_due_has_exactly_k_picks() -> None:
    stream = torch.randn(13, 3, 5000, generator=torch.Generator().manual_seed(0))
    traces = list(ls.simulate(stream, sparsifier=ls.sparsifiers.OkTopK(interval=4), density=0.02))
    assert all(trace.counts.tolist() == [100] * 3 for trace in traces[::4])
    assert any(trace.counts.tolist() != [100] * 3 for trace in traces)
    assert len({float(trace.threshold[rank]) for trace in traces[:1] for rank in range(3)}) == 3  # each its own


def test_few_values_that_are_not_zero_are_all_picked_and_zeros_are_not() -> None:
    acc = torch.zeros(100)
    acc[[3, 70]] = torch.tensor([1e-30, -5.0])
    sparsifier, ctx = ls.sparsifiers.OkTopK(), Context(step=0, density=0.1, rank=0, world_size=1)
    selection, state = sparsifier.select(acc, sparsifier.init(100, 1, 0.1, acc.device), ctx)
    assert selection.indices.tolist() == [3, 70]
    # No threshold came of that: the next step looks for one though none is due.
    selection, state = sparsifier.select(torch.arange(100.0), state, ctx._replace(step=1))
    assert selection.indices.tolist() == list(range(90, 100))


def test_a_device_without_a_threshold_looks_at_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__("lightning_sparse.methods.sparsifiers.ok_top_k", fromlist=["SAMPLE"])
    sparsifier, ctx = ls.sparsifiers.OkTopK(), Context(step=1, density=0.05, rank=0, world_size=1)
    acc = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    state = sparsifier.init(100_000, 1, 0.05, acc.device)
    exact, _ = sparsifier.select(acc, state, ctx)
    assert int(exact.count) == 5000
    monkeypatch.setattr(ops, "static_shapes", lambda device: True)
    monkeypatch.setattr(module, "SAMPLE", 10_000)
    sampled, after = sparsifier.select(acc, state, ctx)
    assert int(sampled.count) != 5000
    assert abs(int(sampled.count) - 5000) < 5 * 10 * 500**0.5  # 500 of the sample, each for 10
    assert int(after.target) == 5000
    again, _ = sparsifier.select(acc, after, ctx._replace(step=2))  # now it has one
    assert float(again.threshold) == float(after.threshold) == float(sampled.threshold)


@pytest.mark.parametrize(
    "setting", [{"interval": 0}, {"interval": 2.5}, {"gain": 1}, {"gain": float("nan")}, {"gain": float("inf")}]
)
def test_settings_that_make_no_sense_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Expected {next(iter(setting))}"):
        ls.sparsifiers.OkTopK(**setting)


def test_steps_in_which_everything_is_sent_cost_one_short_step_and_no_more() -> None:
    numel, k, n = 10_000, 100, 2
    # Residuals have filled, so that the threshold is several times a gradient's; then all of them are sent.
    densities = [k / numel] * 60 + [1.0] + [k / numel] * 2
    stream = torch.randn(len(densities), n, numel, generator=torch.Generator().manual_seed(0))
    traces = ls.simulate(stream, sparsifier=ls.sparsifiers.OkTopK(interval=1000), density=Listed(densities))
    counts = [trace.counts for trace in traces]
    assert counts[60].tolist() == [numel] * n
    assert counts[61].max() < k / 2
    assert counts[62].tolist() == [k] * n  # by an estimate
