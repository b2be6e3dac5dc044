"""The end of a synchronised backward: gradients stay each rank's own, and ranks agree whether all are finite.

Where they are not, they are averaged densely, so that all ranks find what they would find with plain DDP. Code that
looks at gradients decides alike on all ranks, whoever made it: a ``GradScaler``, Lightning, ``if isfinite(norm)``. What
it mends is trained on. At a density of 1 DDP averages by itself, as without a hook.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine.step import Stepper

CAPTURED = (
    "A backward through DistributedDataParallel is captured in a CUDA graph. At its end ranks agree whether gradients "
    "are finite, which a graph does not repeat. Capture the model alone, before it is wrapped, as "
    "torch.cuda.make_graphed_callables does."
)


class BackwardEnd:
    """DDP's communication hook.

    Args:
        stepper: exchanges gradients when optimizers step.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._pending: list[tuple[Future[Tensor], Tensor]] = []
        """Buckets of this backward, and the futures that DDP waits for."""
        self._near: list[Future[Tensor]] = []
        """End when buckets are averaged over ranks near this one."""
        self._names: list[str] = []
        self._aside = False

    @property
    def unfinished(self) -> bool:
        """True if a backward has handed over some of DDP's buckets, and not the last one."""
        return bool(self._pending)

    def receive(self, bucket: Any) -> Future[Tensor]:
        """Take a ``GradBucket``; the future ends when its buffer holds what DDP is to put in ``.grad``."""
        stepper, buffer = self._stepper, bucket.buffer()
        with stepper.failing_together("in backward"):
            if stepper.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(CAPTURED)
            if not self._pending:
                self._names, self._aside = [], stepper.steps_aside
                stepper.begin_backward()
            self._names += [name for p in bucket.parameters() if (name := stepper.names.get(id(p))) is not None]
            last = bucket.is_last()
            if self._aside:
                future = stepper.comm.start_average(buffer, wait=last)
            else:
                future = Future(devices=[buffer.device] if buffer.is_cuda else None)
                self._arrive(bucket)
            self._pending.append((future, buffer))
            if last:
                buckets, self._pending = self._pending, []
                self._end(buckets)
        return future

    def _arrive(self, bucket: Any) -> None:
        """Act on gradients that DDP does not average."""
        self._near += filter(None, [self._stepper.share.average(bucket.buffer())])

    def _end(self, buckets: list[tuple[Future[Tensor], Tensor]]) -> None:
        near, self._near = self._near, []
        self._stepper.share.hosts.hear()
        self._stepper.share.within.end_averages(near)
        if self._aside:
            self._stepper.comm.end_averages([future for future, _ in buckets])
        buffers = [buffer for _, buffer in buckets]
        finite, _ = self._stepper.end_backward(self._names, buffers, self._aside)
        if self._aside:
            return
        if not finite:
            self._stepper.average_densely(buffers)
        for future, buffer in buckets:
            future.set_result(buffer)


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
        if joining is not None and joining.enable and not engine.stepper.steps_aside:
            raise ValueError(
                "join() lets ranks end before others, and all ranks exchange together when optimizers step. Give all "
                "ranks equally many batches, or let DDP average by itself: density=1 without node_size."
            )

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
