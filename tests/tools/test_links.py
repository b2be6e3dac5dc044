"""Links between real ranks, of which one is slow."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.tools import links
from lightning_sparse.tools.links import Links, measure_links
from tests.ranks import RankError, Ranks

CPU = torch.device("cpu")
SLOW = 0.02
"""Seconds by which each message from rank 1 to rank 2 is late."""
given = TorchCollective.send_recv


def late(self: TorchCollective, x: Tensor, to: int | None, source: int | None) -> Tensor:
    if (self.rank, source) == (2, 1):
        time.sleep(SLOW)
    return given(self, x, to, source)


def measure(slow: bool, seconds: float = 0.5, long: float = links.LONG) -> Links:
    TorchCollective.send_recv = late if slow else given  # type: ignore[method-assign]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(links, "LONG", long)
            return measure_links(CPU, 0.05, seconds=seconds, numel=10_000)
    finally:
        TorchCollective.send_recv = given  # type: ignore[method-assign]


@pytest.mark.thorough
def test_the_slow_link_is_named_and_its_neighbours_are_not(three_ranks: Ranks) -> None:
    found: Links = three_ranks(measure, True)[0]
    assert found.links[1].round_trip >= SLOW
    assert max(found.links[0].round_trip, found.links[2].round_trip) < SLOW
    assert all(link.bits_per_second > 0 for link in found.links)
    assert {(link.source, link.target) for link in found.links} == {(socket.gethostname(),) * 2}


def test_all_ranks_know_the_same(two_ranks: Ranks) -> None:
    one, other = two_ranks(measure, False, 0.1, 0.005)
    assert one.links == other.links
    assert one.network == other.network
    assert len(one.links) == one.network.ranks == 2
    assert one.sparse.density == 0.05
    assert one.sparse.traffic  # so that other networks can be predicted


def alone() -> Any:
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return measure_links(CPU, 0.05, group)


def test_one_rank_has_no_links(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="at least 2 ranks"):
        two_ranks(alone)


def test_a_density_that_cannot_be_is_refused_before_anything_is_measured(two_ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="density"):
        measure_links(CPU, 1.5)
