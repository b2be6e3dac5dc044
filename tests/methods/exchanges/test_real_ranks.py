"""Exchanges between real processes: the same updates as between the threads of a simulation, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine.drivers import drive
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.pipeline import init_group, reduce_group
from tests.lockstep import noise
from tests.ranks import Ranks

NUMEL, DENSITY, STEPS = 501, 0.1, 4

# A library is free to form the sums of an all-reduce in any order: there values whose sums are exact, elsewhere any.
WALKS = {
    "clt_k": (ls.sparsifiers.CLTK(), "follow_leader", True),
    "random_k": (ls.sparsifiers.RandomK(), "reduce_shared", True),
    "gtop_k": (ls.sparsifiers.GTopK(), "tree", False),
    "hard_threshold-tree": (ls.sparsifiers.HardThreshold(1.5), "tree", False),
    "ok_top_k": (ls.sparsifiers.OkTopK(interval=3), "balanced", False),
    "hard_threshold-balanced": (ls.sparsifiers.HardThreshold(1.5), "balanced", False),
}


def rows_of(step: int, n: int, exact: bool) -> torch.Tensor:
    if exact:
        return noise(n, NUMEL, seed=step, dtype=torch.float32)
    return torch.randn(n, NUMEL, generator=torch.Generator().manual_seed(step))


def walk(name: str) -> list[tuple[list[float], list[int], float]]:
    """A few steps of this rank: updates, counts and bytes."""
    sparsifier, exchange, exact = WALKS[name]
    comm, memory = TorchCollective(), ls.memories.Residual()
    ctx = Context(0, DENSITY, comm.rank, comm.world_size)
    state = init_group(NUMEL, torch.float32, torch.device("cpu"), ctx, memory=memory, sparsifier=sparsifier)
    parts: dict[str, Any] = {
        "memory": memory,
        "sparsifier": sparsifier,
        "exchange": ls.exchanges.EXCHANGES.resolve(exchange),
    }
    seen = []
    for step in range(STEPS):
        grad = rows_of(step, comm.world_size, exact)[comm.rank].clone()
        state, statistics = drive(reduce_group(grad, state, ctx._replace(step=step), **parts), comm)
        seen.append((grad.tolist(), statistics.counts.tolist(), statistics.bytes_sent))
    return seen


@pytest.mark.parametrize("name", WALKS)
@pytest.mark.parametrize("fixture", ["two_ranks", "three_ranks"])
def test_updates_equal_those_of_a_simulation(fixture: str, name: str, request: pytest.FixtureRequest) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    sparsifier, exchange, exact = WALKS[name]
    n = ranks.world_size
    stream = [rows_of(step, n, exact) for step in range(STEPS)]
    traces = list(ls.simulate(stream, sparsifier=sparsifier, density=DENSITY, exchange=exchange))
    for rank, seen in enumerate(ranks(walk, name)):
        for trace, (update, counts, bytes_sent) in zip(traces, seen, strict=True):
            assert update == trace.update.tolist()
            assert counts == trace.counts.tolist()
            assert bytes_sent == float(trace.bytes_sent[rank])


def pass_around() -> list[Any]:
    """Tensors handed on in a ring, in one direction only, and to nobody."""
    comm = TorchCollective()
    rank, n = comm.rank, comm.world_size
    own = torch.arange(6).view(2, 3).T + 10 * rank  # not contiguous
    ring = comm.send_recv(own, (rank + 1) % n, (rank - 1) % n)
    down = comm.send_recv(own.float(), 0 if rank == n - 1 else None, n - 1 if rank == 0 else None)
    nothing = comm.send_recv(own, None, None)
    return [ring.tolist(), (str(down.dtype), down.tolist()) if down.numel() else None, nothing.numel()]


@pytest.mark.parametrize("fixture", ["two_ranks", "three_ranks"])
def test_what_a_rank_sends_on_arrives_at_the_next(fixture: str, request: pytest.FixtureRequest) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    n = ranks.world_size
    given = [[[10 * rank + column + 3 * row for row in range(2)] for column in range(3)] for rank in range(n)]
    for rank, (ring, down, nothing) in enumerate(ranks(pass_around)):
        assert ring == given[rank - 1]
        assert down == (("torch.float32", given[n - 1]) if rank == 0 else None)
        assert nothing == 0
