"""Callbacks for the Trainers of both Lightning packages: log what the exchange does, and flush residuals at the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.collective import ring_all_reduce_bytes
from lightning_sparse.console import Table
from lightning_sparse.flush import engines_of, flush
from lightning_sparse.plan import Rules
from lightning_sparse.reducer import Engine

LONGEST_TABLE = 40
"""Groups that are listed one by one."""


class SparsityMonitorMixin:
    """Log what the sparsified exchange does, on the Trainer's logging steps.

    Logs ``sparse/<quantity>`` for every quantity of :data:`lightning_sparse.metrics.QUANTITIES`, averaged or
    combined over ranks, to all loggers of the Trainer; the density also on the progress bar. Numbers are those of the
    latest step. In Weights & Biases the quantities get the optimizer step as their own axis. At the start of fit, rank
    zero prints a table of the groups, and loggers get the strategy's settings as the hyper-parameter ``sparse_ddp``.

    With a strategy that does not sparsify, the monitor warns once and does nothing.

    Args:
        groups: also log every group, as ``sparse/group/<name>/<quantity>``.
        table: print the table of groups at the start.

    Example:
        >>> import lightning_sparse as ls
        >>> from pytorch_lightning import Trainer
        >>> trainer = Trainer(strategy="sparse_ddp", devices=1, accelerator="cpu", logger=False,
        ...                   callbacks=[ls.SparsityMonitor(groups=True)], enable_model_summary=False)
    """

    def __init__(self, groups: bool = False, table: bool = True) -> None:
        self.groups = groups
        self.table = table
        self._logged_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Print the table, log the settings, give the quantities an axis in W&B."""
        engine = _engine(trainer)
        if engine is None:
            strategy = type(trainer.strategy).__name__
            rank_zero_warn(
                f"SparsityMonitor has nothing to log: the strategy {strategy} does not sparsify. "
                "Use strategy='sparse_ddp' or remove the callback."
            )
            return
        self._logged_step = engine.step
        if not trainer.is_global_zero:
            return
        if self.table:
            print_plan(engine, engine.settings.rules)
        for logger in trainer.loggers:
            logger.log_hyperparams({"sparse_ddp": trainer.strategy.config.as_dict()})
            define = getattr(logger.experiment, "define_metric", None)
            if define is not None:
                define("trainer/global_step")
                define("sparse/*", step_metric="trainer/global_step")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log, if this is a step that logs and gradients were exchanged since the last time."""
        engine = _engine(trainer)
        # In this order: asking for the step may wait for a device.
        if engine is None or not _is_logging_step(trainer) or engine.step == self._logged_step:
            return
        self._logged_step = engine.step
        for name, value in engine.summary().items():
            pl_module.log(f"sparse/{name}", value, on_step=True, on_epoch=False, prog_bar=name == "density")
        if self.groups:
            for group, summary in engine.group_summaries().items():
                for name, value in summary.items():
                    pl_module.log(f"sparse/group/{group}/{name}", value, on_step=True, on_epoch=False)


def _engine(trainer: Any) -> Engine | None:
    return getattr(trainer.strategy, "engine", None)


def _is_logging_step(trainer: Any) -> bool:
    """Exactly Lightning's own decision, which has no public name."""
    return bool(trainer._logger_connector.should_update_logs) and not trainer.fit_loop._should_accumulate()


def print_plan(engine: Engine, rules: Rules) -> None:
    """Print the groups: sizes, selected, how they travel, MB of a dense ring; then memory, and what stays dense.

    Plain text where rich is missing.

    Args:
        engine: whose groups.
        rules: by which some of them are dense.
    """
    settings, n = engine.settings, engine.comm.world_size
    density = settings.density(engine.step)
    title = f"sparse_ddp: {settings.sparsifier}, {settings.density}, {settings.memory}, " + (
        f"{n} ranks" if n > 1 else "1 rank: nothing is sent"
    )
    header = ["group", "parameters", "coordinates", "density now", "k now", "exchange", "dense MB"]
    rows = []
    for group in engine.plan[:LONGEST_TABLE]:
        size = group.parameters[0].element_size
        rows.append(
            [
                group.name,
                str(len(group.parameters)),
                f"{group.numel:,}",
                "" if group.dense else f"{group.density or density:.3g}",
                f"{group.picks(density):,}",
                "dense" if group.dense else type(settings.exchange).__name__,
                f"{ring_all_reduce_bytes(group.numel * size, n) / 1e6:.3g}",
            ]
        )
    if rest := engine.plan[LONGEST_TABLE:]:
        rows.append([f"{len(rest)} more", "", f"{sum(g.numel for g in rest):,}", "", "", "", ""])
    Table(title, header, rows, left=(0, 5)).show()
    if numel := sum(group.numel for group in engine.plan if not group.dense):
        kept = engine.memory_bytes
        print(f"error feedback: {kept / 1e6:.3g} MB on each rank, {kept / numel:.2g} bytes a coordinate", flush=True)
    if dense := [p for group in engine.plan if group.dense for p in group.parameters]:
        numel, all_numel = sum(p.numel for p in dense), sum(group.numel for group in engine.plan)
        share = f"{len(dense)} parameters, {numel:,} coordinates ({100 * numel / all_numel:.2g} %)"
        print(f"dense: {share}" + (f": {rules.reasons()}" if rules.reasons() else ""), flush=True)


class FlushResidualMixin:
    """Take one dense step with what was not sent yet, at the end of training; see :func:`~lightning_sparse.flush`.

    In the last epoch that ``max_epochs`` or ``max_steps`` allows, the flush follows the last batch: validation and all
    checkpoints of the end see its result. Where training is stopped otherwise, by ``EarlyStopping`` or a time limit, it
    follows at the end of that epoch: after validation, and before the checkpoints that ``ModelCheckpoint`` writes then;
    or in ``on_train_end``, where that was decided later. A checkpoint that was written before a flush does not contain
    it: the residuals lie beside it, and nothing is lost to a run that is resumed from it. After an exception, nothing
    is flushed.

    The step uses the learning rates of the latest step: schedulers that end at 0 have moved on by then. It is no step
    of the Trainer's: ``global_step`` does not count it, and nothing is clipped.

    Args:
        every_n_epochs: also flush after the last batch of every so many epochs, at least 1; None: only at the end.

    Raises:
        ValueError: for other numbers.

    Example:
        >>> import lightning_sparse as ls
        >>> from pytorch_lightning import Trainer
        >>> trainer = Trainer(strategy="sparse_ddp", devices=1, accelerator="cpu", logger=False, max_epochs=3,
        ...                   callbacks=[ls.FlushResidual()], enable_model_summary=False)
    """

    def __init__(self, every_n_epochs: int | None = None) -> None:
        if every_n_epochs is not None and not (isinstance(every_n_epochs, int) and every_n_epochs >= 1):
            raise ValueError(
                f"Expected every_n_epochs to be an integer from 1 on, or None, but got {every_n_epochs!r}."
            )
        self.every_n_epochs = every_n_epochs
        self._rates: dict[int, list[Any]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Say so if there is nothing to flush."""
        self._rates = {}
        if not engines_of(trainer.strategy):
            rank_zero_warn(
                f"FlushResidual has nothing to do: the strategy {type(trainer.strategy).__name__} does not sparsify. "
                "Use strategy='sparse_ddp' or remove the callback."
            )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note the learning rates of this step."""
        self._rates[id(optimizer)] = [copy.deepcopy(group["lr"]) for group in optimizer.param_groups]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Flush after the last batch, before validation."""
        steps_are_over = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if steps_are_over or (trainer.is_last_batch and self._ends_with_this_epoch(trainer)):
            self._flush(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Flush where training is stopped, before checkpoints are written."""
        if trainer.should_stop:
            self._flush(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Flush what is left."""
        self._flush(trainer)

    def _ends_with_this_epoch(self, trainer: Any) -> bool:
        epochs = trainer.current_epoch + 1
        at_the_end = trainer.max_epochs not in (None, -1) and epochs >= trainer.max_epochs
        return at_the_end or (self.every_n_epochs is not None and epochs % self.every_n_epochs == 0)

    def _flush(self, trainer: Any) -> None:
        if engines_of(trainer.strategy):
            with self._latest_rates(trainer.optimizers):
                flush(trainer)

    @contextmanager
    def _latest_rates(self, optimizers: list[Any]) -> Iterator[None]:
        groups = [
            (group, rate)
            for optimizer in optimizers
            for group, rate in zip(optimizer.param_groups, self._rates.get(id(optimizer), ()), strict=False)
        ]
        now = [group["lr"] for group, _ in groups]
        for group, rate in groups:
            group["lr"] = rate
        try:
            yield
        finally:
            for (group, _), rate in zip(groups, now, strict=True):
                group["lr"] = rate
