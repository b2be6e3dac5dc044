"""What groups cost: exact by a clock that only messages move, and bytes as the pipeline counts them."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.messages import ring_all_reduce_bytes
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.methods.exchanges import as_exchange
from lightning_sparse.methods.memory import Residual
from lightning_sparse.tools.advisor.networks import on
from lightning_sparse.tuning.measuring import microbenchmark as module
from lightning_sparse.tuning.measuring.microbenchmark import measure_group, sizes_up_to
from lightning_sparse.tuning.performance.cost import NOTHING, Line
from lightning_sparse.tuning.performance.network import Network
from lightning_sparse.tuning.performance.profile import GroupCost
from tests.ranks import Ranks
from tests.tuning.measuring.priced import Priced

CPU = torch.device("cpu")
SIZES = [6000, 18_000, 60_000]
DENSITY = 0.02
"""Counts are divisible by two and by three."""
SPARSIFIERS: dict[str, ls.sparsifiers.Sparsifier] = {
    name: ls.sparsifiers.HardThreshold(40.0) if name == "hard_threshold" else cls()
    for name, cls in ls.sparsifiers.SPARSIFIERS.items()
}
OPERATIONS = {"all_gather", "all_reduce", "broadcast", "all_to_all", "send_recv"}
EXACT = {"top_k", "shared_top_k", "clt_k", "random_k", "gtop_k", "everything"}
"""Counts and messages are a straight line of the number of coordinates."""


def measured(name: str, comm: Any, sizes: list[int] = SIZES, **options: Any) -> GroupCost:
    sparsifier = SPARSIFIERS[name]
    parts = {"sparsifier": sparsifier, "exchange": as_exchange(None, sparsifier), "memory": Residual()}
    return measure_group(comm, CPU, sizes, **{"density": DENSITY, **parts, **options})


def counted(names: list[str]) -> dict[str, tuple[GroupCost, dict[int, float]]]:
    """Costs, and this rank's bytes as the pipeline counts them, by size: medians of the last two steps."""
    results = {}
    for name in names:
        seen: dict[int, list[float]] = {}

        def reduce_group(grad: Tensor, *args: Any, seen: dict[int, list[float]] = seen, **kwargs: Any) -> Any:
            state, statistics = yield from ls.engine.pipeline.reduce_group(grad, *args, **kwargs)
            seen.setdefault(statistics.numel, []).append(statistics.bytes_sent)
            return state, statistics

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "reduce_group", reduce_group)
            cost = measured(name, TorchCollective(), repeats=2)
        results[name] = cost, {numel: median(sent[module.WARMUP :]) for numel, sent in seen.items()}
        assert all(len(sent) == module.WARMUP + 2 for sent in seen.values())
    return results


def ring_bytes(cost: GroupCost, numel: int, n: int) -> float:
    """What a rank sends that gives so many bytes. In a tree it gives once, and waits for others in the other calls."""
    factors = {
        "all_gather": lambda calls: n - 1,
        "all_reduce": lambda calls: ring_all_reduce_bytes(1, n),
        "broadcast": lambda calls: (n - 1) / n,
        "all_to_all": lambda calls: (n - 1) / n,
        "send_recv": lambda calls: 1 / calls,
    }
    return sum(factors[part.operation](part.calls) * part.nbytes(numel) for part in cost.traffic)


SOME = ["top_k", "union_top_k", "clt_k", "gtop_k", "ok_top_k", "micro"]
"""With all operations of the network, counts that are exact and others, and a question before picks."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "names"),
    [("three_ranks", SOME), ("three_ranks", list(SPARSIFIERS)), ("two_ranks", list(SPARSIFIERS))],
)
def test_microbenchmarks_count_what_the_pipeline_sends(
    request: pytest.FixtureRequest, ranks: str, names: list[str]
) -> None:
    run: Ranks = request.getfixturevalue(ranks)
    results = run(counted, names)
    assert names != SOME or {part.operation for name in names for part in results[0][name][0].traffic} == OPERATIONS
    for name in names:
        costs = [result[name][0] for result in results]
        assert all(cost == costs[0] for cost in costs), name
        assert costs[0].density == DENSITY
        for line in (costs[0].select, costs[0].process, costs[0].transfer):
            assert 0 <= line(10_000) < math.inf
            assert line(10_000) < 10
        assert costs[0].transfer(10_000) > 0
        for part in costs[0].traffic:
            assert part.calls > 0
        for numel in SIZES:
            sent = max(result[name][1][numel] for result in results)  # of a tree's ranks, some give nothing
            found = ring_bytes(costs[0], numel, run.world_size)
            assert found == pytest.approx(sent, rel=1e-9 if name in EXACT else 0.25), (name, numel)


def test_transfers_are_lines_of_the_bytes_that_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = Priced(monkeypatch, all_reduce=Line(7e-3, 5e-7), all_gather=Line(3e-3, 1e-6))
    expected = {
        "everything": (7e-3, 4 * 5e-7),
        "top_k": (3e-3 + 4e-6, DENSITY * 8 * 1e-6),  # a count, and an index and a value each
        "random_k": (7e-3, DENSITY * 4 * 5e-7),
    }
    for name, (alpha, beta) in expected.items():
        cost = measured(name, comm)
        assert cost.transfer.alpha == pytest.approx(alpha, rel=1e-6)
        assert cost.transfer.beta == pytest.approx(beta, rel=1e-6)
        assert [part.calls for part in cost.traffic] == [1]
        # No time passes while a rank computes.
        assert (cost.select(10_000), cost.process(10_000)) == pytest.approx((0, 0), abs=1e-9)


def test_wide_values_take_more_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = Priced(monkeypatch, all_reduce=Line(7e-3, 5e-7), all_gather=Line(3e-3, 1e-6))
    cost = measured("everything", comm, dtype=torch.float64)
    assert cost.traffic[0].nbytes.beta == pytest.approx(8)
    assert cost.transfer.beta == pytest.approx(8 * 5e-7)


def test_what_ranks_ask_each_other_while_selecting_is_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    # MiCRO shares a survey before it picks, and then its picks.
    comm = Priced(monkeypatch, all_reduce=Line(7e-3, 0.0), all_gather=Line(3e-3, 0.0))
    cost = measured("micro", comm)
    calls = {part.operation: part.calls for part in cost.traffic}
    assert calls["all_gather"] >= 2
    assert cost.transfer(1000) == pytest.approx(3e-3 * calls["all_gather"] + 7e-3 * calls["all_reduce"])
    assert cost.compute(1000) == cost.compute(100_000) == 0


@pytest.mark.parametrize(("alpha", "steps"), [(1e-4, 5), (0.15, 3), (100.0, 2)])
def test_microbenchmarks_stop_in_time(monkeypatch: pytest.MonkeyPatch, alpha: float, steps: int) -> None:
    # Half a second for each size, five steps at most and two at least.
    comm = Priced(monkeypatch, all_reduce=Line(alpha, 1e-12), all_gather=NOTHING)
    numels: list[int] = []

    def reduce_group(grad: Tensor, *args: Any, **kwargs: Any) -> Any:
        state, statistics = yield from ls.engine.pipeline.reduce_group(grad, *args, **kwargs)
        numels.append(statistics.numel)
        return state, statistics

    monkeypatch.setattr(module, "reduce_group", reduce_group)
    measured("everything", comm)
    assert {numel: numels.count(numel) for numel in numels} == dict.fromkeys(SIZES, module.WARMUP + steps)


def test_one_rank_computes_and_sends_nothing_worth_mentioning() -> None:
    cost = measured("top_k", TorchCollective())
    assert cost.select(50_000) > 0
    assert cost.process(50_000) > 0
    assert cost.transfer(50_000) < cost.compute(50_000)
    assert on(Network(NOTHING, NOTHING, 1), cost).transfer == NOTHING


@pytest.mark.parametrize(
    "memory", [ls.memories.MomentumCorrection(), ls.memories.AdamCorrection(), ls.memories.NoMemory()], ids=repr
)
def test_any_memory_can_be_measured(memory: ls.memories.Memory) -> None:
    cost = measured("union_top_k", TorchCollective(), memory=memory, dtype=torch.bfloat16)
    assert cost.compute(10_000) > 0


def test_sizes_reach_from_small_ones_to_that_of_the_model() -> None:
    for numel in (1, 5000, 10**5, 10**6, 10**9):
        sizes = sizes_up_to(numel)
        assert sizes == sorted(set(sizes))
        assert sizes[0] == 4096
        assert sizes[-1] == max(8192, min(numel, 1 << 24))
        assert 2 <= len(sizes) <= 5
