"""Profiler of a training run: times backward over some steps, then the network and the cost of groups."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

from lightning_sparse.engine import Engine
from lightning_sparse.methods.grouping import ParameterSize, bucket_numels
from lightning_sparse.methods.grouping.groupings import MIB
from lightning_sparse.tuning.performance.backward import BackwardTimer
from lightning_sparse.tuning.performance.microbenchmark import measure_group, sizes_up_to
from lightning_sparse.tuning.performance.network import Network, measure_network
from lightning_sparse.tuning.performance.profile import GroupCost, LayerTime, Overlap, Profile


class Profiler:
    """Times an engine's backward for some steps and then measures, within one step, the rest of a profile.

    Call :meth:`before_step` at the start of every exchange. When it returns True, call :meth:`measure_step`, then
    :meth:`group_cost` for all settings to compare, and :meth:`profile`. All of it is collective.

    Args:
        ddp: the wrapped model; its forward is called before each backward.
        engine: in training.
        warmup: steps that are not timed.
        steps: steps that are timed; medians count.
    """

    def __init__(self, ddp: Any, engine: Engine, warmup: int, steps: int) -> None:
        self.warmup, self.steps = warmup, steps
        self._engine, self._bucket_numels = engine, delivered_numels(ddp, engine)
        self.seen = 0
        """Steps so far."""
        self._timer = BackwardTimer(ddp, engine.parameters, engine.device, lambda: engine.router.held_up_seconds)
        self._dtype = next(iter(engine.parameters.values())).dtype
        self._layers: list[LayerTime] = []
        self._rest = 0.0
        self.network: Network
        self.overlap: Overlap

    def before_step(self) -> bool:
        """Count a step; return True when enough have been timed."""
        if self.seen > self.warmup:
            self._timer.keep()
        self.seen += 1
        return self.seen > self.warmup + self.steps

    def measure_step(self, overlap: Overlap | None = None) -> None:
        """Evaluate the steps and time the network.

        Args:
            overlap: with backward; None: by :func:`overlap_of`.

        Raises:
            RuntimeError: on all ranks, if a rank has seen fewer than two backward passes.
        """
        self.close()
        engine = self._engine
        self._layers, self._rest = self._timer.result(engine.comm)
        self.overlap = overlap or overlap_of(engine)
        most = sum(p.nbytes for p in engine.parameters.values())
        self.network = measure_network(engine.comm, engine.device, self._dtype, most, busy=self.overlap == "comm")

    def group_cost(self, numel: int, **settings: Any) -> GroupCost:
        """Measure the cost of groups of up to ``numel`` coordinates.

        Args:
            numel: coordinates of the largest group.
            settings: of :func:`~lightning_sparse.tuning.performance.microbenchmark.measure_group`.
        """
        engine = self._engine
        cost = measure_group(engine.comm, engine.device, sizes_up_to(numel), dtype=self._dtype, **settings)
        # Messages of idle ranks are faster than those of ranks with busy processors.
        return cost.on(self.network) if self.overlap == "comm" else cost

    def profile(self, costs: Sequence[GroupCost], fingerprint: str = "") -> Profile:
        """Return all measurements; equal on all ranks.

        Args:
            costs: of groups, at one density or more.
            fingerprint: of the model, the settings and the ranks.
        """
        own = Profile(fingerprint, self._layers, self._rest, self.network, costs, self.overlap, self._bucket_numels)
        return self._engine.comm.broadcast_object(own, 0, self._engine.device)

    def close(self) -> None:
        """Stop timing backward."""
        self._timer.close()


def delivery_mb(ddp: Any) -> tuple[float, float]:
    """Return the MiB of DDP's first bucket of gradients, and of the others."""
    size = ddp.bucket_bytes_cap / MIB
    # DDP shortens the first bucket only if no size was given.
    return (1.0 if ddp.bucket_bytes_cap_default else size), size


def delivered_numels(ddp: Any, engine: Engine) -> tuple[float, float]:
    """Return the coordinates of DDP's first bucket of gradients, and of the others."""
    first, others = delivery_mb(ddp)
    return bucket_numels([ParameterSize.of(name, p) for name, p in engine.parameters.items()], others, first)


def overlap_of(engine: Engine) -> Overlap:
    """Return the overlap with backward of an engine on this machine; collective.

    On a CUDA stream everything overlaps. A communication thread hides its transfers always, and selection only if the
    ranks of this machine leave a processor free.
    """
    if not engine.router.overlaps_backward:
        return "none"
    if engine.device.type == "cuda":
        return "full"
    neighbours = engine.comm.all_gather_object(platform.node(), engine.device).count(platform.node())
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return "full" if processors >= neighbours * (torch.get_num_threads() + 1) else "comm"
