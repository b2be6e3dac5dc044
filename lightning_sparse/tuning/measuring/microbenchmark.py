"""Measured cost of a group with given settings: the real pipeline between the real ranks, on synthetic gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.messages import Message
from lightning_sparse.core.step import Context
from lightning_sparse.engine.drivers import drive
from lightning_sparse.engine.metrics import Stamp
from lightning_sparse.engine.network import TorchCollective, send
from lightning_sparse.engine.pipeline import init_group, reduce_group
from lightning_sparse.methods.exchanges import Exchange
from lightning_sparse.methods.memory import Memory
from lightning_sparse.methods.sparsifiers import Sparsifier
from lightning_sparse.ops import static_shapes
from lightning_sparse.tuning.measuring.rank_sync import gathered, start_together
from lightning_sparse.tuning.performance.cost import Curve, Line
from lightning_sparse.tuning.performance.profile import GroupCost, Traffic

SMALLEST, LARGEST = 1 << 12, 1 << 24
WARMUP = 3


def sizes_up_to(numel: int) -> list[int]:
    """Return the sizes of groups to time in a model of ``numel`` coordinates: a small one, and some large ones.

    Example:
        >>> sizes_up_to(14_000_000)
        [4096, 218750, 875000, 3500000, 14000000]
    """
    most = max(2 * SMALLEST, min(numel, LARGEST))
    return sorted({SMALLEST, *(max(SMALLEST, most // part) for part in (64, 16, 4, 1))})


class Sent(NamedTuple):
    """One message."""

    operation: str
    nbytes: int
    begin: Stamp
    end: Stamp


class Recorder:
    """Sends messages, and records the kind, size and times of each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.messages: list[Sent] = []

    def send(self, message: Message, comm: TorchCollective) -> Tensor:
        """Send a message, with stamps before and after."""
        begin, nbytes = Stamp.now(self.device), message.x.nbytes
        answer = send(message, comm)
        self.messages.append(Sent(message.kind, nbytes, begin, Stamp.now(self.device)))
        return answer


class Sample(NamedTuple):
    """Seconds of one group step, and calls and bytes by operation."""

    select: float
    process: float
    transfer: float
    traffic: dict[str, tuple[int, float]]


def measure_group(
    comm: TorchCollective,
    device: torch.device,
    sizes: Sequence[int],
    *,
    sparsifier: Sparsifier,
    exchange: Exchange,
    memory: Memory,
    density: float,
    dtype: torch.dtype = torch.float32,
    repeats: int = 5,
    seconds: float = 0.5,
) -> GroupCost:
    """Time some steps of groups of several sizes: medians of computations, a line through the transfers.

    A step is that of the engine: from DDP's buckets into one vector, through the pipeline, and back. Ranks start each
    step together. Computation counts on the slowest rank. Of a transfer, the shortest time on any rank counts: the
    others also waited for each other. The gradients are heavy-tailed, and half of their variance is common to the
    ranks.

    Args:
        comm: the ranks; all of them must call this.
        device: of the gradients.
        sizes: coordinates, at least two different numbers.
        sparsifier: of the groups.
        exchange: of the groups.
        memory: error feedback.
        density: of the groups.
        dtype: of the gradients.
        repeats: most timed steps per size.
        seconds: about the time of a size; at least two steps are timed.
    """
    by_size: dict[int, list[Sample]] = {}
    for numel in sizes:
        state = init_group(
            numel, dtype, device, Context(0, density, comm.rank, comm.world_size), memory=memory, sparsifier=sparsifier
        )
        fresh = _gradients(numel, dtype, device, comm.rank)
        bucket = torch.empty_like(fresh)
        flat = torch.empty_like(fresh) if static_shapes(device) else bucket  # as groups do
        samples, step, wanted = [], 0, repeats
        while step < WARMUP + wanted:
            bucket.copy_(fresh.roll(step * (numel // 7 + 1)))
            recorder = Recorder(device)
            ctx = Context(step, density, comm.rank, comm.world_size, model_numel=numel)
            start_together(comm, device)
            begin = Stamp.now(device)
            flat.copy_(bucket)
            steps = reduce_group(flat, state, ctx, memory=memory, sparsifier=sparsifier, exchange=exchange)
            state, statistics = drive(steps, comm, recorder.send)
            bucket.copy_(flat)
            sample = _sample(begin, *statistics.stamps[:2], Stamp.now(device), recorder, comm)
            if step == WARMUP - 1:
                wanted = max(2, min(repeats, int(seconds / (sample.select + sample.process + sample.transfer))))
            if step >= WARMUP:
                samples.append(sample)
            step += 1
        by_size[numel] = samples
    amounts = tuple(sorted(by_size))
    return GroupCost(
        density,
        select=Curve(amounts, tuple(median(sample.select for sample in by_size[numel]) for numel in amounts)),
        process=Curve(amounts, tuple(median(sample.process for sample in by_size[numel]) for numel in amounts)),
        transfer=Line.through([(numel, one.transfer) for numel, samples in by_size.items() for one in samples]),
        traffic=_traffic(by_size),
    )


def _gradients(numel: int, dtype: torch.dtype, device: torch.device, rank: int) -> Tensor:
    def draw(seed: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed), device="cpu")

    return (draw(0) + draw(1 + rank)).pow(3).to(device, dtype)


def _sample(
    begin: Stamp, gathered_in: Stamp, selected: Stamp, end: Stamp, recorder: Recorder, comm: TorchCollective
) -> Sample:
    """Split the time of a step by four stamps: start, gradients in one vector, selection done, back in buckets."""
    messages = recorder.messages
    asked = sum(begin.until(message.begin) < begin.until(selected) for message in messages)
    durations = [message.begin.until(message.end) / 1e3 for message in messages]
    select = gathered_in.until(selected) / 1e3 - sum(durations[:asked])
    process = (begin.until(gathered_in) + selected.until(end)) / 1e3 - sum(durations[asked:])
    calls = Counter(message.operation for message in messages)
    nbytes = [sum(message.nbytes for message in messages if message.operation == name) for name in calls]
    ranks = gathered([max(0.0, select), max(0.0, process), *nbytes, *durations], comm, recorder.device)
    select, process, *largest = ranks[:, : 2 + len(calls)].amax(0).tolist()
    transfer = float(ranks[:, 2 + len(calls) :].amin(0).sum())
    return Sample(select, process, transfer, dict(zip(calls, zip(calls.values(), largest, strict=True), strict=True)))


def _traffic(by_size: dict[int, list[Sample]]) -> tuple[Traffic, ...]:
    parts = []
    for name in sorted({name for samples in by_size.values() for sample in samples for name in sample.traffic}):
        found = {numel: [one.traffic.get(name, (0, 0.0)) for one in samples] for numel, samples in by_size.items()}
        calls = fmean(calls for each in found.values() for calls, _ in each)
        points = [(numel, median(nbytes for _, nbytes in each)) for numel, each in found.items()]
        parts.append(Traffic(name, calls, Line.through(points)))
    return tuple(parts)
