"""What ranks agree on, and measurements by a clock that only the measured job moves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.tuning.measuring.rank_sync import gathered, measure, slowest
from tests.ranks import Ranks
from tests.tuning.measuring.priced import set_clock

CPU = torch.device("cpu")


def tell_numbers() -> tuple[list[list[float]], list[float]]:
    comm, rank = TorchCollective(), dist.get_rank()
    numbers = [float(rank), -float(rank), 0.1]
    return gathered(numbers, comm, CPU).tolist(), slowest(numbers, comm, CPU)


def test_numbers_of_all_ranks(three_ranks: Ranks) -> None:
    for table, largest in three_ranks(tell_numbers):
        assert table == [[0, 0, 0.1], [1, -1, 0.1], [2, -2, 0.1]]
        assert largest == [2, 0, 0.1]


def test_one_rank_hears_itself() -> None:
    assert gathered([1.0, 2.0], TorchCollective(), CPU).tolist() == [[1.0, 2.0]]
    assert slowest([1.0, 2.0], TorchCollective(), CPU) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("durations", "repeats", "seconds", "expected"),
    [
        ([9, 1, 2, 3, 4, 5, 6], 5, 1000, [1, 2, 3, 4, 5]),  # the first one warms up
        ([9, 1, 2, 3, 4, 5, 6], 2, 1000, [1, 2]),
        ([9, 1, 2, 3, 4, 5, 6], 5, 27, [1, 2, 3]),  # as many as fit, by the first
        ([9, 1, 2, 3, 4, 5, 6], 5, 0.1, [1, 2]),  # twice at least
        ([0, 1, 2, 3], 2, 1, [1, 2]),  # a clock too coarse for the first
    ],
)
def test_measurements_stop_in_time(
    monkeypatch: pytest.MonkeyPatch, durations: list[float], repeats: int, seconds: float, expected: list[float]
) -> None:
    now, left = 0.0, list(durations)

    def job() -> None:
        nonlocal now
        now += left.pop(0)

    set_clock(monkeypatch, lambda: now)
    assert measure(job, TorchCollective(), CPU, repeats, seconds) == pytest.approx(expected)


def measured() -> list[float]:
    now, rank = 0.0, dist.get_rank()

    def job() -> None:
        nonlocal now
        now += 1 + rank

    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch, lambda: now)
        return measure(job, TorchCollective(), CPU, repeats=4, seconds=7.0)


def test_the_slowest_rank_counts_and_decides_how_often(two_ranks: Ranks) -> None:
    # 7 s for 2 s each on rank 1 are 4 repetitions; 7 on rank 0 alone.
    assert two_ranks(measured) == [[2.0] * 4] * 2
