"""n ranks in one process, on the code that trains: how to study a method without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.density import DensitySchedule, as_schedule, count
from lightning_sparse.exchanges import Exchange, as_exchange
from lightning_sparse.memory import Memory, as_memory
from lightning_sparse.pipeline import init_group, reduce_group
from lightning_sparse.sparsifiers import SPARSIFIERS, Sparsifier
from lightning_sparse.statistics import Statistics, padding_ratio, residual_norm
from lightning_sparse.types import Context, GroupState


class StepTrace(NamedTuple):
    """What one simulated step did."""

    step: int
    target_density: float
    counts: Tensor
    """(n,) int64 picks per rank."""
    indices: Tensor
    """(u,) int64 coordinates of the update, ascending, without padding."""
    threshold: Tensor | None
    """(n,) float64 magnitude that decided on each rank, or None."""
    update: Tensor
    """(numel,) mean over ranks of what was released."""
    residual_norm: Tensor
    """(n,) float64 Euclidean norms of the residuals after the step."""
    density: float
    """u / numel."""
    density_error: float
    """|u - k| / numel."""
    padding_ratio: float
    """n max_i k_i / sum_i k_i."""
    build_up: float
    """u / k."""
    bytes_sent: Tensor
    """(n,) float64 bytes each rank sends, see :class:`~lightning_sparse.collective.Metered`."""
    partition: Tensor | None
    """(n, 2) int64 first and past-the-end coordinate of each rank's range, for methods with contiguous ranges."""


def simulate(
    gradients: Iterable[Tensor],
    *,
    sparsifier: Sparsifier | str,
    density: float | DensitySchedule,
    memory: Memory | None = None,
    exchange: Exchange | str | None = None,
) -> Iterator[StepTrace]:
    """Run a sparsifier over a stream of gradients, every rank a thread of this process.

    The ranks run the same code as in training; only the network is replaced. Gradients are asked for one step at a time
    and traces come one by one, so that a stream may be larger than memory, or be computed at parameters that the
    previous trace has moved. All n and all group sizes work, n = 1 included.

    Args:
        gradients: one (n, numel) tensor per step, all of one shape, float dtype and device; a (steps, n, numel) tensor
            is one such iterable. They are not modified.
        sparsifier: an instance or a name such as ``"topk"``.
        density: target in (0, 1], or a schedule.
        memory: error feedback; None: :class:`~lightning_sparse.Residual`.
        exchange: an instance, a name, or None for the sparsifier's natural one.

    Yields:
        One :class:`StepTrace` per step.

    Raises:
        ValueError: at the call, for an unknown name, a density outside (0, 1] or an exchange that does not accept the
            sparsifier; while iterating, for gradients of a wrong shape.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(20, 4, 1000, generator=torch.Generator().manual_seed(0))
        >>> for trace in ls.simulate(stream, sparsifier="topk", density=0.01):
        ...     pass
        >>> trace.step, trace.counts.tolist(), round(trace.build_up, 1)
        (19, [10, 10, 10, 10], 4.0)
    """
    sparsifier = SPARSIFIERS.resolve(sparsifier)
    exchange = as_exchange(exchange, sparsifier)
    return _run(iter(gradients), sparsifier, as_schedule(density), as_memory(memory), exchange)


def _run(
    gradients: Iterator[Tensor], sparsifier: Sparsifier, schedule: DensitySchedule, memory: Memory, exchange: Exchange
) -> Iterator[StepTrace]:
    ranks: list[_Rank] = []
    density = schedule.for_group()
    pool = None
    try:
        for step, rows in enumerate(gradients):
            if not ranks:
                n = _check_rows(rows, None)[0]
                meeting = _Meeting(n)
                shape = rows.shape
                ctx = Context(step=0, density=schedule(0), rank=0, world_size=n)
                ranks = [
                    _Rank(
                        _ThreadCollective(rank, n, meeting),
                        init_group(shape[1], rows.dtype, rows.device, ctx, memory=memory, sparsifier=sparsifier),
                    )
                    for rank in range(n)
                ]
                pool = ThreadPoolExecutor(n, thread_name_prefix="simulated-rank")
            assert pool is not None
            _check_rows(rows, shape)
            ctx = Context(step=step, density=density(step), rank=0, world_size=n)
            parts = {"memory": memory, "sparsifier": sparsifier, "exchange": exchange}
            jobs = [pool.submit(rank.work, rows[rank.comm.rank], ctx, parts) for rank in ranks]
            statistics = _outcome(jobs)
            density.observe(step, ranks[0].update)
            yield _trace(ctx, ranks, statistics, memory, sparsifier)
    finally:
        if pool is not None:
            pool.shutdown()


def _check_rows(rows: Tensor, shape: torch.Size | None) -> torch.Size:
    if not isinstance(rows, Tensor) or rows.dim() != 2 or 0 in rows.shape or not rows.is_floating_point():
        came = f"{tuple(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"Expected gradients of each step as one (n, numel) floating-point tensor, but got {came}.")
    if shape is not None and rows.shape != shape:
        raise ValueError(
            f"Expected gradients of shape {tuple(shape)} as in the first step, but got {tuple(rows.shape)}."
        )
    return rows.shape


def _trace(
    ctx: Context, ranks: Sequence[_Rank], statistics: Sequence[Statistics], memory: Memory, sparsifier: Sparsifier
) -> StepTrace:
    update, first = ranks[0].update, statistics[0]
    numel = update.numel()
    indices = torch.arange(numel, device="cpu") if first.indices is None else torch.unique(first.indices.cpu())
    indices = indices[indices < numel]
    thresholds = [s.threshold for s in statistics if s.threshold is not None]
    norms = [residual_norm(memory.residual(rank.state.memory)) for rank in ranks]
    size, k = indices.numel(), count(ctx.density, numel)
    return StepTrace(
        step=ctx.step,
        target_density=ctx.density,
        counts=first.counts.cpu(),
        indices=indices,
        threshold=torch.stack(thresholds).cpu() if thresholds else None,
        update=update,
        residual_norm=torch.tensor(norms, dtype=torch.float64, device="cpu"),
        density=size / numel,
        density_error=abs(size - k) / numel,
        padding_ratio=padding_ratio(first.counts),
        build_up=size / k,
        bytes_sent=torch.tensor([s.bytes_sent for s in statistics], dtype=torch.float64, device="cpu"),
        partition=sparsifier.ranges(numel, ranks[0].state.selector, ctx),
    )


class _Rank:
    """One simulated rank: its network and what it remembers."""

    def __init__(self, comm: _ThreadCollective, state: GroupState) -> None:
        self.comm = comm
        self.state = state
        self.update = torch.empty(0, device="cpu")

    def work(self, row: Tensor, ctx: Context, parts: dict[str, Any]) -> Statistics:
        """One step; a rank that fails frees those that wait for it."""
        grad = torch.cat([row.detach(), row.new_zeros(1)])
        try:
            with self.comm.meeting.baton:
                self.state, statistics = reduce_group(
                    grad, self.state, ctx._replace(rank=self.comm.rank), **parts, comm=self.comm
                )
        except BaseException:
            self.comm.meeting.barrier.abort()
            raise
        self.update = grad[:-1]
        return statistics


class _Meeting:
    """Where the threads of one simulation meet."""

    def __init__(self, n: int) -> None:
        self.barrier = threading.Barrier(n, self._combine)
        self.baton = threading.Lock()
        """Held by the one rank that computes: together they would fight for the interpreter, five times as slowly."""
        self.brought: list[Tensor] = [torch.empty(0, device="cpu")] * n
        self.combine: Callable[[list[Tensor]], Tensor] = torch.stack
        self.result = torch.empty(0, device="cpu")

    def _combine(self) -> None:
        """Run by the last to arrive, before anyone goes on and may change what was brought."""
        result = self.combine(self.brought)
        self.result = result.clone() if any(result is x for x in self.brought) else result


class _ThreadCollective:
    """A collective between threads. Sums are formed once, in rank order."""

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world_size = world_size
        self.meeting = meeting

    def all_gather(self, x: Tensor) -> Tensor:
        return self._meet(x, lambda rows: torch.stack(rows))

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._meet(x, lambda rows: sum(rows[1:], start=rows[0]))

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return self._meet(x, lambda rows: rows[src])

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._meet(x, lambda rows: torch.stack(rows))[:, self.rank].clone()

    def send_on(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        given = self._meet(x, lambda rows: torch.stack(rows))
        return None if source is None else given[source].clone()

    def _meet(self, x: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        meeting = self.meeting
        meeting.brought[self.rank], meeting.combine = x, combine
        meeting.baton.release()
        try:
            meeting.barrier.wait()
        finally:
            meeting.baton.acquire()
        # The next result is formed when everyone is back, and has therefore taken this one.
        return meeting.result.clone()


def _outcome(jobs: Sequence[Future[Statistics]]) -> list[Statistics]:
    """Results of all ranks, or the error that stopped them rather than those it caused."""
    errors = [error for job in jobs if (error := job.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [job.result() for job in jobs]
