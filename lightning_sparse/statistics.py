"""Every logged quantity, defined once.

:func:`measure` notes what a group step did, without waiting for a device; :func:`summarize` turns the notes of all
groups into the logged numbers, on the steps that log. A new quantity is added here and nowhere else: whoever logs,
logs all that :func:`summarize` returns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.collective import ring_all_reduce_bytes
from lightning_sparse.density import count
from lightning_sparse.types import Agreement, Context, Selection, Update

QUANTITIES: Mapping[str, str] = {
    "density": "coordinates in the update / coordinates: |union| / numel",
    "target_density": "what the density should be: the schedule's value at this step",
    "density_error": "| |union| - k | / numel",
    "padding_ratio": "f(t) = n max_i k_i / sum_i k_i; 1 when all ranks pick equally many",
    "build_up": "|union| / k; 1 without gradient build-up, up to n for independent picks",
    "threshold": "magnitude that decided, mean over groups that have one; unit of the accumulated gradient",
    "residual_norm": "mean over ranks of the Euclidean norm of the residual; the papers' global error",
    "bytes_sent": "bytes that a rank sends in a step under ring collectives, mean over ranks, dense groups included",
    "traffic_ratio": "bytes of a dense ring all-reduce in the gradients' dtype / bytes_sent",
    "select_ms": "milliseconds from the gradient to the selection, a survey among ranks included; mean over ranks",
    "exchange_ms": "milliseconds from the selection to the new gradient; mean over ranks",
    "exposed_ms": "milliseconds that backward stood still for it, slowing down beside it not counted; mean over ranks",
    "void_steps": "steps so far that counted for nothing, because a gradient was not finite on some rank",
    "direct": "1 where gradients are averaged as DDP does, because fallback='dense' found that faster; else 0",
}
"""Logged names (under ``sparse/``) and what they mean; all but bytes and times over the sparsified groups only."""


class Stamp(NamedTuple):
    """A point in time, on the host's clock or in a device's stream."""

    host: float
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> Stamp:
        """This moment; on CUDA, the moment the current stream gets here."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return cls(time.perf_counter(), None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return cls(time.perf_counter(), event)

    def until(self, later: Stamp) -> float:
        """Milliseconds between two stamps of one device; waits for the device."""
        if self.event is None or later.event is None:
            return 1e3 * (later.host - self.host)
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event))


class Statistics(NamedTuple):
    """What one group step did, on this rank. Tensors stay on the device until someone logs."""

    numel: int
    target: int
    """k, see :func:`~lightning_sparse.density.count`."""
    target_density: float
    sparse: bool
    """False for groups that are kept dense."""
    counts: Tensor
    """(n,) picks per rank."""
    indices: Tensor | None
    """(u,) coordinates of the update, as in :class:`~lightning_sparse.types.Update`."""
    union: Tensor
    """() coordinates in the update."""
    threshold: Tensor | None
    bytes_sent: float
    dense_bytes: float
    """What a dense ring all-reduce would have sent."""
    stamps: tuple[Stamp, Stamp, Stamp]
    """Start, end of the selection, end."""


def measure(
    grad: Tensor,
    numel: int,
    agreement: Agreement,
    selection: Selection,
    update: Update,
    ctx: Context,
    bytes_sent: float,
    stamps: tuple[Stamp, Stamp, Stamp],
) -> Statistics:
    """Note what a group step did."""
    return Statistics(
        numel=numel,
        target=count(ctx.density, numel),
        target_density=ctx.density,
        sparse=agreement is not Agreement.EVERYTHING,
        counts=update.counts,
        indices=update.indices,
        union=update.union,
        threshold=selection.threshold,
        bytes_sent=bytes_sent,
        dense_bytes=ring_all_reduce_bytes(numel * grad.element_size(), ctx.world_size),
        stamps=stamps,
    )


def padding_ratio(counts: Tensor) -> float:
    """``f(t) = n max_i k_i / sum_i k_i`` of (n,) picks per rank; 1 when nobody picked anything.

    Example:
        >>> padding_ratio(torch.tensor([30, 10]))
        1.5
    """
    total = float(counts.sum())
    return len(counts) * float(counts.max()) / total if total else 1.0


def residual_norm(residual: Tensor | None) -> float:
    """Euclidean norm of a residual, summed in float64; 0 where nothing is remembered. Waits for the device."""
    return 0.0 if residual is None else float(torch.linalg.vector_norm(residual, dtype=torch.float64))


def summarize(
    statistics: Sequence[Statistics],
    residual_norms: Sequence[float],
    exposed_ms: float,
    mean_over_ranks: Callable[[Tensor], Tensor],
    void_steps: int = 0,
) -> dict[str, float]:
    """The logged quantities of a step, over all groups and ranks.

    Args:
        statistics: of each group.
        residual_norms: Euclidean norm of each group's residual on this rank.
        exposed_ms: milliseconds that this rank's backward waited.
        mean_over_ranks: averages a float64 vector; called once.
        void_steps: so far.

    Returns:
        Names of :data:`QUANTITIES` to numbers; equal on all ranks. ``threshold`` is missing where no group has one.
    """
    chosen = [s for s in statistics if s.sparse] or list(statistics)
    numel, target = sum(s.numel for s in chosen), sum(s.target for s in chosen)
    union = sum(int(s.union) for s in chosen)
    counts = [s.counts for s in chosen]
    longest, picks = sum(int(c.max()) for c in counts), sum(int(c.sum()) for c in counts)
    thresholds = [float(s.threshold) for s in chosen if s.threshold is not None]
    bytes_sent = sum(s.bytes_sent for s in statistics)
    dense_bytes = sum(s.dense_bytes for s in statistics)
    local = [
        math.hypot(*residual_norms),
        bytes_sent,
        sum(s.stamps[0].until(s.stamps[1]) for s in statistics),
        sum(s.stamps[1].until(s.stamps[2]) for s in statistics),
        exposed_ms,
    ]
    mean_norm, bytes_sent, select_ms, exchange_ms, exposed_ms = mean_over_ranks(
        torch.tensor(local, dtype=torch.float64, device="cpu")
    ).tolist()
    summary = {
        "density": union / numel,
        "target_density": sum(s.numel * s.target_density for s in chosen) / numel,
        "density_error": abs(union - target) / numel,
        "padding_ratio": len(counts[0]) * longest / picks if picks else 1.0,
        "build_up": union / target,
        "residual_norm": mean_norm,
        "bytes_sent": bytes_sent,
        "traffic_ratio": dense_bytes / bytes_sent if bytes_sent else 1.0,
        "select_ms": select_ms,
        "exchange_ms": exchange_ms,
        "exposed_ms": exposed_ms,
        "void_steps": float(void_steps),
        "direct": 0.0,
    }
    if thresholds:
        summary["threshold"] = sum(thresholds) / len(thresholds)
    return summary


def summarize_direct(
    dense_bytes: float,
    residual_norms: Sequence[float],
    mean_over_ranks: Callable[[Tensor], Tensor],
    void_steps: int = 0,
) -> dict[str, float]:
    """The logged quantities of a step in which DDP averaged everything by itself; nobody looked at the clock.

    Args:
        dense_bytes: what a dense ring all-reduce sends.
        residual_norms: Euclidean norm of each group's residual on this rank.
        mean_over_ranks: averages a float64 vector; called once.
        void_steps: so far, but for those of such steps, which nobody looks at.
    """
    norm = torch.tensor([math.hypot(*residual_norms)], dtype=torch.float64, device="cpu")
    return {
        "density": 1.0,
        "target_density": 1.0,
        "density_error": 0.0,
        "residual_norm": float(mean_over_ranks(norm)),
        "bytes_sent": dense_bytes,
        "traffic_ratio": 1.0,
        "void_steps": float(void_steps),
        "direct": 1.0,
    }
