"""Summary lines of a run: one when it starts, one when it ends."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from lightning_sparse.core.console import plain, say
from lightning_sparse.core.step import Agreement
from lightning_sparse.engine import Engine
from lightning_sparse.engine.metrics import MB
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
    settings, n = engine.settings, engine.comm.world_size
    if n == 1 and settings.single_device == "dense":
        return (
            "sparse_ddp: one device has nobody to send to, and trains densely, as plain DDP does. To rehearse "
            f"{settings.sparsifier!r} on it, set single_device='sparse'."
        )
    density = settings.density(engine.step)
    sparse = [group.plan for group in engine.groups if group.sparsifier.agreement is not Agreement.EVERYTHING]
    if not sparse and not all(group.dense for group in engine.plan):
        numel = sum(group.numel for group in engine.plan)
        return f"sparse_ddp: {settings.sparsifier!r} sends all of {numel:,} parameters, on {n} rank{'s' * (n > 1)}."
    numel, dense = sum(g.numel for g in sparse), sum(g.numel for g in engine.plan if g.dense)
    ranks = f"{n} ranks" if n > 1 else "1 rank"
    if not engine.plan:
        return f"sparse_ddp: the model has no parameters to train, on {ranks}."
    if not sparse:
        return f"sparse_ddp: all {dense:,} parameters stay dense ({settings.rules.reasons()}), on {ranks}."
    share = sum(group.picks(density) for group in sparse) / numel
    kept = amount(engine.memory_bytes)
    stay = f"; {dense:,} others stay dense ({settings.rules.reasons()})" if dense else ""
    slow = engine.device.type == "cpu" and native.description.startswith(INSTEAD)
    kernels = f" The kernels on CPUs are those of {native.description}." if slow else ""
    return (
        f"sparse_ddp: {settings.sparsifier!r} selects {100 * share:.3g} % of {numel:,} parameters{stay}. "
        f"{settings.memory!r} keeps {kept} on {'each of ' if n > 1 else ''}{ranks}.{kernels}"
    )


def at_end(engine: Engine, totals: Mapping[str, float], steps: int, skipped: int, before: int) -> str:
    """Return the line on the bytes that were sent, and the time that they cost.

    Args:
        engine: of these steps.
        totals: :meth:`Totals.state_dict <lightning_sparse.core.clock.Totals.state_dict>` of these steps.
        steps: number of valid steps.
        skipped: number of skipped steps.
        before: number of valid steps before these, in an earlier fit or up to a checkpoint.
    """
    sent, dense = totals["sent_bytes"], totals["dense_bytes"]
    if engine.comm.world_size == 1:
        traffic = "nothing was sent by the only rank"
    elif not sent:
        traffic = "nothing was sent"
    elif (times := plain(dense / sent)) == "1":
        traffic = f"each rank sent {amount(sent)}, as much as dense DDP"
    else:
        traffic = f"each rank sent {amount(sent)}; dense DDP sends {amount(dense)}, {times} times as much"
    waited = f"Backward waited {totals['exposed_seconds']:.3g} s of {totals['seconds']:.3g} s for the exchange."
    void = f"{skipped:,} step{'s' if skipped > 1 else ''}" if skipped else "No step"
    were = f"{void} {'were' if skipped > 1 else 'was'} skipped because of gradients that were not finite."
    if not steps:
        were = f"Every step was skipped because of gradients that were not finite: nothing was learned. {DIVERGED}"
    since = f" after the first {before:,}" if before else ""
    all_steps = steps + skipped
    anew = ""
    # A device may never answer if a run ends with an error.
    if engine.device.type == "cpu" and any(changes := engine.length_changes):
        anew = (
            f" Gradients changed their length: what waits was measured anew {changes.measured_anew:,} times, and "
            f"{changes.clipped:,} gradients of groups were clipped."
        )
    return f"sparse_ddp: in {all_steps:,} step{'s' * (all_steps > 1)}{since} {traffic}. {waited} {were}{anew}"


def amount(nbytes: float) -> str:
    """Return bytes in words.

    Example:
        >>> amount(1.5e6), amount(2.25e12)
        ('1.5 MB', '2,250 GB')
        >>> amount(999.7e6), amount(36.0)
        ('1 GB', '36 bytes')
    """
    mb = nbytes / MB
    if nbytes < 100:
        return f"{nbytes:.0f} bytes"
    return f"{mb:.3g} MB" if mb < 999.5 else f"{plain(mb / 1000)} GB"


class Announcer:
    """Logs the lines for engines without a Trainer; a :class:`~lightning_sparse.engine.StepObserver`."""

    def __init__(self) -> None:
        self._engine: weakref.ref[Engine] | None = None
        self._before = {"sent_bytes": 0.0}
        self._steps = self._skipped = 0

    def before_step(self, engine: Engine) -> None:
        """Log the first line in the first step, when the optimizer is known, which may decide the memory."""
        if self._engine is not None:
            return
        self._engine = weakref.ref(engine)
        if engine.comm.rank == 0:
            say(at_start(engine))
        engine.totals.start()
        self._before = engine.totals.state_dict()
        self._steps, self._skipped = engine.step, engine.void_steps

    def close(self) -> None:
        """Log the bytes that this rank sent."""
        engine = None if self._engine is None else self._engine()
        self._engine = None
        if engine is None or engine.comm.rank != 0:
            return
        known = engine.known_counts
        steps, skipped = known.step - self._steps, known.void - self._skipped
        if steps + skipped:
            now = engine.totals.state_dict()
            say(at_end(engine, {name: now[name] - self._before[name] for name in now}, steps, skipped, self._steps))
