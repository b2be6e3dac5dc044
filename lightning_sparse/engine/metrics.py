"""Measurements of a step: time stamps, totals, statistics, and every logged quantity.

:func:`measure` records the statistics of a group step, without waiting for a device; :func:`summarize` turns those of a
step into the logged numbers, on the steps that log. Each quantity is defined by one function. A new one is one more
function here, decorated by :func:`quantity`: the Trainer, Fabric and :func:`~lightning_sparse.simulate` give all of
:data:`QUANTITIES`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import is_number
from lightning_sparse.core.messages import ring_all_reduce_bytes
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.methods.density import count
from lightning_sparse.ops.length import LengthChanges

MB = 1e6
"""Bytes."""
_HOST = attrgetter("host")


@cache
def _cuda_is_there() -> bool:
    """Asking torch takes as long as recording an event."""
    return torch.cuda.is_available()


class Stamp(NamedTuple):
    """A point in time, on the host's clock or in a device's stream."""

    host: float
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> Stamp:
        """Return a stamp of now; on CUDA, of the moment at which the current stream arrives here."""
        if device.type != "cuda" or not _cuda_is_there():
            return cls(time.perf_counter(), None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))  # which need not be the current device
        return cls(time.perf_counter(), event)

    def until(self, later: Stamp) -> float:
        """Return the milliseconds between two stamps of one device; waits for the device."""
        if self.event is None or later.event is None:
            return 1e3 * (later.host - self.host)
        for event in (self.event, later.event):  # they may lie in different streams
            event.synchronize()
        return float(self.event.elapsed_time(later.event))

    @property
    def reached(self) -> bool:
        """True if the device has reached the stamp; does not wait."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class Totals:
    """Bytes that this rank has sent in all steps so far, logged or not, and the time that they took."""

    NAMES = ("sent_bytes", "dense_bytes", "seconds", "exposed_seconds")
    """Of what checkpoints hold."""

    def __init__(self) -> None:
        self.sent_bytes = self.dense_bytes = 0.0
        self._exposed = self._seconds = 0.0
        self._since: float | None = None
        self._paused = False
        self._measuring: list[tuple[Stamp, Stamp]] = []

    def add(self, sent_bytes: float, dense_bytes: float) -> None:
        """Count the bytes that were sent, and those that a dense ring all-reduce would have sent."""
        self.sent_bytes += sent_bytes
        self.dense_bytes += dense_bytes

    def expose(self, begin: Stamp, end: Stamp) -> None:
        """Count the time between two stamps as blocked backward; read later, without a host synchronisation."""
        self._measuring.append((begin, end))
        while self._measuring and self._measuring[0][0].reached and self._measuring[0][1].reached:
            self._exposed += max(0.0, Stamp.until(*self._measuring.pop(0))) / 1e3

    @property
    def exposed_seconds(self) -> float:
        """Seconds that backward was blocked; waits for the device."""
        return self._exposed + sum(max(0.0, begin.until(end)) for begin, end in self._measuring) / 1e3

    @property
    def seconds(self) -> float:
        """Wall clock between :meth:`start` and :meth:`pause`."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        """Start the clock."""
        self._since = self._since or time.perf_counter()

    def pause(self) -> None:
        """Stop the clock until :meth:`go_on`."""
        self._paused = self._since is not None
        self._seconds, self._since = self.seconds, None

    def go_on(self) -> None:
        """Start the clock again if it ran when it was paused."""
        if self._paused:
            self.start()

    def state_dict(self) -> dict[str, float]:
        """Return the totals as plain numbers, for a checkpoint."""
        return {name: getattr(self, name) for name in self.NAMES}

    @classmethod
    def fits(cls, state: Any) -> bool:
        """Return True for what :meth:`state_dict` gives."""
        named = isinstance(state, dict) and state.keys() == {*cls.NAMES}
        return named and all(is_number(one) and 0 <= one < math.inf for one in state.values())

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from the totals of a checkpoint."""
        self.sent_bytes, self.dense_bytes = state["sent_bytes"], state["dense_bytes"]
        self._seconds, self._exposed, self._measuring = state["seconds"], state["exposed_seconds"], []
        self._since = None if self._since is None else time.perf_counter()


class Statistics(NamedTuple):
    """Statistics of one group step on this rank. Tensors stay on the device until they are logged."""

    numel: int
    target: int
    """k, see :func:`~lightning_sparse.methods.density.count`."""
    target_density: float
    sparse: bool
    """False for groups that are kept dense."""
    counts: Tensor
    """(n,) number of selected indices per rank."""
    indices: Tensor | None
    """(u,) coordinates of the update, as in :class:`~lightning_sparse.core.step.Update`."""
    union: Tensor
    """() coordinates in the update."""
    threshold: Tensor | None
    bytes_sent: float
    dense_bytes: float
    """Bytes that a dense ring all-reduce would have sent."""
    stamps: tuple[Stamp, Stamp, Stamp]
    """Start, end of the selection, end."""
    pause: tuple[Stamp, Stamp] | None = None
    """Begin and end of the time in which the group waited for others, with which its messages travelled."""


def dense_statistics(numel: int, nbytes: float) -> Statistics:
    """Return the statistics of a step in which DDP averaged everything by itself; no clock was read.

    Args:
        numel: coordinates of the model.
        nbytes: of a dense ring all-reduce.
    """
    every, never = torch.tensor([numel], device="cpu"), (Stamp(0.0, None),) * 3
    return Statistics(numel, numel, 1.0, False, every, None, every[0], None, nbytes, nbytes, never)


def measure(
    dtype: torch.dtype,
    numel: int,
    agreement: Agreement,
    selection: Selection,
    update: Update,
    ctx: Context,
    bytes_sent: float,
    stamps: tuple[Stamp, Stamp, Stamp],
) -> Statistics:
    """Return the statistics of a group step."""
    sparse = agreement is not Agreement.EVERYTHING
    return Statistics(
        numel=numel,
        target=count(ctx.density, numel) if sparse else numel,
        target_density=ctx.density if sparse else 1.0,
        sparse=sparse,
        counts=update.counts,
        indices=update.indices,
        union=update.union,
        threshold=selection.threshold,
        bytes_sent=bytes_sent,
        dense_bytes=ring_all_reduce_bytes(numel * dtype.itemsize, ctx.world_size),
        stamps=stamps,
    )


@dataclass(frozen=True, eq=False)
class Step:
    """Statistics of all groups of a step on this rank, or of one of them."""

    groups: Sequence[Statistics]
    residual_norms: Sequence[float]
    """Euclidean norm of each group's residual on this rank."""
    exposed_ms: float | None = None
    """Milliseconds that this rank's backward was blocked; None: unknown, as for a single group."""
    skipped_steps: int | None = None
    """So far; None for a single group."""
    direct: bool = False
    """True if DDP averaged everything by itself."""
    shared_bytes: float = 0.0
    """Bytes of messages that belong to no single group."""
    totals: Totals | None = None
    """Of all steps so far; None for a single group, and if they are not counted."""
    warnings: int | None = None
    """Of the watchdog, so far; None for a single group."""
    length_changes: LengthChanges | None = None
    """On this rank, so far; None if no memory follows the length of gradients."""
    grad_norm: Tensor | None = None
    """() norm of the mean gradient, where something was clipped by it."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Quantities that were averaged over ranks, for those that derive from them."""

    @cached_property
    def sparse(self) -> list[Statistics]:
        """The sparsified groups; all groups if none is sparsified."""
        return [group for group in self.groups if group.sparse] or list(self.groups)

    @cached_property
    def numel(self) -> int:
        """Coordinates of the sparsified groups."""
        return sum(group.numel for group in self.sparse)

    @cached_property
    def k(self) -> int:
        """Coordinates that their updates should have."""
        return sum(group.target for group in self.sparse)

    @cached_property
    def union(self) -> int:
        """Coordinates that their updates have. Waits for the device."""
        return sum(int(group.union) for group in self.sparse)

    @cached_property
    def milliseconds(self) -> tuple[float, float] | tuple[None, None]:
        """Milliseconds of selections and of exchanges; work of groups together, after their pauses, counts once.

        None if no clock was read. Waits for the device.
        """
        if self.direct:
            return None, None
        select = exchange = 0.0
        together: dict[Stamp, list[Statistics]] = {}
        for group in self.groups:
            begin, selected, end = group.stamps
            if group.pause is None:
                select, exchange = select + begin.until(selected), exchange + selected.until(end)
                continue
            paused, resumed = group.pause
            local = min(selected, paused, key=_HOST)  # a selection with messages ends after the pause
            select, exchange = select + begin.until(local), exchange + local.until(paused)
            together.setdefault(resumed, []).append(group)
        for resumed, groups in together.items():
            selected = max(resumed, *(group.stamps[1] for group in groups), key=_HOST)
            end = max((group.stamps[2] for group in groups), key=_HOST)
            select, exchange = select + resumed.until(selected), exchange + selected.until(end)
        return select, exchange


class Quantity(NamedTuple):
    """A logged number; a row of the table in ``docs/metrics.md``."""

    unit: str
    meaning: str
    good: str
    """The best value."""
    averaged: bool
    """True if each rank has its own value and the mean is logged; other quantities are equal on all ranks."""
    over_run: str
    """Summary of a run, in the words of W&B's ``define_metric``: "last", "mean", "max", or several with commas."""
    compute: Callable[[Step], float | None]
    """Computes the number of a step, or None: then nothing is logged."""


QUANTITIES: dict[str, Quantity] = {}
"""Logged quantities by name, under ``sparse/``; all but traffic and times over the sparsified groups only."""

TOTALS = ("traffic/total_mb", "traffic/dense_total_mb", "time/total_s")
"""Quantities that add up over steps: also logged at validations, as axes for validation results."""
Compute = Callable[[Step], float | None]


def quantity(
    good: str = "", *, part: str = "", unit: str = "", averaged: bool = False, over_run: str = "mean"
) -> Callable[[Compute], Compute]:
    """Log the number that the decorated function computes from a :class:`Step`; its docstring is the meaning.

    Args:
        good: the best value.
        part: of the logs, before the name: ``traffic`` makes ``traffic/<name>``.
        unit: of the number.
        averaged: log the mean over ranks. Needed where ranks have values of their own.
        over_run: summary of a run, see :attr:`Quantity.over_run`.
    """

    def register(compute: Compute) -> Compute:
        meaning = " ".join((compute.__doc__ or "").split()).rstrip(".")
        name = f"{part}/{compute.__name__}" if part else compute.__name__
        QUANTITIES[name] = Quantity(unit, meaning, good, averaged, over_run, compute)
        return compute

    return register


@quantity("the target")
def density(step: Step) -> float:
    """Coordinates in the update / coordinates: `|union| / numel`."""
    return step.union / step.numel


@quantity()
def target_density(step: Step) -> float:
    """Density that the schedule asks for at this step."""
    return sum(group.numel * group.target_density for group in step.sparse) / step.numel


@quantity("0", over_run="mean,max")
def density_error(step: Step) -> float:
    """`| |union| - k | / numel`."""
    return abs(step.union - step.k) / step.numel


@quantity(unit="gradient", over_run="mean,max")
def grad_norm(step: Step) -> float | None:
    """Norm of the mean gradient before it was clipped, in steps that clip by it."""
    return None if step.grad_norm is None else float(step.grad_norm)


@quantity("1", over_run="mean,max")
def padding_ratio(step: Step) -> float:
    """`f(t) = n max_i k_i / sum_i k_i`; 1 if all ranks select equally many."""
    counts = [group.counts for group in step.sparse]
    longest, picks = sum(int(one.max()) for one in counts), sum(int(one.sum()) for one in counts)
    return len(counts[0]) * longest / picks if picks else 1.0


@quantity("1", over_run="mean,max")
def build_up(step: Step) -> float:
    """`|union| / k`; up to n for independent selections, such as Top-k's."""
    return step.union / step.k


@quantity(unit="gradient", over_run="last")
def threshold(step: Step) -> float | None:
    """Threshold of selection, in units of the accumulated gradient; mean over the groups that have one."""
    found = [float(group.threshold) for group in step.sparse if group.threshold is not None]
    return sum(found) / len(found) if found else None


@quantity("steady", unit="gradient", averaged=True, over_run="last,max")
def residual_norm(step: Step) -> float:
    """Euclidean norm of the residual, mean over ranks; the papers' global error."""
    return math.hypot(*step.residual_norms)


@quantity("steady", over_run="last")
def threshold_over_residual(step: Step) -> float | None:
    """`threshold / residual_norm`: both move together if the threshold follows the residual."""
    decided, norm = threshold(step), step.means["residual_norm"]
    return decided / norm if decided is not None and norm else None


@quantity(part="traffic", unit="MB", averaged=True)
def sent_mb(step: Step) -> float:
    """MB that a rank sends in a step under ring collectives, mean over ranks; dense groups included."""
    return (sum(group.bytes_sent for group in step.groups) + step.shared_bytes) / MB


@quantity(part="traffic", unit="MB", averaged=True, over_run="last")
def total_mb(step: Step) -> float | None:
    """MB that a rank has sent so far, before a checkpoint and in earlier fits, too; mean over ranks; with flushes."""
    return None if step.totals is None else step.totals.sent_bytes / MB


@quantity(part="traffic", unit="MB", over_run="last")
def dense_total_mb(step: Step) -> float | None:
    """MB that dense ring all-reduces in the gradients' dtype would have sent in these steps."""
    return None if step.totals is None else step.totals.dense_bytes / MB


@quantity("large", part="traffic")
def ratio(step: Step) -> float:
    """Bytes of a dense ring all-reduce / bytes sent, in this step; 1 if nothing is sent."""
    sent = MB * step.means["traffic/sent_mb"]
    return sum(group.dense_bytes for group in step.groups) / sent if sent else 1.0


@quantity(part="time", unit="ms", averaged=True)
def select_ms(step: Step) -> float | None:
    """From the gradient to the selection, with messages of the selection; mean over ranks."""
    return step.milliseconds[0]


@quantity(part="time", unit="ms", averaged=True)
def exchange_ms(step: Step) -> float | None:
    """From the selection to the new gradient, once for groups that travel together; mean over ranks."""
    return step.milliseconds[1]


@quantity("0", part="time", unit="ms", averaged=True, over_run="mean,max")
def exposed_ms(step: Step) -> float | None:
    """Time that training waits for the exchange, not its slow-down by overlap; mean over ranks."""
    return step.exposed_ms


@quantity(part="time", unit="s", averaged=True, over_run="last")
def total_s(step: Step) -> float | None:
    """Wall clock of training so far, as in `total_mb` with earlier fits; without validation; mean over ranks."""
    return None if step.totals is None else step.totals.seconds


@quantity("0 and up", part="steps", unit="steps", over_run="last")
def skipped(step: Step) -> float | None:
    """Steps so far that all ranks skipped, because a gradient was not finite on some rank."""
    return step.skipped_steps


@quantity("0 or 1", part="steps")
def direct(step: Step) -> float:
    """1 if DDP averages gradients itself, at density 1 or as `fallback=True` found that faster; no times then."""
    return float(step.direct)


@quantity(part="lengths", averaged=True, over_run="last")
def clipped(step: Step) -> float | None:
    """Gradients of groups so far that were clipped to twice their usual length; with Adam; mean over ranks."""
    return None if step.length_changes is None else step.length_changes.clipped


@quantity(part="lengths", averaged=True, over_run="last")
def measured_anew(step: Step) -> float | None:
    """Times so far that a group's residual was rescaled to a new length; with Adam; mean over ranks."""
    return None if step.length_changes is None else step.length_changes.measured_anew


@quantity("0", part="steps", over_run="last")
def warnings(step: Step) -> float | None:
    """Warnings of the watchdog so far."""
    return step.warnings


def local(step: Step) -> dict[str, float]:
    """Return this rank's values of the quantities that are averaged over ranks and that the step has."""
    values = {name: one.compute(step) for name, one in QUANTITIES.items() if one.averaged}
    return {name: value for name, value in values.items() if value is not None}


def summarize(step: Step, mean_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Return the logged quantities of a step, equal on all ranks.

    Args:
        step: on this rank.
        mean_over_ranks: averages a float64 vector; called once.

    Returns:
        Names of :data:`QUANTITIES` to numbers; without those that the step does not have.
    """
    own = local(step)
    means = mean_over_ranks(torch.tensor(list(own.values()), dtype=torch.float64, device="cpu")).tolist()
    step = replace(step, means=dict(zip(own, means, strict=True)))
    found = {name: step.means.get(name) if one.averaged else one.compute(step) for name, one in QUANTITIES.items()}
    return {name: value for name, value in found.items() if value is not None}


def totals_of(totals: Totals) -> dict[str, float]:
    """Return the quantities of :data:`TOTALS`, on this rank."""
    step = Step([], [], totals=totals)
    found = {name: QUANTITIES[name].compute(step) for name in TOTALS}
    return {name: value for name, value in found.items() if value is not None}


def norm_of(residual: Tensor | None) -> float:
    """Return the Euclidean norm of a residual, summed in float64; 0 without a residual. Waits for the device."""
    return 0.0 if residual is None else float(torch.linalg.vector_norm(residual, dtype=torch.float64))
