"""Every logged quantity by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_sparse.statistics import QUANTITIES, Stamp, Statistics, measure, padding_ratio, summarize
from lightning_sparse.types import Agreement, Context, Selection, Update


def stamps(select: float, exchange: float) -> tuple[Stamp, Stamp, Stamp]:
    """Seconds on the host's clock."""
    return Stamp(1.0, None), Stamp(1.0 + select, None), Stamp(1.0 + select + exchange, None)


def group(**changes: object) -> Statistics:
    settings = {
        "numel": 1000,
        "target": 100,
        "target_density": 0.1,
        "sparse": True,
        "counts": torch.tensor([30, 10]),
        "indices": torch.arange(40),
        "union": torch.tensor(40),
        "threshold": torch.tensor(0.5, dtype=torch.float64),
        "bytes_sent": 100.0,
        "dense_bytes": 4000.0,
        "stamps": stamps(0.002, 0.003),
    }
    return Statistics(**(settings | changes))


def alone(x: Tensor) -> Tensor:
    return x


def test_one_group_by_hand() -> None:
    summary = summarize([group()], [3.0], 7.0, alone)
    assert summary == pytest.approx(
        {
            "density": 0.04,
            "target_density": 0.1,
            "density_error": 0.06,  # |40 - 100| / 1000
            "padding_ratio": 1.5,  # 2 * 30 / 40
            "build_up": 0.4,  # 40 / 100
            "threshold": 0.5,
            "residual_norm": 3.0,
            "bytes_sent": 100.0,
            "traffic_ratio": 40.0,
            "select_ms": 2.0,
            "exchange_ms": 3.0,
            "exposed_ms": 7.0,
            "void_steps": 0.0,
            "direct": 0.0,
        }
    )


def test_groups_are_weighted_by_their_coordinates_and_dense_ones_count_for_bytes_and_times_only() -> None:
    other = group(
        numel=3000,
        target=30,
        target_density=0.01,
        counts=torch.tensor([20, 20]),
        union=torch.tensor(30),
        threshold=None,
        bytes_sent=60.0,
        dense_bytes=12_000.0,
        stamps=stamps(0.001, 0.001),
    )
    dense = group(
        numel=10,
        target=10,
        sparse=False,
        counts=torch.tensor([10, 10]),
        indices=None,
        union=torch.tensor(10),
        threshold=None,
        bytes_sent=40.0,
        dense_bytes=40.0,
        stamps=stamps(0.0, 0.0),
    )
    summary = summarize([group(), other, dense], [3.0, 4.0, 0.0], 0.0, alone)
    assert summary == pytest.approx(
        {
            "density": 70 / 4000,
            "target_density": (0.1 * 1000 + 0.01 * 3000) / 4000,
            "density_error": (130 - 70) / 4000,
            "padding_ratio": 2 * (30 + 20) / 80,
            "build_up": 70 / 130,
            "threshold": 0.5,  # mean over groups that have one
            "residual_norm": 5.0,  # the groups are parts of one vector
            "bytes_sent": 200.0,
            "traffic_ratio": 16_040 / 200,
            "select_ms": 3.0,
            "exchange_ms": 4.0,
            "exposed_ms": 0.0,
            "void_steps": 0.0,
            "direct": 0.0,
        }
    )


def test_times_bytes_and_residual_norms_are_averaged_over_ranks_in_one_call() -> None:
    calls = []

    def mean(x: Tensor) -> Tensor:
        calls.append(x)
        return x + torch.arange(len(x)) * 10

    summary = summarize([group()], [3.0], 7.0, mean)
    assert len(calls) == 1
    assert calls[0].dtype == torch.float64
    changed = {"residual_norm": 3.0, "bytes_sent": 110.0, "select_ms": 22.0, "exchange_ms": 33.0, "exposed_ms": 47.0}
    assert {name: summary[name] for name in changed} == pytest.approx(changed)
    assert summary["traffic_ratio"] == pytest.approx(4000 / 110)


def test_a_model_that_is_dense_altogether_is_summarised_as_it_is() -> None:
    dense = group(sparse=False, target=100, union=torch.tensor(1000), counts=torch.tensor([1000, 1000]), threshold=None)
    summary = summarize([dense], [0.0], 0.0, alone)
    assert (summary["density"], summary["padding_ratio"]) == (1.0, 1.0)
    assert "threshold" not in summary


def test_a_step_in_which_nobody_picked_or_sent_anything_divides_by_nothing() -> None:
    empty = group(counts=torch.tensor([0, 0]), union=torch.tensor(0), bytes_sent=0.0, dense_bytes=0.0)
    summary = summarize([empty], [0.0], 0.0, alone)
    assert (summary["density"], summary["padding_ratio"], summary["traffic_ratio"]) == (0.0, 1.0, 1.0)
    assert all(math.isfinite(value) for value in summary.values())


def test_every_quantity_that_is_logged_is_described_and_the_other_way_round() -> None:
    assert set(summarize([group()], [3.0], 7.0, alone)) == set(QUANTITIES)


@pytest.mark.parametrize(
    ("counts", "ratio"), [([5], 1.0), ([5, 5, 5], 1.0), ([6, 0, 0], 3.0), ([4, 2], 4 / 3), ([0, 0], 1.0)]
)
def test_padding_ratio_compares_the_longest_message_with_the_mean(counts: list[int], ratio: float) -> None:
    assert padding_ratio(torch.tensor(counts)) == pytest.approx(ratio)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_measure_notes_a_step_and_what_ddp_would_have_sent(dtype: torch.dtype, width: int) -> None:
    indices, threshold = torch.tensor([3, 5, 1000]), torch.tensor(0.25, dtype=torch.float64)
    update = Update(indices, torch.ones(3), indices, None, torch.tensor([1, 1, 1, 1]), torch.tensor(2))
    selection = Selection(torch.tensor([3]), torch.tensor(1), threshold)
    ctx = Context(step=3, density=0.0125, rank=0, world_size=4)
    grad = torch.zeros(1001, dtype=dtype)  # with the spare slot
    noted = measure(grad, 1000, Agreement.INDEPENDENT, selection, update, ctx, 123.0, stamps(1.0, 1.0))
    assert noted.target == 12  # floor(12.5)
    assert noted.sparse
    assert noted.dense_bytes == 1.5 * 1000 * width
    assert (noted.numel, noted.target_density, noted.bytes_sent) == (1000, 0.0125, 123.0)
    assert (noted.counts, noted.indices, noted.union, noted.threshold) == (
        update.counts,
        indices,
        update.union,
        threshold,
    )
    assert not measure(grad, 1000, Agreement.EVERYTHING, selection, update, ctx, 123.0, stamps(1.0, 1.0)).sparse


def test_a_stamp_on_the_cpu_is_the_host_clock_in_milliseconds() -> None:
    first = Stamp.now(torch.device("cpu"))
    second = Stamp.now(torch.device("cpu"))
    assert first.event is None
    assert first.until(second) == pytest.approx(1e3 * (second.host - first.host))
    assert first.until(second) >= 0
