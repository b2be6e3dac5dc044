"""MiCRO and ExDyna as published: the same decisions as the oracles, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from tests.covering import by_default, covering
from tests.reference.partitioned import ReferenceStep, reference_published_exdyna, reference_published_micro

MICRO, EXDYNA = (partial(cls, variant="published") for cls in (ls.sparsifiers.MiCRO, ls.sparsifiers.ExDyna))
STEPS = 300
BLOCKS = 24
NUMEL = BLOCKS * 64 + 45  # blocks of 64 coordinates and a remainder
DENSITY = 0.02


def gradients(n: int, scales: str, dtype: type) -> np.ndarray:
    """(STEPS, n, NUMEL) Laplace noise. Layered: the scale falls along the vector, so that equal ranges carry unequal
    loads; it turns round half-way, so that blocks move back."""
    generator = np.random.default_rng(n)
    noise = generator.laplace(size=(STEPS, n, NUMEL))
    if scales == "layered":
        scale = np.linspace(2.0, 0.1, NUMEL) ** 2
        noise *= np.where(np.arange(STEPS)[:, None, None] < STEPS // 2, scale, scale[::-1])
    # At a scale of 0.01 the threshold starts far too high (only forced picks), falls into place and rises again.
    return (noise * (1.0 if n == 2 else 0.01)).astype(dtype)


RUNS: dict[str, tuple[ls.sparsifiers.Sparsifier, Callable[[Iterator[np.ndarray]], list[ReferenceStep]]]] = {
    "micro": (MICRO(), lambda steps: reference_published_micro(steps, DENSITY)),
    "exdyna": (
        EXDYNA(num_blocks=BLOCKS),
        lambda steps: reference_published_exdyna(steps, DENSITY, blocks=BLOCKS),
    ),
    "exdyna-loose": (
        EXDYNA(num_blocks=BLOCKS, alpha=1.25, move=2),
        lambda steps: reference_published_exdyna(steps, DENSITY, blocks=BLOCKS, alpha=1.25, alpha_low=0.8, blk_move=2),
    ),
}


@pytest.mark.parametrize(
    ("name", "n", "scales", "dtype"),
    by_default(
        [
            *covering(
                itertools.product(["micro", "exdyna"], [4, 2], ["layered", "flat"], [np.float64, np.float32]),
                together=1,
            ),
            ("exdyna-loose", 2, "layered", np.float32),
            pytest.param("exdyna-loose", 4, "layered", np.float64, marks=pytest.mark.thorough),
        ],
        2,
    ),
)
def test_every_decision_of_300_steps_is_that_of_the_reference(name: str, n: int, scales: str, dtype: type) -> None:
    sparsifier, reference = RUNS[name]
    stream = gradients(n, scales, dtype)
    expected = reference(iter(stream))
    partitions, thresholds = set(), set()
    for trace, record in zip(
        ls.simulate(torch.from_numpy(stream), sparsifier=sparsifier, density=DENSITY), expected, strict=True
    ):
        assert trace.step == record.step
        assert trace.counts.tolist() == record.counts
        assert trace.threshold.tolist() == [record.threshold] * n
        assert [tuple(span) for span in trace.partition.tolist()] == record.partition
        assert trace.indices.tolist() == record.indices
        # Both sum in rank order; a few units in the last place are allowed for the order of sum and division.
        np.testing.assert_allclose(trace.update.numpy(), record.update, rtol=4 * np.finfo(dtype).eps, atol=0)
        norms = np.linalg.norm(record.residual.astype(np.float64), axis=1)
        np.testing.assert_allclose(trace.residual_norm.numpy(), norms, rtol=1e-6)
        partitions.add(tuple(sorted(record.partition)))
        thresholds.add(record.threshold)
    # The streams must make the rules work, or the comparison would say little.
    assert len(thresholds) > 100
    if n == 4 and scales == "flat":
        assert any(record.counts == [1] * 4 for record in expected)  # forced picks only
    if scales == "layered" and name != "micro":
        assert len(partitions) >= 3


def test_the_first_threshold_is_one_over_twice_the_root_of_k() -> None:
    # k = int(0.04 * 2500) = 100 for the group, whatever the number of ranks.
    for sparsifier in (MICRO(), EXDYNA(num_blocks=16)):
        for n in (1, 2, 4):
            trace = next(ls.simulate([torch.ones(n, 2500)], sparsifier=sparsifier, density=0.04))
            assert trace.threshold.tolist() == [0.05] * n


@pytest.mark.parametrize(("beta", "gamma", "factor"), [(1.1, 0.005, 1.005), (1.1, 0.5, 1.5), (3.0, 0.5, 1.125)])
def test_beta_and_gamma_set_the_band_and_the_gain(beta: float, gamma: float, factor: float) -> None:
    # Twice the target is picked: k = 10, and 20 ones. Outside a band of 1.1, inside one of 3 (a quarter of the gain).
    rows = torch.zeros(2, 100)
    rows[:, 40:60] = 1.0
    sparsifier = MICRO(beta=beta, gamma=gamma)
    first, second = ls.simulate([rows, rows], sparsifier=sparsifier, density=0.1)
    assert first.counts.sum() == 20
    assert float(second.threshold[0] / first.threshold[0]) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("sparsifier", "n", "numel", "density", "message"),
    [
        (MICRO(), 4, 3, 1.0, "at least one coordinate per rank, but a group has 3 for 4 ranks"),
        (MICRO(), 2, 99, 0.01, r"MiCRO\(variant='published'\) needs density \* numel >= 1"),
        (EXDYNA(), 2, 32767, 0.01, "groups of at least 32768 coordinates"),
        (EXDYNA(num_blocks=3), 4, 1000, 0.1, "at least one block per rank"),
        (EXDYNA(num_blocks=1), 1, 99, 0.01, r"ExDyna\(variant='published'\) needs density"),
    ],
)
def test_a_group_where_the_published_rule_divides_by_zero_is_refused(
    sparsifier: ls.sparsifiers.Sparsifier, n: int, numel: int, density: float, message: str
) -> None:
    with pytest.raises(ValueError, match=f"{message}.*variant='corrected'"):
        next(ls.simulate([torch.ones(n, numel)], sparsifier=sparsifier, density=density))


@pytest.mark.parametrize("cls", [ls.sparsifiers.MiCRO, ls.sparsifiers.ExDyna])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "paper"}, "Expected variant to be 'corrected' or 'published', but got 'paper'"),
        ({"beta": 1.0}, "Expected beta, the width of the density band, to be above 1, but got 1.0"),
        ({"beta": float("nan")}, "Expected beta"),
        ({"gamma": 0.0}, r"Expected gamma, the gain per step, to be in \(0, 1\), but got 0.0"),
        ({"gamma": 1.0}, "Expected gamma"),
    ],
)
def test_settings_outside_their_range_are_refused(cls: type, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.0}, "Expected alpha, the tolerated imbalance, to be above 1, but got 1.0"),
        ({"num_blocks": 0}, "Expected num_blocks to be a positive integer, but got 0"),
        ({"num_blocks": 16.0}, "Expected num_blocks to be a positive integer, but got 16.0"),
        ({"move": 0}, "Expected move to be a positive integer, but got 0"),
        ({"move": True}, "Expected move to be a positive integer, but got True"),
    ],
)
def test_block_settings_outside_their_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ls.sparsifiers.ExDyna(**settings)
