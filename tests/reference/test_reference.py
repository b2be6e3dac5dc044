"""The oracles against steps worked out by hand, and against what must hold for any gradient."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from .partitioned import (
    reference_hard_threshold,
    reference_published_exdyna,
    reference_published_micro,
    reference_top_k,
)


def _layered_gradients(n: int, numel: int, steps: int, dtype: type = np.float64) -> list[np.ndarray]:
    """Laplace noise whose scale falls along the vector, so that equal ranges carry unequal loads."""
    generator = np.random.default_rng(n * numel + steps)
    scale = np.linspace(2.0, 0.1, numel)
    return [(generator.laplace(size=(n, numel)) * scale).astype(dtype) for _ in range(steps)]


RUNS = {
    "micro": lambda gradients: reference_published_micro(gradients, 0.05),
    "exdyna": lambda gradients: reference_published_exdyna(gradients, 0.05, blocks=19),
    "top-k own": lambda gradients: reference_top_k(gradients, 0.05, release="own"),
    "top-k union": lambda gradients: reference_top_k(gradients, 0.05, release="union"),
    "hard own": lambda gradients: reference_hard_threshold(gradients, 3.0, release="own"),
    "hard union": lambda gradients: reference_hard_threshold(gradients, 3.0, release="union"),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_mass_is_conserved(name: str, n: int) -> None:
    gradients = _layered_gradients(n, 19 * 32 + 11, steps=12)
    residual = np.zeros_like(gradients[0])
    for gradient, record in zip(gradients, RUNS[name](gradients), strict=True):
        before = (residual + gradient).sum(axis=0)
        after = n * record.update + record.residual.sum(axis=0)
        # A few float64 roundings on sums of about 100: 1e-12 is far above them and far below a lost element.
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-12)
        residual = record.residual


@pytest.mark.parametrize("name", RUNS)
def test_dtype_of_the_gradients_is_kept(name: str) -> None:
    for record in RUNS[name](_layered_gradients(3, 19 * 32 + 11, steps=3, dtype=np.float32)):
        assert record.update.dtype == np.float32
        assert record.residual.dtype == np.float32


@pytest.mark.parametrize("name", ["micro", "exdyna"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_partitions_tile_the_vector_and_selections_stay_inside(name: str, n: int) -> None:
    numel = 19 * 32 + 11
    for record in RUNS[name](_layered_gradients(n, numel, steps=40)):
        assert record.partition is not None
        ranges = sorted(record.partition)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == numel
        for (_, past_end), (first, _) in itertools.pairwise(ranges):
            assert past_end == first
        for (first, past_end), count in zip(record.partition, record.counts, strict=True):
            assert count == sum(first <= j < past_end for j in record.indices)
        assert sum(record.counts) == len(record.indices)


def test_each_rank_visits_every_micro_partition_once_in_n_steps() -> None:
    records = reference_published_micro(_layered_gradients(4, 30, steps=4), 0.2)
    for rank in range(4):
        visited = [record.partition[rank] for record in records]
        # 30 = 4 * 7 + 2, so the first two partitions have 8 elements.
        assert sorted(visited) == [(0, 8), (8, 16), (16, 23), (23, 30)]
    assert records[1].partition == [(8, 16), (16, 23), (23, 30), (0, 8)]


def test_exdyna_moves_blocks_on_layered_gradients() -> None:
    records = RUNS["exdyna"](_layered_gradients(3, 19 * 32 + 11, steps=40))
    assert sorted(records[0].partition) != sorted(records[-1].partition)


def test_earlier_records_are_not_changed_by_later_steps() -> None:
    gradients = _layered_gradients(2, 64, steps=5)
    for run in (
        lambda steps: reference_published_micro(steps, 0.1),
        lambda steps: reference_published_exdyna(steps, 0.1, blocks=2),
        lambda steps: reference_top_k(steps, 0.1, release="own"),
    ):
        short, long = run(gradients[:2]), run(gradients)
        for first, second in zip(short, long, strict=False):
            np.testing.assert_array_equal(first.residual, second.residual)
            np.testing.assert_array_equal(first.update, second.update)
            assert first.partition == second.partition


def test_micro_by_hand() -> None:
    # n = 3 and numel = 8 give the ranges A = 0-2, B = 3-5, C = 6-7. k = 4, so delta starts at 1 / 4.
    zero = np.zeros((3, 8))
    first = np.array(
        [
            [0.5, 0.1, -0.25, 0.9, 0.0, 0.0, 0.0, 0.3],  # owns A: 0, and 2, which is just at delta
            [0.0, 0.0, 1.0, 0.2, -0.1, 0.0, 0.0, 0.0],  # owns B: nothing, so 3 + 0 mod 3 = 3 is forced
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.0],  # owns C: 6
        ]
    )
    r0, r1, r2, r3, r4 = reference_published_micro([first, zero, zero, np.ones((3, 8)), zero], 0.5)

    assert r0.step == 0
    assert r0.threshold == 0.25
    assert r0.partition == [(0, 3), (3, 6), (6, 8)]
    assert r0.counts == [2, 1, 1]
    assert r0.indices == [0, 2, 3, 6]
    # Sums over ranks: 0.5 + 1, -0.25 + 1 + 1, 0.9 + 0.2 + 1, 0.75.
    np.testing.assert_allclose(r0.update, np.array([1.5, 0, 1.75, 2.1, 0, 0, 0.75, 0]) / 3, rtol=1e-15)
    np.testing.assert_array_equal(
        r0.residual,
        [[0, 0.1, 0, 0, 0, 0, 0, 0.3], [0, 0, 0, 0, -0.1, 0, 0, 0], [0, 1, 0, 0, 1, 1, 0, 0]],
    )

    # Four were selected, four wanted: inside the band, where delta still rises. The ranges turn to B, C, A.
    # Rank 0 sees zeros in B: 3 + 1 mod 3 = 4. Rank 1 sees zeros in C: 6 + 1 mod 2 = 7. Rank 2 finds 1 in A.
    assert r1.threshold == 0.25 * 1.00125
    assert r1.partition == [(3, 6), (6, 8), (0, 3)]
    assert r1.counts == [1, 1, 1]
    assert r1.indices == [1, 4, 7]
    np.testing.assert_allclose(r1.update, np.array([0, 1.1, 0, 0, 0.9, 0, 0, 0.3]) / 3, rtol=1e-15)
    np.testing.assert_array_equal(r1.residual, [[0] * 8, [0] * 8, [0, 0, 0, 0, 0, 1, 0, 0]])

    # Three of four: delta falls. Ranges C, A, B; forced 6 + 2 mod 2 = 6 and 0 + 2 mod 3 = 2; rank 2 finds 5.
    assert r2.threshold == 0.25 * 1.00125 * 0.995
    assert r2.partition == [(6, 8), (0, 3), (3, 6)]
    assert r2.indices == [2, 5, 6]
    np.testing.assert_array_equal(r2.residual, zero)

    # Three of four again. Everything is selected: the update is the mean and nothing is kept.
    assert r3.threshold == 0.25 * 1.00125 * 0.995 * 0.995
    assert r3.counts == [3, 3, 2]
    assert r3.indices == list(range(8))
    np.testing.assert_array_equal(r3.update, np.ones(8))
    np.testing.assert_array_equal(r3.residual, zero)

    # Eight of four: above the band.
    assert r4.threshold == 0.25 * 1.00125 * 0.995 * 0.995 * 1.005


@pytest.mark.parametrize(
    ("num_selected", "factor"),
    # k = 10: 9 of 10 is below 0.909; 10 and 11 of 10 are inside the band, 1.1 included; 12 of 10 is above it.
    [(9, 0.995), (10, 1.00125), (11, 1.00125), (12, 1.005)],
)
def test_threshold_answers_to_the_total_count(num_selected: int, factor: float) -> None:
    gradient = np.zeros((2, 40))
    gradient[0, : num_selected - 1] = 1.0  # rank 0 owns 0-19 and selects all of these
    gradient[1, 30] = 1.0  # rank 1 owns 20-39
    r0, r1 = reference_published_micro([gradient, gradient], 0.25)
    assert sum(r0.counts) == num_selected
    assert r1.threshold == r0.threshold * factor


def test_exdyna_by_hand() -> None:
    # 12 blocks of 32 * floor(floor(389 / 12) / 32) = 32 elements, 5 left over for the last partition.
    # n = 3: four blocks each. k = int(0.042 * 389) = int(16.3) = 16, so delta starts at 1 / 8.
    def ones(starts_and_counts: list[tuple[int, int]]) -> np.ndarray:
        gradient = np.zeros((3, 389))
        for rank, (start, count) in enumerate(starts_and_counts):
            gradient[rank, start : start + count] = 1.0
        return gradient

    first = ones([(0, 24), (128, 15), (369, 20)])  # the 20 reach the end of the left-over elements
    second = ones([(100, 5), (300, 30), (10, 5)])
    zero = np.zeros((3, 389))
    r0, r1, r2, r3 = reference_published_exdyna([first, second, zero, zero], 0.042, blocks=12)

    assert r0.threshold == 0.125
    assert r0.partition == [(0, 128), (128, 256), (256, 389)]
    assert r0.counts == [24, 15, 20]

    # Loads 24, 15, 20 of partitions 0, 1, 2; k' = 59, mean int(19.67) = 19, kappa = int(32 * 59 / 389) = 4.
    # Pair 0, 1: 24 / 19 > 1.05 and 15 / 19 < 0.952, so a block goes right and the loads become 20, 19, 20.
    # Pair 1, 2: 19 / 19 = 1, no move (the original 15 and 20 would have moved one left).
    # Blocks 3, 5, 4. Rank 0 now owns partition 1, rank 1 partition 2, rank 2 partition 0.
    assert r1.threshold == 0.125 * 1.005
    assert r1.partition == [(96, 256), (256, 389), (0, 96)]
    assert r1.counts == [5, 30, 5]

    # Those counts by partition, with the ownership of step 1: 5, 5, 30; k' = 40, mean 13.
    # Pair 0, 1: both light, no move. Pair 1, 2: light and heavy, a block goes left: blocks 3, 6, 3.
    # Rank 0 owns partition 2, and so on. Zeros: forced 288 + 2, 0 + 2, 96 + 2.
    assert r2.threshold == 0.125 * 1.005 * 1.005
    assert r2.partition == [(288, 389), (0, 96), (96, 288)]
    assert r2.counts == [1, 1, 1]
    assert r2.indices == [2, 98, 290]
    np.testing.assert_array_equal(r2.residual, zero)

    # Loads 1, 1, 1 with mean 1: no move. Three of 16: delta falls.
    assert r3.threshold == 0.125 * 1.005 * 1.005 * 0.995
    assert r3.partition == [(0, 96), (96, 288), (288, 389)]


def test_exdyna_mean_load_is_rounded_down() -> None:
    # Loads 2 and 1 have the mean 1.5, rounded down to 1: 2 / 1 is heavy but 1 / 1 is not light, so no move.
    gradient = np.zeros((2, 128))
    gradient[0, :2] = 1.0
    gradient[1, 100] = 1.0
    r0, r1 = reference_published_exdyna([gradient, gradient], 0.1, blocks=4)
    assert r0.counts == [2, 1]
    assert sorted(r1.partition) == [(0, 64), (64, 128)]


def test_exdyna_partition_stops_shrinking_at_a_fractional_minimum() -> None:
    # Ten blocks of 32, five each; at least 10 / 8 = 1.25 must stay, so 2 blocks are the fewest.
    # Partition 0 carries 10 elements, partition 1 a forced one: mean int(5.5) = 5, a block goes right.
    gradient = np.zeros((2, 320))
    gradient[:, :10] = 1.0
    records = reference_published_exdyna([gradient] * 6, 0.05, blocks=10)
    ends = [min(record.partition)[1] for record in records]
    assert ends == [160, 128, 96, 64, 64, 64]


def test_exdyna_without_moves_on_whole_blocks_is_micro() -> None:
    # Four blocks of 32 for four ranks are MiCRO's ranges, and nothing is heavy beyond infinity.
    gradients = _layered_gradients(4, 128, steps=20)
    micro = reference_published_micro(gradients, 0.1)
    exdyna = reference_published_exdyna(gradients, 0.1, blocks=4, alpha=float("inf"))
    for expected, record in zip(micro, exdyna, strict=True):
        assert record[:5] == expected[:5]
        np.testing.assert_array_equal(record.update, expected.update)


def test_top_k_by_hand() -> None:
    # k = 2. Rank 0 has three equal magnitudes and takes the first two; rank 1 takes 1 and 3.
    gradient = np.array([[3.0, -3.0, 3.0, 1.0], [0.0, 4.0, 0.0, -5.0]])
    zero = np.zeros_like(gradient)

    first, second = reference_top_k([gradient, zero], 0.5, release="own")
    assert first.counts == [2, 2]
    assert first.threshold is None
    assert first.partition is None
    assert first.indices == [0, 1, 3]
    np.testing.assert_array_equal(first.update, [1.5, 0.5, 0.0, -2.5])
    np.testing.assert_array_equal(first.residual, [[0, 0, 3, 1], [0, 0, 0, 0]])
    # Rank 0 sends what was left; rank 1 has only zeros and sends the first two.
    assert second.indices == [0, 1, 2, 3]
    np.testing.assert_array_equal(second.update, [0.0, 0.0, 1.5, 0.5])
    np.testing.assert_array_equal(second.residual, zero)

    # With the union, rank 0 also gives its 1 at index 3: (1 - 5) / 2.
    (first,) = reference_top_k([gradient], 0.5, release="union")
    assert first.counts == [2, 2]
    assert first.indices == [0, 1, 3]
    np.testing.assert_array_equal(first.update, [1.5, 0.5, 0.0, -2.0])
    np.testing.assert_array_equal(first.residual, [[0, 0, 3, 0], [0, 0, 0, 0]])


def test_top_k_sends_at_least_one_element_only_when_each_rank_releases_its_own() -> None:
    gradient = np.array([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    (own,) = reference_top_k([gradient], 0.1, release="own")
    assert own.indices == [0, 3]
    (union,) = reference_top_k([gradient], 0.1, release="union")
    assert union.indices == []
    np.testing.assert_array_equal(union.residual, gradient)


def test_hard_threshold_by_hand() -> None:
    gradient = np.array([[0.5, -0.25, 0.0], [0.25, 0.125, -1.0]])

    # Rank 0 reaches 0.5 at index 0, rank 1 at index 2.
    first, second = reference_hard_threshold([gradient, gradient], 0.5, release="own")
    assert first.counts == [1, 1]
    assert first.threshold == 0.5
    assert first.indices == [0, 2]
    np.testing.assert_array_equal(first.update, [0.25, 0.0, -0.5])
    np.testing.assert_array_equal(first.residual, [[0, -0.25, 0], [0.25, 0.125, 0]])
    # acc = [0.5, -0.5, 0] and [0.5, 0.25, -1]: both ranks select index 0.
    assert second.counts == [2, 2]
    assert second.indices == [0, 1, 2]
    np.testing.assert_array_equal(second.update, [0.5, -0.25, -0.5])
    np.testing.assert_array_equal(second.residual, [[0, 0, 0], [0, 0.25, 0]])

    # With the union, rank 1 also gives its 0.25 at index 0: (0.5 + 0.25) / 2.
    (first,) = reference_hard_threshold([gradient], 0.5, release="union")
    assert first.indices == [0, 2]
    np.testing.assert_array_equal(first.update, [0.375, 0.0, -0.5])
    np.testing.assert_array_equal(first.residual, [[0, -0.25, 0], [0, 0.125, 0]])


@pytest.mark.parametrize("release", ["own", "union"])
def test_hard_threshold_that_nothing_reaches_keeps_everything(release: str) -> None:
    gradient = np.array([[0.5, 0.25], [0.125, 0.0]])
    (record,) = reference_hard_threshold([gradient], 1.0, release=release)
    assert record.counts == [0, 0]
    assert record.indices == []
    np.testing.assert_array_equal(record.update, [0.0, 0.0])
    np.testing.assert_array_equal(record.residual, gradient)


def test_threshold_is_rounded_to_the_dtype_of_the_gradients() -> None:
    # The float32 nearest to 0.7 is below the float64 0.7, and still reaches it.
    gradient = np.full((2, 1), 0.7, dtype=np.float32)
    assert float(gradient[0, 0]) < 0.7
    (record,) = reference_hard_threshold([gradient], 0.7, release="own")
    assert record.counts == [1, 1]


@pytest.mark.parametrize("run", [reference_published_micro, reference_published_exdyna])
def test_partitioned_methods_need_two_ranks(run: Callable) -> None:
    with pytest.raises(ValueError, match="at least 2 ranks"):
        run([np.ones((1, 100))], 0.1)
