"""Source of gradients in DDP's communication hook; averages are returned in the buckets' own buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_sparse.engine.reducer import Reducer
from lightning_sparse.engine.sources.one_step_late import OneStepLate
from lightning_sparse.engine.sources.within_a_node import WithinANode

Entrance = Reducer | OneStepLate | WithinANode
"""Takes gradients from a source, and gives it averages."""


def entrance_of(router: Reducer) -> Entrance:
    """Return the router, or what stands in front of it."""
    if router.settings.delay:
        return OneStepLate(router)
    if router.parts is not None:
        return WithinANode(router, router.parts)
    return router


class BucketSource:
    """Passes gradients in DDP's buckets to a router and returns the averages.

    Args:
        router: of the engine, or what stands in front of it.
    """

    def __init__(self, router: Entrance) -> None:
        self._router = router
        self._pending: list[tuple[Future[Tensor], Tensor]] = []
        """Buckets of this step, and the futures that end when they hold averages."""
        self._spans: dict[tuple[int, ...], dict[str, slice]] = {}
        """Places of gradients in a bucket, by the ids of its parameters; kept from step to step."""

    def receive(self, bucket: Any) -> Future[Tensor]:
        """Pass on the gradients of a ``GradBucket``; the future holds its buffer with averages. This is DDP's hook."""
        router, buffer = self._router, bucket.buffer()
        with router.failing_together("in backward"):
            router.begin_step()
            if router.direct:
                return self._pass_by(bucket)
            future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
            self._pending.append((future, buffer))
            gradients = [(name, buffer[span]) for name, span in self._spans_in(bucket, buffer).items()]
            if not bucket.is_last():
                router.arrive(gradients)
                return future
            router.finish(gradients)
            answered, self._pending = self._pending, []
            with router.on_stream():
                for each, averages in answered:
                    each.set_result(averages)
            return future

    def _spans_in(self, bucket: Any, buffer: Tensor) -> dict[str, slice]:
        """Return the places of gradients by name; parameters without coordinates are left out."""
        ids = tuple(map(id, bucket.parameters()))
        if ids not in self._spans:
            places = [(view.storage_offset() - buffer.storage_offset(), view.numel()) for view in bucket.gradients()]
            named = zip(ids, places, strict=True)
            names = self._router.names
            self._spans[ids] = {names[one]: slice(start, start + numel) for one, (start, numel) in named if numel}
        return self._spans[ids]

    def _pass_by(self, bucket: Any) -> Future[Tensor]:
        """Average as DDP does; with a loss scale, the scaler looks whether averages are finite."""
        router = self._router
        assert isinstance(router, Reducer)  # what stands in front of it is never direct
        buffer = bucket.buffer()
        average = router.comm.start_average(buffer, wait=bucket.is_last())
        self._pending.append((average, buffer))
        if bucket.is_last():
            averages, self._pending = self._pending, []
            router.pass_by(averages)
        return average
