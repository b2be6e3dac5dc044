"""Callback that logs the norm of residuals and the ages of their coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.engine import Engine
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.metrics import Statistics
from lightning_sparse.integrations.callback import Callback
from lightning_sparse.integrations.loggers import log_figure


class ResidualAudit(Callback):
    """Log the ages of coordinates in residuals, and the share that was never sent.

    Logs ``sparse/residual/<quantity>``, as in ``docs/reference/metrics.md``, on the Trainer's logging steps, and at the
    end of fit the distribution of ages: a histogram in Weights & Biases and TensorBoard, JSON in the folders of others.
    Only sparsified groups count, and a coordinate counts as sent if it is in the update, selected by any rank.

    The callback keeps 4 bytes for each coordinate, and writes to those of the update in every step. It waits for the
    device on logging steps only. It counts from the start of fit, or of a resumed one.

    Example:
        >>> import lightning_sparse as ls
        >>> from pytorch_lightning import Trainer
        >>> trainer = Trainer(strategy="sparse_ddp", devices=2, accelerator="cpu", logger=False,
        ...                   callbacks=[ls.ResidualAudit()], enable_model_summary=False)
    """

    def __init__(self) -> None:
        self._ages = Ages()
        self._seen: dict[int, Statistics] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Reset the audit; warn if there are no residuals."""
        self._ages, engine = Ages(), self._engine_of(trainer)
        self._seen = {} if engine is None else _latest(engine)
        if engine is None:
            self._warn_that_nothing_is_sparse(trainer, "log")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Record the update; log on logging steps."""
        engine = self._engine_of(trainer)
        if engine is None or engine.stepper.direct:
            return
        latest = _latest(engine)
        if latest.keys() <= self._seen.keys():  # no exchange since the last batch
            return
        self._seen = latest
        self._ages.note(engine)
        if self._is_logging_step(trainer):
            self._log_numbers(pl_module, {**self._ages.quantities(), "norm": _norm(engine)}, "residual/")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the distribution of ages."""
        counts = self._ages.counts() if trainer.is_global_zero else None
        self._ages, self._seen = Ages(), {}  # which hold groups and their statistics
        if counts is None or not counts.sum():
            return
        data = {"ages": list(range(len(counts))), "coordinates": counts.tolist()}
        shares = counts / counts.sum()
        drawn = torch.multinomial(shares, 10_000, replacement=True, generator=torch.Generator().manual_seed(0)).double()
        for logger in trainer.loggers:
            log_figure(logger, "residual/age", data, lambda: draw(counts), trainer.global_step, drawn)


def _latest(engine: Engine) -> dict[int, Statistics]:
    """Return the latest statistics of each group by identity, new ones in every exchange; waits for no device."""
    return {id(group.statistics): group.statistics for group in engine.stepper.groups if group.statistics is not None}


def _norm(engine: Engine) -> float:
    norm = sum(group.residual_norm() ** 2 for group in engine.stepper.groups) ** 0.5
    return float(engine._mean_over_ranks(torch.tensor([norm], dtype=torch.float64, device="cpu")))


class Ages:
    """The step in which each coordinate of sparsified groups was last sent; moves with parameters to other groups."""

    def __init__(self) -> None:
        self._steps = 0
        self._last: dict[GroupReducer, Tensor] = {}

    def note(self, engine: Engine) -> None:
        """Record a step. Skipped ones do not count on a CPU; on devices they do, to avoid a host synchronisation."""
        groups = [group for group in engine.stepper.groups if not group.plan.dense]
        if list(self._last) != groups:
            self._last = _carried(self._last, groups)
        if engine.device.type == "cpu" and engine.stepper.record.latest_skipped:
            return
        self._steps += 1
        for group in groups:
            if not group.ran or group.statistics is None:
                continue
            if group.statistics.indices is None:
                self._last[group].fill_(self._steps)
            else:
                self._last[group].index_fill_(0, group.statistics.indices, self._steps)

    def counts(self) -> Tensor | None:
        """Return (steps,) numbers of coordinates by age, int64 on the CPU, without never sent ones; None before a step.

        It waits for the device.
        """
        return self._by_age()[:-1] if self._steps else None

    def _by_age(self) -> Tensor:
        """Return (steps + 1,) numbers of coordinates by age; the last one is of those that were never sent."""
        total = torch.zeros(self._steps + 1, dtype=torch.int64, device="cpu")
        for last in self._last.values():
            total += torch.bincount(self._steps - last[:-1], minlength=self._steps + 1).cpu()
        return total

    def quantities(self) -> dict[str, float]:
        """Return the quantities that are logged by name, except the norm."""
        if not self._steps:
            return {}
        by_age = self._by_age()
        ages, never = by_age[:-1], int(by_age[-1])
        sent = int(ages.sum())
        found = {"never_sent": never / max(1, sent + never)}
        if sent:
            reached = ages.cumsum(0)
            weights = torch.arange(len(ages), dtype=torch.float64, device="cpu")
            found["age_mean"] = float((weights * ages).sum() / sent)
            found["age_median"] = float((reached < 0.5 * sent).sum())
            found["age_p99"] = float((reached < 0.99 * sent).sum())
        return found


def _carried(before: Mapping[GroupReducer, Tensor], groups: Sequence[GroupReducer]) -> dict[GroupReducer, Tensor]:
    """Move the steps of parameters to other groups; each group has a spare slot."""
    known = {name: last[span] for group, last in before.items() for name, span in group.spans.items()}
    found = {}
    for group in groups:
        last = torch.zeros(group.plan.numel + 1, dtype=torch.int32, device=group.device)
        for name, span in group.spans.items():
            if name in known:
                last[span] = known[name]
        found[group] = last
    return found


def draw(counts: Tensor) -> Any:
    """Draw coordinates by age, as a staircase; both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.stairs(counts.numpy(), [age + 0.5 for age in range(len(counts) + 1)], color="#0072B2", fill=True)
    axes.set(xscale="log", yscale="log", xlabel="steps since last sent, plus 1", ylabel="coordinates")
    return figure
