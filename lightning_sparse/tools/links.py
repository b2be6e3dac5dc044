"""Links between the ranks of a cluster: round trips, rates, collectives and a sparse exchange, before any training."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.metrics import Stamp
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.memories import SecondMoment
from lightning_sparse.tuning.measuring.collectives import measure_network
from lightning_sparse.tuning.measuring.microbenchmark import measure_group, sizes_up_to
from lightning_sparse.tuning.measuring.rank_sync import gathered, start_together
from lightning_sparse.tuning.performance.network import Network
from lightning_sparse.tuning.performance.profile import GroupCost

SMALL, LARGEST = 1 << 16, 1 << 26
"""Bytes of the smallest and the largest message that a rate is measured with."""
LONG = 0.1
"""Seconds of a message that is long enough for a rate: bursts are over."""
REPEATS, PINGS = 5, 10
"""Of each measurement, and messages of a short one."""


class Link(NamedTuple):
    """The way from a rank to the next one, which rings use."""

    source: str
    """Host of the rank."""
    target: str
    """Host of the next rank."""
    round_trip: float
    """Seconds of a message of one byte there and one back."""
    bits_per_second: float
    """In this direction."""


class Links(NamedTuple):
    """Measurements of a cluster."""

    links: tuple[Link, ...]
    """From each rank to the next one; the last rank's goes to rank 0."""
    network: Network
    """Collectives between all ranks."""
    sparse: GroupCost
    """A step of the default sparsifier with second moments, as for AdamW, by coordinates of the group."""


def measure_links(
    device: torch.device, density: float, group: Any = None, seconds: float = 8.0, numel: int = 1 << 22
) -> Links:
    """Measure the links between ranks, collectives, and the default's exchange; collective, takes some ten seconds.

    Args:
        device: where gradients would live.
        density: of the exchange, in (0, 1].
        group: process group of the ranks; None: the default group.
        seconds: about the time for the collectives.
        numel: coordinates of the largest group whose exchange is timed.

    Raises:
        ValueError: with one rank, which has no links; for a density outside its range.
    """
    memory = SecondMoment()
    settings = SparsificationConfig(density=density, memory=memory)
    method: dict[str, Any] = {"sparsifier": settings.sparsifier, "exchange": settings.exchange_in_use, "memory": memory}
    comm = TorchCollective.of_its_own(group)
    if comm.world_size < 2:
        raise ValueError("Expected at least 2 ranks, but got 1: there is no link to measure.")
    try:
        links = _links(comm, device)
        network = measure_network(comm, device, seconds=seconds)
        sparse = measure_group(comm, device, sizes_up_to(numel), **method, density=density, repeats=3)
        return Links(links, network, sparse)
    finally:
        comm.close()


def _links(comm: TorchCollective, device: torch.device) -> tuple[Link, ...]:
    """Measure links that share a rank one after the other: a slow one must not delay its neighbours."""
    n = comm.world_size
    hosts = comm.all_gather_object(socket.gethostname(), device)
    turns = [2 if n % 2 and link == n - 1 else link % 2 for link in range(n)]
    found: dict[int, tuple[float, float]] = {}
    for turn in sorted(set(turns)):
        mine = [link for link in range(n) if turns[link] == turn]
        seconds = partial(_seconds, comm, device, mine)
        trips, small = seconds(1, PINGS), seconds(SMALL, PINGS)
        size, large = SMALL, small
        while size < LARGEST and max(large[link] for link in mine) < LONG:
            size *= 4
            large = seconds(size)
        for link in mine:
            # The difference of two sizes is free of the price of a message; a burst may make it seem to be nothing.
            more, longer = (size - SMALL, large[link] - small[link]) if size > SMALL else (size, large[link])
            found[link] = trips[link], 8 * more / max(longer, 1e-9)
    return tuple(Link(hosts[link], hosts[(link + 1) % n], *found[link]) for link in range(n))


def _seconds(
    comm: TorchCollective, device: torch.device, links: Sequence[int], nbytes: int, times: int = 1
) -> list[float]:
    """Return for each rank the median of the seconds of a message over its link, one of these, and a byte back."""
    following, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    message, answer = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (nbytes, 1))
    taken = []
    for _ in range(REPEATS + 1):  # the first one connects
        start_together(comm, device)
        begin = Stamp.now(device)
        for _ in range(times):
            if comm.rank in links:
                comm.send_recv(message, following, None)
                comm.send_recv(answer, None, following)
            if before in links:
                comm.send_recv(message, None, before)
                comm.send_recv(answer, before, None)
        taken.append(begin.until(Stamp.now(device)) / 1e3 / times)
    return gathered([median(taken[1:])], comm, device).flatten().tolist()
