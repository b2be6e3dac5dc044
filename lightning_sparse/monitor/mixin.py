"""From the engine's statistics to the loggers, the progress bar and a table. Sole writer of the loggers."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.collective import ring_all_reduce_bytes
from lightning_sparse.console import print_table
from lightning_sparse.grouping import Rules
from lightning_sparse.hook import Engine

LONGEST_TABLE = 40
"""Groups that are listed one by one."""


class SparsityMonitorMixin:
    """Log what the sparsified exchange does, on the Trainer's logging steps.

    Logs ``sparse/<quantity>`` for every quantity of :data:`lightning_sparse.statistics.QUANTITIES`, averaged or
    combined over ranks, to all loggers of the Trainer; the density also on the progress bar. Numbers are those of the
    latest step. In Weights & Biases the quantities get the optimizer step as their own axis. At the start of fit, rank
    zero prints a table of the groups.

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
        """Print the table, give the quantities an axis in W&B."""
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
            print_plan(engine, trainer.strategy.rules)
        for logger in trainer.loggers:
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
    """Print the groups: sizes, picks, how they travel, MB that a dense ring would send per rank; then what stays dense.

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
    print_table(title, header, rows, left=(0, 5))
    if dense := [p for group in engine.plan if group.dense for p in group.parameters]:
        numel, all_numel = sum(p.numel for p in dense), sum(group.numel for group in engine.plan)
        share = f"{len(dense)} parameters, {numel:,} coordinates ({100 * numel / all_numel:.2g} %)"
        print(f"dense: {share}" + (f": {rules.reasons()}" if rules.reasons() else ""), flush=True)
