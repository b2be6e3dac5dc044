"""Source of gradients in DDP's communication hook; averages are returned in the buckets' own buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_sparse.engine.reducer import Reducer
from lightning_sparse.engine.sources.one_step_late import OneStepLate
from lightning_sparse.engine.sources.within_a_node import WithinANode
from lightning_sparse.ops import static_shapes

Entrance = Reducer | OneStepLate | WithinANode
"""Takes gradients from a source, and gives it averages."""
Spans = dict[tuple[int, ...], dict[str, slice]]
"""Places of gradients in a bucket, by the ids of its parameters; kept from step to step."""
Positions = dict[tuple[int, ...], Tensor]
"""First coordinates of gradients in a bucket as tensors on the device, kept from step to step."""


class BucketSource:
    """Passes gradients in DDP's buckets to a router and returns the averages.

    Args:
        router: of the engine, or what stands in front of it.
    """

    def __init__(self, router: Entrance) -> None:
        self._router = router
        self._pending: list[PendingBucket] = []
        self._positions: Positions = {}
        self._spans: Spans = {}
        self._averages: list[tuple[Future[Tensor], Tensor]] = []
        """Buckets that are averaged past the router."""

    def receive(self, bucket: Any) -> Future[Tensor]:
        """Pass on the gradients of a ``GradBucket``; the future holds its buffer with averages. This is DDP's hook."""
        router = self._router
        with router.failing_together("in backward"):
            router.begin_step()
            if router.direct:
                return self._pass_by(bucket)
            pending = PendingBucket(bucket, router.names, self._spans)
            self._pending.append(pending)
            gradients = [(name, pending.buffer[span]) for name, span in pending.spans.items()]
            if not bucket.is_last():
                router.arrive(gradients)
                return pending.future
            router.finish(gradients, self._mark)
            answered, self._pending = self._pending, []
            with router.on_stream():
                for each in answered:
                    each.future.set_result(each.buffer)
            return pending.future

    def _mark(self, skipped: Tensor, unused: Set[str]) -> None:
        for bucket in self._pending:
            bucket.fill_nan_(skipped, unused, self._positions)

    def _pass_by(self, bucket: Any) -> Future[Tensor]:
        """Average as DDP does; with a loss scale, the scaler looks whether averages are finite."""
        router = self._router
        assert isinstance(router, Reducer)  # what stands in front of it is never direct
        buffer = bucket.buffer()
        average = router.comm.start_average(buffer, wait=bucket.is_last())
        self._averages.append((average, buffer))
        if bucket.is_last():
            averages, self._averages = self._averages, []
            router.pass_by(averages)
        return average


class PendingBucket:
    """Bucket of DDP whose future is completed at the end of the step, with averages in its own buffer.

    Args:
        bucket: DDP's ``GradBucket``.
        names: parameter names by id.
        known: places in buckets; new ones are added.
    """

    def __init__(self, bucket: Any, names: Mapping[int, str], known: Spans) -> None:
        self.buffer: Tensor = bucket.buffer()
        self.future: Future[Tensor] = Future(devices=[self.buffer.device] if self.buffer.is_cuda else None)
        ids = tuple(map(id, bucket.parameters()))
        if ids not in known:
            known[ids] = dict(self._places(bucket, ids, names))
        self.spans = known[ids]
        """Places of the gradients by name; parameters without coordinates are left out."""

    def _places(self, bucket: Any, ids: Sequence[int], names: Mapping[int, str]) -> Iterator[tuple[str, slice]]:
        for one, view in zip(ids, bucket.gradients(), strict=True):
            if view.numel():
                start = view.storage_offset() - self.buffer.storage_offset()
                yield names[one], slice(start, start + view.numel())

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
