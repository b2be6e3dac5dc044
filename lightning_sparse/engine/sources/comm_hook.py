"""Source of gradients in DDP's communication hook; averages are returned in the buckets' own buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.reducer import Reducer
from lightning_sparse.ops import all_finite, static_shapes

Positions = dict[tuple[int, ...], Tensor]
"""First coordinates of gradients in a bucket as tensors on the device, kept from step to step."""


class BucketSource:
    """Passes gradients in DDP's buckets to a router and returns the averages.

    Args:
        router: router of the engine.
        names: parameter names by id.
        comm: the ranks.
    """

    def __init__(self, router: Reducer, names: Mapping[int, str], comm: TorchCollective) -> None:
        self._router, self._names = router, names
        self._bypass = DenseBypass(comm, names)
        self._pending: list[PendingBucket] = []
        self._positions: Positions = {}

    def receive(self, bucket: Any) -> Future[Tensor]:
        """Pass on the gradients of a ``GradBucket``; the future holds its buffer with averages. This is DDP's hook."""
        router = self._router
        with router.failing_together("in backward"):
            router.begin_step()
            if router.direct:
                return self._pass_by(bucket)
            pending = PendingBucket(bucket, self._names)
            self._pending.append(pending)
            if not bucket.is_last():
                router.arrive(pending.gradients())
                return pending.future
            router.finish(pending.gradients(), self._mark)
            answered, self._pending = self._pending, []
            with router.on_stream():
                for each in answered:
                    each.answer()
            return pending.future

    def _mark(self, skipped: Tensor, unused: Set[str]) -> None:
        for bucket in self._pending:
            bucket.fill_nan_(skipped, unused, self._positions)

    def _pass_by(self, bucket: Any) -> Future[Tensor]:
        """Average like DDP; with a loss scale, averages are checked for non-finite values."""
        average = self._bypass.average(bucket)
        if bucket.is_last():
            self._router.pass_by(*self._bypass.end_step(self._router.looks_at_averages))
        return average


class PendingBucket:
    """Bucket of DDP whose future is completed at the end of the step, with averages in its own buffer.

    Args:
        bucket: DDP's ``GradBucket``.
        names: parameter names by id.
    """

    def __init__(self, bucket: Any, names: Mapping[int, str]) -> None:
        self.buffer: Tensor = bucket.buffer()
        self.future: Future[Tensor] = Future(devices=[self.buffer.device] if self.buffer.is_cuda else None)
        self.spans: dict[str, slice] = {}
        """Spans of the gradients in the buffer, by name; parameters without coordinates are left out."""
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if view.numel():
                start = view.storage_offset() - self.buffer.storage_offset()
                self.spans[names[id(parameter)]] = slice(start, start + view.numel())

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and (numel,) views of the gradients."""
        return ((name, self.buffer[span]) for name, span in self.spans.items())

    def answer(self) -> None:
        """Complete the future: the buffer holds averages."""
        self.future.set_result(self.buffer)

    def fill_nan_(self, skipped: Tensor, unused: Set[str], positions: Positions) -> None:
        """Write NaN into the gradients of a skipped step, so that every gradient shows it.

        Args:
            skipped: () flag. If only the device knows it, one coordinate of each gradient becomes NaN.
            unused: parameters whose gradient is not of this step.
            positions: cache of first coordinates; new ones are added.
        """
        spans = [span for name, span in self.spans.items() if name not in unused]
        if not static_shapes(skipped.device):
            for span in spans if skipped else ():
                self.buffer[span].fill_(float("nan"))
        elif unused & self.spans.keys():  # they vary between steps: caching positions would synchronise with the device
            for span in spans:
                self.buffer[span.start : span.start + 1].masked_fill_(skipped, float("nan"))
        else:
            starts = tuple(span.start for span in spans)
            if starts not in positions:
                positions[starts] = torch.tensor(starts, device=self.buffer.device)
            firsts = positions[starts]
            self.buffer.index_copy_(0, firsts, self.buffer[firsts].masked_fill_(skipped, float("nan")))


class DenseBypass:
    """Averages buckets like DDP without a hook.

    Args:
        comm: the ranks.
        names: parameter names by id.
    """

    def __init__(self, comm: TorchCollective, names: Mapping[int, str]) -> None:
        self._comm = comm
        self._names = names
        self._averages: list[tuple[Future[Tensor], Tensor]] = []
        self._averaged: set[str] = set()

    def average(self, bucket: Any) -> Future[Tensor]:
        """Average a bucket in its own buffer."""
        buffer = bucket.buffer()
        future = self._comm.start_average(buffer, wait=bucket.is_last())
        self._averages.append((future, buffer))
        self._averaged |= {self._names[id(p)] for p in bucket.parameters() if p.numel()}
        return future

    def end_step(self, look: bool) -> tuple[Set[str], Tensor | None]:
        """End a step whose buckets have all been started.

        Args:
            look: wait for the averages and check whether they are finite.

        Returns:
            The names of their parameters, and a () flag that an average is not finite; None without ``look``.
        """
        averages, names = self._averages, self._averaged
        self._averages, self._averaged = [], set()
        if not look:
            return names, None
        finite = []
        for future, buffer in averages:
            future.wait()
            finite.append(all_finite(buffer))
        return names, ~torch.stack(finite).all()
