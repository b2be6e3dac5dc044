"""Source of gradients in DDP's communication hook; averages are returned in the buckets' own buffers."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine.reducer import Reducer


class BucketSource:
    """Passes gradients in DDP's buckets to a router and returns the averages.

    Args:
        router: of the engine.
    """

    def __init__(self, router: Reducer) -> None:
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
        buffer = bucket.buffer()
        average = router.comm.start_average(buffer, wait=bucket.is_last())
        self._pending.append((average, buffer))
        if bucket.is_last():
            averages, self._pending = self._pending, []
            router.pass_by(averages)
        return average


class AllRanksDivide:
    """Observer that refuses ``join()`` where averages would differ from DDP's, or ranks would wait for each other.

    DDP hides ``divide_by_initial_world_size=False`` from communication hooks. Ranks that have joined take no steps.

    Args:
        ddp: the model; kept as a weak reference.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)

    def before_step(self, engine: Any) -> None:
        """Raise in the first step in which averages would differ from DDP's, also on ranks that have joined."""
        if not getattr(self._ddp(), "_divide_by_initial_world_size", True):
            raise ValueError(
                "join(divide_by_initial_world_size=False) divides by the ranks that still have data, and the "
                "sparsified exchange by all ranks. Leave it at True."
            )
        joining = getattr(self._ddp(), "_join_config", None)
        if joining is not None and joining.enable and self._in_steps(engine):
            raise ValueError(
                "join() lets ranks end before others, and all ranks exchange together when optimizers step. Give all "
                "ranks equally many batches, or let DDP average by itself: density=1 without node_size."
            )

    @staticmethod
    def _in_steps(engine: Any) -> bool:
        """Whether gradients are exchanged when optimizers step; not where DDP averages them by itself."""
        return bool(engine._steppers) and not engine.router.steps_aside

    def close(self) -> None:
        """Do nothing."""


def register(ddp: DistributedDataParallel, engine: Any) -> None:
    """Make an engine the communication hook of a model; this cannot be undone.

    Raises:
        RuntimeError: if the model has a hook already.
    """
    try:
        ddp.register_comm_hook(engine, _hook)
    except RuntimeError as error:
        raise RuntimeError(
            "This DistributedDataParallel model has a communication hook already: of another attach(), of your own, or "
            f"of mixed_precision=... or an optimizer in backward. Wrap the model again, without it. ({error})"
        ) from error


# Without annotations: DDP compares them by identity, and here they would be strings.
def _hook(engine, bucket):  # type: ignore[no-untyped-def]
    return engine._receive(bucket)
