"""DGC's selection: its published rule against the oracle, the band of the corrected one, and what it samples."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import lightning_sparse as ls
from lightning_sparse import ops
from lightning_sparse.methods.sparsifiers import estimation
from tests.covering import covering, in_one_test, in_turns
from tests.reference.estimators import ROUGH, SMOOTH, accumulator, reference_dgc
from tests.selections import DENSITIES, SIZES, assert_largest, picks, select


@in_one_test(
    "kind, density, dtype",
    covering(
        product(SMOOTH + ROUGH, DENSITIES, [np.float32, np.float64]),
        together=1,
        seen_as=lambda kind, density, dtype: (kind, (density, dtype)),
    ),
)
def test_published_picks_are_those_of_the_reference(kind: str, density: float, dtype: type) -> None:
    for step, numel in enumerate(SIZES):
        acc = accumulator(kind, numel, dtype)
        picked, threshold = reference_dgc(acc, round(density * numel), start=1000 * step + 7)
        selection = select(ls.sparsifiers.DGC(variant="published"), acc, density, step=1000 * step + 7)
        assert picks(selection) == picked
        assert float(selection.threshold) == pytest.approx(threshold, rel=1e-12)


def test_published_picks_of_another_sample_are_those_of_the_reference() -> None:
    acc = accumulator("student-3", 100_000)
    counts = set()
    for step in range(20):
        for sample in (0.001, 0.1, 1.0):
            picked, _ = reference_dgc(acc, 1000, start=step, sample=sample)
            assert picks(select(ls.sparsifiers.DGC(sample, variant="published"), acc, 0.01, step)) == picked
            counts.add(len(picked))
    assert len(counts) > 5  # cuts to k, counts between 0.8 k and k


def test_the_published_cut_starves_the_last_coordinates_and_the_corrected_one_does_not() -> None:
    acc = np.where(np.arange(10_000) % 8 == 3, -2.0, 0.0) + np.arange(10_000) * 1e-9
    # 1250 are large. A sample of everything has a threshold that 1000 reach, and 1250 after ties: too few to cut again.
    acc = np.where(np.abs(acc) > 1, -2.0, acc)
    published = picks(select(ls.sparsifiers.DGC(1.0, variant="published"), acc, 0.1))
    assert published == np.flatnonzero(np.abs(acc) > 1)[:1000].tolist()
    selection = select(ls.sparsifiers.DGC(0.1, exact_below=1), acc, 0.1)
    assert picks(selection) == np.flatnonzero(np.abs(acc) > 1).tolist()


def test_the_published_rule_gives_up_after_ten_lower_thresholds() -> None:
    # The sample, every 99th coordinate from 0 on, sees the only large ones.
    acc = np.full(100_000, 0.01)
    acc[::99] = 1.0
    selection = select(ls.sparsifiers.DGC(variant="published"), acc, 0.1)
    assert float(selection.threshold) == pytest.approx(0.8**10)
    assert int(selection.count) == 1011
    corrected = select(ls.sparsifiers.DGC(exact_below=1), acc, 0.1)
    assert int(corrected.count) == 10_000
    assert_largest(picks(corrected), acc)


@in_one_test("kind, density", covering(in_turns(SMOOTH + ROUGH, DENSITIES), together=1))
def test_corrected_picks_are_the_largest_between_four_fifths_and_13_tenths_of_k(kind: str, density: float) -> None:
    for numel in SIZES:
        acc = accumulator(kind, numel)
        k = round(density * numel)
        for step in (0, 5):
            selection = select(ls.sparsifiers.DGC(exact_below=1), acc, density, step)
            picked = picks(selection)
            assert 0.8 * k <= len(picked) <= 1.3 * k
            assert_largest(picked, acc)
            assert np.abs(acc[picked]).min() >= float(selection.threshold)


@pytest.mark.parametrize(("kind", "density"), covering(in_turns(SMOOTH + ROUGH, [*DENSITIES, 0.4, 0.9]), together=1))
def test_a_device_picks_the_same(kind: str, density: float, request: pytest.FixtureRequest) -> None:
    acc = accumulator(kind, 30_000)
    k = round(density * acc.size)
    steps = (0, 1, 12_345)
    for sparsifier in (ls.sparsifiers.DGC(exact_below=1), ls.sparsifiers.DGC(variant="published")):
        exact = [select(sparsifier, acc, density, step) for step in steps]
        with pytest.MonkeyPatch.context() as patch:
            for module in (ops, estimation, ops):
                patch.setattr(module, "static_shapes", lambda device: True)
            static = [select(sparsifier, acc, density, step) for step in steps]
        for host, device in zip(exact, static, strict=True):
            assert int(device.count) == int(host.count)
            assert len(set(picks(device))) == int(host.count)
            assert device.indices.numel() <= 1.3 * k
            assert device.indices[int(device.count) :].eq(acc.size).all()
            # By only two samples more than the 4 k slots of a device may be let through.
            if kind in SMOOTH and (sparsifier.variant == "corrected" or density > 0.001):
                assert picks(device) == picks(host)
                assert float(device.threshold) == float(host.threshold)
            elif kind in ("single", "few") and sparsifier.variant == "corrected":
                wanted = np.argsort(-np.abs(acc), kind="stable")[: min(int(host.count), np.count_nonzero(acc))]
                assert set(wanted.tolist()) <= set(picks(device))


def test_small_groups_are_selected_exactly() -> None:
    for numel, density in ((99_999, 0.01), (1000, 0.001), (150_000, 0.0005)):
        # 150 000 coordinates at a density of 0.0005 would need 64 000 samples.
        acc = accumulator("student-3", numel)
        k = int(density * numel)
        selection = select(ls.sparsifiers.DGC(), acc, density)
        assert picks(selection) == sorted(np.argsort(-np.abs(acc))[:k].tolist())
        assert float(selection.threshold) == np.sort(np.abs(acc))[-k]
        assert selection.aligned
    assert not select(ls.sparsifiers.DGC(), accumulator("student-3", 100_000), 0.01).aligned


def test_the_sample_is_large_enough_for_most_first_thresholds() -> None:
    # With 32 hits the count misses k by a factor with a standard deviation of 0.18: 0.8 to 1.3 is -1.1 to 1.7 of these.
    acc = accumulator("laplace", 1_000_000)
    selections = [select(ls.sparsifiers.DGC(sample), acc, 0.001, step) for step in range(31) for sample in (1e-6, 0.03)]
    counts = [int(selection.count) for selection in selections]
    assert sum(count != 1000 for count in counts) > 45  # not selected again
    assert np.mean(counts) == pytest.approx(1000, rel=0.1)
    assert len({float(selection.threshold) for selection in selections}) > 25  # another sample in each step


def test_every_coordinate_is_sampled_in_turn() -> None:
    # A sample of every 99th coordinate sees one value only; k = 9900 and 99 - j thousand reach j + 1.
    acc = np.tile(np.arange(1.0, 100.0), 1000)
    for step in (87, 88, 89, 90, 91, 87 + 99, 91 + 99_000):
        selection = select(ls.sparsifiers.DGC(exact_below=1), acc, 0.1, step)
        assert float(selection.threshold) == step % 99 + 1
        assert int(selection.count) == (99 - step % 99) * 1000


@pytest.mark.parametrize("sample", [0.0, -0.1, 1.1, float("nan"), "1%"])
def test_a_sample_that_is_no_share_is_refused(sample: object) -> None:
    with pytest.raises(ValueError, match="Expected sample to be a number in"):
        ls.sparsifiers.DGC(sample=sample)


def test_other_settings_that_are_wrong_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected exact_below to be a positive integer, but got 0"):
        ls.sparsifiers.DGC(exact_below=0)
    with pytest.raises(ValueError, match="Expected variant to be 'corrected' or 'published', but got 'best'"):
        ls.sparsifiers.DGC(variant="best")
