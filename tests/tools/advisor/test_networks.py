"""Networks of other numbers of ranks, rates and round trips than were measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.tools.advisor.networks import between, farther, line_of, ring
from lightning_sparse.tuning.performance.cost import Line
from lightning_sparse.tuning.performance.network import Network

seconds = st.floats(0, 1e3)
NETWORK = Network(all_reduce=Line(100, 1), all_gather=Line(10_000, 3))


@settings(deadline=None, max_examples=60)
@given(ranks=st.integers(2, 100), others=st.integers(2, 100), prices=st.tuples(seconds, seconds, seconds, seconds))
def test_a_network_between_others_and_back(ranks: int, others: int, prices: tuple[float, ...]) -> None:
    network = Network(Line(*prices[:2]), Line(*prices[2:]), ranks)
    there = between(network, others)
    assert there.ranks == others
    back = between(there, ranks)
    for name in ("all_reduce", "all_gather"):
        before, after = getattr(network, name), getattr(back, name)
        assert (after.alpha, after.beta) == pytest.approx((before.alpha, before.beta), rel=1e-9)
    if others >= ranks:
        assert there.all_gather(1000) >= network.all_gather(1000) * (1 - 1e-9)
        assert there.all_reduce(1000) >= network.all_reduce(1000) * (1 - 1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_between_other_ranks_bytes_are_those_of_a_ring(ranks: int) -> None:
    known = ring(4, 1e-4, 1e9)
    expected = ring(ranks, 1e-4, 1e9)
    for found in (between(known, ranks), between(known, ranks, 1e9)):
        assert found.all_reduce.beta == pytest.approx(expected.all_reduce.beta)
        assert found.all_gather.beta == pytest.approx(expected.all_gather.beta)
        assert found.all_gather.alpha == pytest.approx(expected.all_gather.alpha)
        # A tree of log2 n levels, of which 4 ranks have two.
        assert found.all_reduce.alpha == pytest.approx(known.all_reduce.alpha * math.log2(ranks) / 2)
    fast = between(known, ranks, math.inf)
    assert (fast.all_reduce.beta, fast.all_gather.beta) == (0, 0)
    assert fast.all_gather.alpha == found.all_gather.alpha


def test_where_ranks_send_to_all_at_once_exchanges_take_as_long_between_more_ranks() -> None:
    network = Network(Line(6e-3, 6e-9), Line(1e-3, 3e-9), 4, one_hop=True)
    there = between(network, 8)
    assert (there.all_gather.alpha, there.all_reduce.alpha, there.one_hop) == (1e-3, pytest.approx(14e-3), True)
    assert (there.all_gather.beta, there.all_reduce.beta) == pytest.approx((7e-9, 7e-9))
    far = farther(network, 0.05)
    assert (far.all_gather.alpha, far.all_reduce.alpha) == pytest.approx((0.051, 0.306))
    expected = {
        "library_all_reduce": (6e-3, 6e-9),
        "all_gather": (1e-3, 3e-9),
        "all_to_all": (1e-3, 0.75e-9),
        "all_reduce": (2e-3, 1.5e-9),
        "send_recv": (1e-3, 1e-9),
        "broadcast": (2e-3, 2e-9),
    }
    for operation, (alpha, beta) in expected.items():
        line = line_of(network, operation)
        assert (line.alpha, line.beta) == pytest.approx((alpha, beta)), operation
    two = Network(Line(6e-3, 6e-9), Line(1e-3, 1e-9), 2, one_hop=True)
    assert line_of(two, "all_reduce") == line_of(two, "all_gather")


def test_between_one_rank_nothing_is_known_and_nothing_takes_time() -> None:
    assert between(NETWORK, 1) == Network(Line(0, 0), Line(0, 0), 1)
    with pytest.raises(ValueError, match="known between at least 2 ranks, but got those of one rank"):
        between(ring(1, 1e-3, 1e9), 2)
    for ranks in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="Expected ranks to be a positive integer, but got"):
            between(NETWORK, ranks)
        with pytest.raises(ValueError, match="Expected ranks to be a positive integer, but got"):
            Network(Line(1, 1), Line(1, 1), ranks)
    with pytest.raises(ValueError, match="Expected bits_per_second to be a positive number, but got 0"):
        between(NETWORK, 4, 0)
