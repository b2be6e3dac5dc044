"""Summary lines of a run: one when it starts, one when it ends."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple

from lightning_sparse.core.console import amount, plain, say
from lightning_sparse.core.step import Agreement
from lightning_sparse.engine import Engine
from lightning_sparse.ops.c import native
from lightning_sparse.ops.c.library import INSTEAD

DIVERGED = (
    "Lower the learning rate, use bf16 instead of fp16, and look for the layer with Trainer(detect_anomaly=True) or "
    "torch.autograd.set_detect_anomaly(True)."
)
"""Advice for non-finite gradients."""
MORE = "callbacks=[lightning_sparse.SparsityMonitor()] shows more."


def at_start(engine: Engine) -> str:
    """Return the line on the sparsified parameters, the density and the memory that residuals take."""
    settings, n, plan = engine.settings, engine.comm.world_size, engine.groups
    within = engine._parts
    size = settings.node_size
    many = f"node{'s' * (n > 1)} of" if size else "replicas of"
    ranks = f"{n} rank{'s' * (n > 1)}" if within == 1 else f"{n * within} ranks ({n} {many} {within})"
    parts = "" if within == 1 else " (a part of all) on a rank"
    if size and within == 1:
        rehearse = f"To rehearse {settings.sparsifier!r} on it, set single_device='sparse'."
        return f"sparse_ddp: one node has no other one to send to, and trains densely, as plain DDP does. {rehearse}"
    if n == 1 and settings.single_device == "dense":
        rehearse = f"To rehearse {settings.sparsifier!r} on it, set single_device='sparse'."
        if within > 1:
            return f"sparse_ddp: one replica has nobody to send to, and trains densely, as FSDP does. {rehearse}"
        return f"sparse_ddp: one device has nobody to send to, and trains densely, as plain DDP does. {rehearse}"
    if not plan:
        return f"sparse_ddp: the model has no parameters to train, on {ranks}."
    sparse = [group.plan for group in engine.stepper.groups if group.sparsifier.agreement is not Agreement.EVERYTHING]
    numel, dense = sum(g.numel for g in sparse), sum(g.numel for g in plan if g.dense)
    if not sparse and not all(group.dense for group in plan):
        every = sum(group.numel for group in plan)
        return f"sparse_ddp: {settings.sparsifier!r} sends all of {every:,} parameters, on {ranks}."
    if not sparse:
        return f"sparse_ddp: all {dense:,} parameters stay dense ({settings.rules.reasons()}), on {ranks}."
    share = sum(group.picks(settings.density(engine.step)) for group in sparse) / numel
    stay = f"; {dense:,} others stay dense ({settings.rules.reasons()})" if dense else ""
    slow = engine.device.type == "cpu" and native.description.startswith(INSTEAD)
    kernels = f" The kernels on CPUs are those of {native.description}." if slow else ""
    return (
        f"sparse_ddp: {settings.sparsifier!r} selects {100 * share:.3g} % of {numel:,} parameters{parts}{stay}. "
        f"{settings.memory!r} keeps {amount(engine.memory_bytes)} on {'each of ' * (n * within > 1)}{ranks}.{kernels}"
    )


class Counted(NamedTuple):
    """Counts of a run up to a moment."""

    totals: Mapping[str, float]
    """:meth:`Totals.state_dict <lightning_sparse.engine.metrics.Totals.state_dict>`."""
    steps: int
    """Valid ones."""
    skipped: int

    @classmethod
    def of(cls, engine: Engine) -> Counted:
        """Return those of an engine; may be asked for when it is closed."""
        counts = engine.stepper.record.counts
        return cls(engine.stepper.totals.state_dict(), counts.step, counts.skipped)


def at_end(engine: Engine, before: Counted, now: Counted) -> str:
    """Return the line on the bytes that were sent, and the time that they cost; empty without a step in between."""
    steps, skipped = now.steps - before.steps, now.skipped - before.skipped
    taken = steps + skipped
    if not taken:
        return ""
    sent, dense, waited, seconds = (
        now.totals[name] - before.totals[name] for name in ("sent_bytes", "dense_bytes", "exposed_seconds", "seconds")
    )
    if engine.comm.world_size == 1:
        traffic = "nothing was sent by the only rank"
    elif not sent:
        traffic = "nothing was sent"
    elif (times := plain(dense / sent)) == "1":
        traffic = f"each rank sent {amount(sent)}, as much as dense DDP"
    else:
        traffic = f"each rank sent {amount(sent)}; dense DDP sends {amount(dense)}, {times} times as much"
    told = f"{skipped:,} steps were" if skipped > 1 else "1 step was"
    told = f"{told} skipped because of gradients that were not finite." if skipped else "No step was skipped."
    if not steps:
        told = f"Every step was skipped because of gradients that were not finite: nothing was learned. {DIVERGED}"
    since = f" after the first {before.steps:,}" if before.steps else ""
    anew = ""
    # A device may never answer if a run ends with an error.
    if engine.device.type == "cpu" and any(changes := engine._length_changes):
        anew = (
            f" Gradients changed their length: what waits was measured anew {changes.measured_anew:,} "
            f"time{'s' * (changes.measured_anew != 1)}, and "
            f"{changes.clipped:,} gradients of groups were clipped."
        )
    return (
        f"sparse_ddp: in {taken:,} step{'s' * (taken > 1)}{since} {traffic}. Training waited {waited:.3g} s of "
        f"{seconds:.3g} s for the exchange. {told}{anew}"
    )


class Announcer:
    """Logs the lines for engines without a Trainer; a :class:`~lightning_sparse.engine.StepObserver`."""

    def __init__(self) -> None:
        self._engine: weakref.ref[Engine] | None = None
        self._before = Counted({}, 0, 0)

    def before_step(self, engine: Engine) -> bool:
        """Log the first line in the first step, when the optimizer is known, which may decide the memory."""
        self._engine = weakref.ref(engine)
        if engine._rank == 0:
            say(at_start(engine))
        engine.stepper.totals.start()
        self._before = Counted.of(engine)
        return True

    def close(self) -> None:
        """Log the bytes that this rank sent."""
        engine = None if self._engine is None else self._engine()
        self._engine = None
        if engine is not None and engine._rank == 0 and (line := at_end(engine, self._before, Counted.of(engine))):
            say(line)
