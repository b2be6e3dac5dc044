"""Metrics over steps and ranks, against sums by hand."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MetricCollection

import lightning_sparse as ls
from lightning_sparse.engine.metrics import Step
from tests.engine.test_metrics import BY_HAND, ONE_GROUP, THREE_GROUPS, group
from tests.ranks import Ranks

MEANS = {
    "density_error": ls.metrics.DensityError,
    "padding_ratio": ls.metrics.PaddingRatio,
    "build_up": ls.metrics.BuildUp,
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_steps(name: str) -> None:
    metric, (one, three, _) = MEANS[name](), BY_HAND[name]
    assert float(metric(ONE_GROUP)) == pytest.approx(one), "of this step"
    assert float(metric(THREE_GROUPS)) == pytest.approx(three)
    assert float(metric.compute()) == pytest.approx((one + three) / 2)
    metric.reset()
    metric.update(THREE_GROUPS)
    assert float(metric.compute()) == pytest.approx(three)


def test_traffic_of_an_engine_counts_steps_that_were_not_given_and_that_of_a_simulation_does_not() -> None:
    traffic = ls.metrics.Traffic()
    nothing = ls.metrics.Traffic()(Step([group(bytes_sent=0.0)], [0.0]))
    assert float(nothing["ratio"]) == 1
    for _ in range(2):
        assert float(traffic(ONE_GROUP)["total_mb"]) == 5
    assert {k: float(v) for k, v in traffic.compute().items()} == {"total_mb": 5, "dense_total_mb": 50, "ratio": 10}
    traffic = ls.metrics.Traffic()
    for _ in range(2):
        traffic.update(Step([group()], [0.0], shared_bytes=16.0))
    assert float(traffic.compute()["total_mb"]) == pytest.approx(232e-6)
    assert float(traffic.compute()["ratio"]) == pytest.approx(4000 / 116)


def test_what_was_no_step_is_refused() -> None:
    for metric in (ls.metrics.PaddingRatio(), ls.metrics.Traffic()):
        with pytest.raises(ValueError, match=r"^Expected step to be what Engine\.latest_step\(\) gives after a step"):
            metric.update(None)  # type: ignore[arg-type]  # as before the first one


def synchronised() -> dict[str, float]:
    """Rank 0 has one step, rank 1 two others."""
    rank = torch.distributed.get_rank()
    metrics = MetricCollection({"error": ls.metrics.DensityError(), "traffic": ls.metrics.Traffic()})
    steps = [Step([group(union=torch.tensor(u), bytes_sent=100.0 * u)], [0.0]) for u in ([90], [80, 40])[rank]]
    for step in steps:
        metrics.update(step)
    return {name: float(value) for name, value in metrics.compute().items()}


def test_ranks_are_combined(two_ranks: Ranks) -> None:
    for found in two_ranks(synchronised):
        assert found["error"] == pytest.approx((10 + 20 + 60) / 3 / 1000), "each step counts once"
        assert found["total_mb"] == pytest.approx((9000 + 12_000) / 2 / 1e6), "mean over ranks"


def test_they_plot() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    import matplotlib

    matplotlib.use("Agg")
    for metric in (ls.metrics.PaddingRatio(), ls.metrics.Traffic()):
        metric.update(ONE_GROUP)
        figure, _ = metric.plot()
        assert figure is not None
        matplotlib.pyplot.close(figure)


def test_quantities_that_begin_alike_stay_apart_in_a_collection() -> None:
    metrics = MetricCollection([ls.metrics.PaddingRatio(), ls.metrics.BuildUp()])
    for sparsifier in ("shared_top_k", "top_k"):  # 1.0 of both on one rank, then not
        stream = torch.randn(
            2, 1 if sparsifier == "shared_top_k" else 4, 400, generator=torch.Generator().manual_seed(0)
        )
        for trace in ls.simulate(stream, sparsifier=sparsifier, density=0.05):
            metrics.update(trace.ranks[0])
    found = metrics.compute()
    assert found["PaddingRatio"] == 1.0 < found["BuildUp"]
