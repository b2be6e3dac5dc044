"""Lines through collectives: exact by a clock that only they move, sensible between real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.tuning.measuring.collectives import measure_network
from lightning_sparse.tuning.performance.cost import NOTHING, Line
from lightning_sparse.tuning.performance.network import Network
from tests.ranks import Ranks
from tests.tuning.measuring.priced import Priced

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_prices_of_a_network_are_found(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    reduce, gather = Line(3e-4, 2e-9), Line(1e-4, 5e-9)
    comm = Priced(monkeypatch, all_reduce=reduce, all_gather=gather)
    found = measure_network(comm, CPU, dtype, most=3 << 20)
    assert found.ranks == 2
    for line, expected in ((found.all_reduce, reduce), (found.all_gather, gather)):
        assert line.alpha == pytest.approx(expected.alpha, rel=1e-6)
        assert line.beta == pytest.approx(expected.beta, rel=1e-6)
    assert max(comm.seen["all_reduce"]) == max(comm.seen["all_gather"]) == 1 << 20


def test_slow_networks_are_not_asked_for_much(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = Priced(monkeypatch, all_reduce=Line(1e-3, 1e-5), all_gather=Line(1e-3, 2e-5))
    found = measure_network(comm, CPU, seconds=2.0)
    assert max(comm.seen["all_reduce"]) == max(comm.seen["all_gather"]) == 64 << 10
    assert found.all_reduce.beta == pytest.approx(1e-5, rel=1e-6)
    assert comm.now < 10  # one of each for 16 MiB would take eight minutes


def test_one_rank_sends_nothing() -> None:
    assert measure_network(TorchCollective(), CPU) == Network(NOTHING, NOTHING, 1)


def test_small_models_are_not_timed_with_large_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = Priced(monkeypatch, all_reduce=Line(3e-4, 2e-9), all_gather=Line(1e-4, 5e-9))
    measure_network(comm, CPU, most=5000)
    assert max(comm.seen["all_reduce"]) == max(comm.seen["all_gather"]) == 1 << 20


def test_links_that_let_short_bursts_pass_are_not_flattered(monkeypatch: pytest.MonkeyPatch) -> None:
    # Up to 64 KiB are free, but for a price for each message.
    comm = Priced(monkeypatch, all_reduce=Line(1e-3, 0.0), all_gather=Line(1e-3, 0.0))
    for name in comm.prices:
        comm.prices[name] = lambda nbytes: 1e-3 + 1e-8 * max(0, nbytes - (64 << 10))  # type: ignore[assignment]
    found = measure_network(comm, CPU, most=64 << 20)
    for line in (found.all_reduce, found.all_gather):
        assert line(16 << 20) == pytest.approx(0.1678, rel=0.02)
        assert line.beta == pytest.approx(1e-8, rel=0.02)


def measured() -> Any:
    return measure_network(TorchCollective(), CPU, most=1 << 16)


def test_real_ranks_find_the_same_prices(two_ranks: Ranks) -> None:
    first, second = two_ranks(measured)
    assert first == second
    assert first.ranks == 2
    for line in (first.all_reduce, first.all_gather):
        assert line(10_000) > 0
        assert line.alpha >= 0
        assert line.beta >= 0
