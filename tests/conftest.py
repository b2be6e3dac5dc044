"""Fixtures that several folders share, and one thread of computation for each process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.ranks import Ranks
from tests.streams import Streams, play

# Before torch and numpy are imported; processes that tests start inherit it. Tests and their ranks fill the cores by
# themselves: threads beside them would only take these away from each other, and the order of sums depend on them.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_finish() -> None:
    # What is there by now stays. Each look at all of it for garbage takes 0.3 s, 4 % of the time of short tests.
    gc.freeze()


@pytest.fixture
def not_launched() -> Iterator[None]:
    """An environment in which nobody has started ranks; Lightning leaves addresses and ports in it."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two real processes."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """Three real processes: sums depend on their order, and nothing divides evenly."""
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> Iterator[Streams]:
    """A device with a main stream and a side stream, on CPU tensors."""
    played = play(monkeypatch)
    with played:
        yield played
