"""Every logged quantity by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.engine.metrics import (
    QUANTITIES,
    Stamp,
    Statistics,
    Step,
    Totals,
    dense_statistics,
    measure,
    norm_of,
    quantity,
    summarize,
)
from lightning_sparse.ops.length import LengthChanges


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


BY_HAND: dict[str, tuple[float | None, float | None, float | None]] = {
    "density": (0.04, 70 / 4000, 1.0),
    "target_density": (0.1, (0.1 * 1000 + 0.01 * 3000) / 4000, 1.0),
    "density_error": (0.06, (130 - 70) / 4000, 0.0),  # |40 - 100| / 1000
    "grad_norm": (2.5, None, None),  # nothing was clipped
    "padding_ratio": (1.5, 2 * (30 + 20) / 80, 1.0),  # 2 * 30 / 40
    "build_up": (0.4, 70 / 130, 1.0),  # 40 / 100
    "threshold": (0.5, 0.5, None),  # mean over groups that have one
    "residual_norm": (3.0, 5.0, 5.0),  # the groups are parts of one vector
    "threshold_over_residual": (0.5 / 3, 0.1, None),
    "traffic/sent_mb": (1e-4, 2e-4, 4e-3),
    "traffic/total_mb": (5.0, 5.0, 5.0),
    "traffic/dense_total_mb": (50.0, 50.0, 50.0),
    "traffic/ratio": (40.0, 16_040 / 200, 1.0),
    "time/select_ms": (2.0, 3.0, None),
    "time/exchange_ms": (3.0, 4.0, None),
    "time/exposed_ms": (7.0, 0.0, None),
    "time/total_s": (9.0, 9.0, 9.0),
    "steps/skipped": (0.0, 0.0, 2.0),
    "steps/direct": (0.0, 0.0, 1.0),
    "lengths/clipped": (4.0, None, None),
    "lengths/measured_anew": (6.0, None, None),
    "steps/warnings": (0.0, 1.0, 3.0),
}
"""Each quantity of ONE_GROUP, THREE_GROUPS and BY_DDP; None where it is not logged."""

TOTALS = Totals()
TOTALS.load_state_dict({"sent_bytes": 5e6, "dense_bytes": 5e7, "seconds": 9.0, "exposed_seconds": 0.0})
ONE_GROUP = Step(
    [group()], [3.0], 7.0, 0, totals=TOTALS, warnings=0, length_changes=LengthChanges(4, 6), grad_norm=torch.tensor(2.5)
)
OTHER = group(
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
DENSE = group(
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
THREE_GROUPS = Step([group(), OTHER, DENSE], [3.0, 4.0, 0.0], 0.0, 0, totals=TOTALS, warnings=1)
"""The last one is dense: it counts for bytes and times only."""
BY_DDP = Step([dense_statistics(1000, 4000.0)], [3.0, 4.0], None, 2, True, 0.0, TOTALS, 3)
"""DDP averaged everything by itself."""


@pytest.mark.parametrize("number", range(3), ids=["one group", "three groups", "averaged by DDP"])
def test_every_quantity_by_hand(number: int) -> None:
    summary = summarize((ONE_GROUP, THREE_GROUPS, BY_DDP)[number], alone)
    expected = {name: values[number] for name, values in BY_HAND.items() if values[number] is not None}
    assert summary == pytest.approx(expected, rel=1e-12)


def test_times_bytes_and_residual_norms_are_averaged_over_ranks_in_one_call() -> None:
    calls = []

    def mean(x: Tensor) -> Tensor:
        calls.append(x)
        return x + torch.arange(len(x)) * 10.0

    summary = summarize(Step([group()], [3.0], 7.0, 0), mean)
    assert len(calls) == 1
    assert calls[0].dtype == torch.float64
    changed = {"residual_norm": 3.0, "traffic/sent_mb": 10.0001}
    changed |= {"time/select_ms": 22.0, "time/exchange_ms": 33.0, "time/exposed_ms": 47.0}
    assert {name: summary[name] for name in changed} == pytest.approx(changed)
    assert summary["traffic/ratio"] == pytest.approx(4000 / 10_000_100)
    assert summary["threshold_over_residual"] == 0.5 / 3


def test_what_groups_do_together_counts_once() -> None:
    def at(*milliseconds: float) -> list[Stamp]:
        return [Stamp(1.0 + ms / 1e3, None) for ms in milliseconds]

    begin, selected, paused, resumed, end = at(0, 2, 3, 10, 15)
    early = group(stamps=(begin, selected, end), pause=(paused, resumed))
    begin, paused, resumed, selected, end = at(4, 5, 10, 12, 14)  # asks others before it has selected
    late = group(stamps=(begin, selected, end), pause=(paused, resumed))
    by_itself = group(stamps=stamps(0.1, 0.2))
    expected = {
        "early": ([early], 2, 1 + 5),
        "late": ([late], 1 + 2, 2),
        "together": ([early, late], 2 + 1 + 2, 1 + 3),  # the selection of all is over at 12
        "with another one": ([early, late, by_itself], 5 + 100, 4 + 200),
    }
    for name, (those, select, exchange) in expected.items():
        summary = summarize(Step(those, [0.0] * len(those), shared_bytes=16.0), alone)
        assert summary["time/select_ms"] == pytest.approx(select), name
        assert summary["time/exchange_ms"] == pytest.approx(exchange), name
        assert summary["traffic/sent_mb"] == pytest.approx((100 * len(those) + 16) / 1e6)


def test_a_model_that_is_dense_altogether_is_summarised_as_it_is() -> None:
    dense = group(sparse=False, target=100, union=torch.tensor(1000), counts=torch.tensor([1000, 1000]), threshold=None)
    summary = summarize(Step([dense], [0.0], 0.0, 0), alone)
    assert (summary["density"], summary["padding_ratio"]) == (1.0, 1.0)
    assert "threshold" not in summary


def test_a_step_in_which_nobody_picked_or_sent_anything_divides_by_nothing() -> None:
    empty = group(counts=torch.tensor([0, 0]), union=torch.tensor(0), bytes_sent=0.0, dense_bytes=0.0)
    summary = summarize(Step([empty], [0.0], 0.0, 0), alone)
    assert (summary["density"], summary["padding_ratio"], summary["traffic/ratio"]) == (0.0, 1.0, 1.0)
    assert all(math.isfinite(value) for value in summary.values())


def test_a_group_has_no_number_for_what_groups_share() -> None:
    shared = {"time/exposed_ms", "time/total_s", "traffic/total_mb", "traffic/dense_total_mb"}
    shared |= {"steps/skipped", "steps/warnings"}
    shared |= {"lengths/clipped", "lengths/measured_anew", "grad_norm"}  # where there are none
    assert set(QUANTITIES) - set(summarize(Step([group()], [3.0]), alone)) == shared


@pytest.mark.parametrize("averaged", [False, True])
def test_a_new_quantity_is_one_entry(monkeypatch: pytest.MonkeyPatch, averaged: bool) -> None:
    monkeypatch.setattr("lightning_sparse.engine.metrics.QUANTITIES", entries := dict(QUANTITIES))

    @quantity(averaged=averaged)
    def picks(step: Step) -> float:
        """Picks of all ranks."""
        return float(sum(int(one.counts.sum()) for one in step.groups))

    assert entries["picks"].meaning == "Picks of all ranks"
    assert summarize(Step([group(), group()], [0.0, 0.0], 0.0, 0), alone)["picks"] == 80.0
    [trace] = ls.simulate(torch.ones(1, 3, 100), sparsifier="top_k", density=0.05)
    assert trace.quantities["picks"] == 15.0


def test_norms_are_summed_in_double_precision() -> None:
    assert norm_of(None) == 0.0
    assert norm_of(torch.full((3,), 3e30)) == pytest.approx(3e30 * 3**0.5)


def test_every_quantity_that_is_logged_is_described_and_the_other_way_round() -> None:
    assert set(summarize(ONE_GROUP, alone)) == set(QUANTITIES) == set(BY_HAND)


@pytest.mark.parametrize(
    ("counts", "ratio"), [([5], 1.0), ([5, 5, 5], 1.0), ([6, 0, 0], 3.0), ([4, 2], 4 / 3), ([0, 0], 1.0)]
)
def test_padding_ratio_compares_the_longest_message_with_the_mean(counts: list[int], ratio: float) -> None:
    step = Step([group(counts=torch.tensor(counts))], [0.0])
    assert QUANTITIES["padding_ratio"].compute(step) == pytest.approx(ratio)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_measure_notes_a_step_and_what_ddp_would_have_sent(dtype: torch.dtype, width: int) -> None:
    indices, threshold = torch.tensor([3, 5, 1000]), torch.tensor(0.25, dtype=torch.float64)
    update = Update(indices, torch.ones(3), indices, None, torch.tensor([1, 1, 1, 1]), torch.tensor(2))
    selection = Selection(torch.tensor([3]), torch.tensor(1), threshold)
    ctx = Context(step=3, density=0.0125, rank=0, world_size=4)
    noted = measure(dtype, 1000, Agreement.INDEPENDENT, selection, update, ctx, 123.0, stamps(1.0, 1.0))
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
    assert not measure(dtype, 1000, Agreement.EVERYTHING, selection, update, ctx, 123.0, stamps(1.0, 1.0)).sparse


def test_a_stamp_on_the_cpu_is_the_host_clock_in_milliseconds() -> None:
    first = Stamp.now(torch.device("cpu"))
    second = Stamp.now(torch.device("cpu"))
    assert first.event is None
    assert first.until(second) == pytest.approx(1e3 * (second.host - first.host))
    assert first.until(second) >= 0


def test_a_stamp_is_of_its_device_whichever_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self, stream: object = "the current device") -> None:
            streams.append(stream)

    monkeypatch.setattr("lightning_sparse.engine.metrics._cuda_is_there", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    Stamp.now(torch.device("cuda", 1))
    assert streams == [torch.device("cuda", 1)]


class InAStream:
    """An event as torch's, which refuses to tell a time while one of two has not come."""

    def __init__(self, at: float) -> None:
        self.at, self.come = at, False

    def query(self) -> bool:
        return self.come

    def synchronize(self) -> None:
        self.come = True

    def elapsed_time(self, other: InAStream) -> float:
        if not (self.come and other.come):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return other.at - self.at


def test_stamps_of_two_streams_may_come_in_any_order() -> None:
    totals, begin, end = Totals(), InAStream(0.0), InAStream(2_000.0)
    end.come = True  # in a stream that is ahead
    totals.expose(Stamp(0.0, begin), Stamp(0.0, end))  # type: ignore[arg-type]
    assert not begin.come, "somebody waited"
    begin.come = True
    later = InAStream(3_000.0)
    totals.expose(Stamp(0.0, end), Stamp(0.0, later))  # type: ignore[arg-type]
    assert totals.exposed_seconds == pytest.approx(3.0)
    assert later.come
