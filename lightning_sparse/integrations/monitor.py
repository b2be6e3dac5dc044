"""Callback that logs quantities of the exchange, and a table of its groups, for the Trainers of all packages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_sparse.core.checks import check_flag, check_integer
from lightning_sparse.core.console import Table
from lightning_sparse.core.messages import ring_all_reduce_bytes
from lightning_sparse.core.names import named_parameters
from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.metrics import MB, summarize, totals_of
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.integrations.averages import BuildUp, DensityError, PaddingRatio, Traffic
from lightning_sparse.integrations.callback import Callback, trained_parameters
from lightning_sparse.integrations.loggers import define_axes, log_settings, log_table
from lightning_sparse.integrations.shadow import Shadow
from lightning_sparse.methods.density import as_schedule
from lightning_sparse.methods.sparsifiers import SPARSIFIERS, Sparsifier

LONGEST = 40
"""Groups that are printed one by one."""


class SparsityMonitor(Callback):
    """Log quantities of the sparsified exchange, on the Trainer's logging steps.

    Logs ``sparse/<quantity>`` for every quantity of :data:`lightning_sparse.engine.metrics.QUANTITIES`, averaged or
    combined over ranks, to all loggers of the Trainer; the density also on the progress bar. Numbers are those of the
    latest step, totals those of all steps. They are in the same rows as values that ``training_step`` logs, and totals
    in those of validation, too, so that a loss can be drawn against megabytes or seconds. In Weights & Biases the
    quantities get the optimizer step as their own axis. At the start of fit, rank zero prints a table of the groups,
    which loggers get, too. Other steps cost nothing.

    With ``shadow``, sparsifiers run on copies of the gradients of any strategy, such as ``strategy="ddp"``: the
    coordinates and bytes that they would send are logged as ``sparse/shadow/<name>/<quantity>``, see
    ``docs/reference/metrics.md``. The gradients of the training stay the same, bit for bit.
    Without it and with a strategy that does not sparsify, the monitor warns once and does nothing.

    Args:
        groups: also log every group, as ``sparse/group/<name>/<quantity>``.
        table: print the table of groups at the start.
        shadow: sparsifiers to run on copies, names or instances.
        shadow_every: steps from one of their steps to the next, at least 1; each costs the local work and the messages
            of all of them. Their residuals have the gradients of these steps only.
        shadow_density: theirs, in (0, 1] or a schedule; groups and rules are those of the strategy, if it sparsifies.

    Raises:
        ValueError: for an unknown sparsifier, a number outside its range, or a flag that is not True or False.

    Example:
        >>> import lightning_sparse as ls
        >>> from pytorch_lightning import Trainer
        >>> trainer = Trainer(strategy="sparse_ddp", devices=2, accelerator="cpu", logger=False,
        ...                   callbacks=[ls.SparsityMonitor(groups=True)], enable_model_summary=False)
        >>> dense = Trainer(strategy="ddp", devices=1, accelerator="cpu", logger=False,
        ...                 callbacks=[ls.SparsityMonitor(shadow=["top_k", "exdyna"])], enable_model_summary=False)
    """

    def __init__(
        self,
        groups: bool = False,
        table: bool = True,
        shadow: Sequence[Sparsifier | str] | Sparsifier | str = (),
        shadow_every: int = 10,
        shadow_density: Any = 0.01,
    ) -> None:
        self.shadow_every = check_integer(shadow_every, "shadow_every")
        for name, given in (("groups", groups), ("table", table)):
            check_flag(given, name)
        self.groups, self.table = bool(groups), bool(table)
        named = shadow if isinstance(shadow, Iterable) and not isinstance(shadow, str) else [shadow]
        self.shadow = [SPARSIFIERS.resolve(one) for one in named]
        self.shadow_density = as_schedule(shadow_density, "shadow_density")
        self.metrics = {"density_error": DensityError(), "padding_ratio": PaddingRatio(), "build_up": BuildUp()}
        """Means over the logged steps of this fit: ``monitor.metrics["padding_ratio"].compute()``, or ``.plot()``."""
        self.traffic = Traffic()
        """Traffic of a rank up to the latest logged step, as ``traffic/total_mb``."""
        self._logged_step = 0
        self._plan: list[Any] = []
        self._shadow: Shadow | None = None
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Print the table, set the axes in W&B, set up the shadow."""
        engine = self._engine_of(trainer)
        self._start_shadow(trainer)
        for metric in (*self.metrics.values(), self.traffic):
            metric.reset()
        for logger in trainer.loggers if trainer.is_global_zero else ():
            define_axes(logger)
        if engine is None:
            if not self.shadow:
                also = ", let sparsifiers look on with SparsityMonitor(shadow=['top_k']),"
                self._warn_that_nothing_is_sparse(trainer, "log", also)
            return
        self._logged_step, self._plan = engine.step, []
        if self.table and trainer.is_global_zero:
            plan_table(engine, LONGEST).show()
        self.log_plan(trainer, engine)

    def log_plan(self, trainer: Any, engine: Engine) -> None:
        """Log the table of groups, if it has changed."""
        if self._plan == engine.groups:
            return
        self._plan = engine.groups
        for logger in trainer.loggers if trainer.is_global_zero else ():
            log_table(logger, "plan", plan_table(engine), trainer.global_step)

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Start to copy gradients for the shadow, if it runs in this step."""
        if self._shadow is not None and self._steps % self.shadow_every == 0:
            self._shadow.gradients.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log on logging steps, if gradients were exchanged since the last time."""
        shadow, engine = self._shadow, self._engine_of(trainer)
        if shadow is not None and not trainer.fit_loop._should_accumulate():
            if shadow.gradients.started:
                shadow.step(shadow.gradients.take(self._loss_scale(trainer)))
            self._steps += 1
        # In this order: to read the step may wait for a device.
        if not self._is_logging_step(trainer):
            return
        if shadow is not None:
            self._log_numbers(pl_module, shadow.quantities, "shadow/")
            shadow.quantities = {}
        if engine is None or engine.step == self._logged_step:
            return
        self._logged_step = engine.step
        step = engine.latest_step()
        if step is None:  # no parameter was used, or groups have just been replaced
            return
        summary = summarize(step, engine._mean_over_ranks)
        summary |= {name: float(metric(step)) for name, metric in self.metrics.items()}
        self.traffic.update(step)
        self._log_numbers(pl_module, {"density": summary.pop("density")}, prog_bar=True)
        self._log_numbers(pl_module, summary)
        for group, values in engine._group_summaries().items() if self.groups else ():
            self._log_numbers(pl_module, values, f"group/{group}/")
        self.log_plan(trainer, engine)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the totals beside the results of validation during fit."""
        engine = self._engine_of(trainer)
        if engine is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._log_numbers(pl_module, totals_of(engine.stepper.totals), on_step=False, on_epoch=True, sync_dist=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Free the shadow's memory."""
        self._shadow = None

    def _start_shadow(self, trainer: Any) -> None:
        self._shadow, self._steps = None, 0
        if not self.shadow:
            return
        used = getattr(trainer.strategy, "config", None) or SparsificationConfig()
        settings = SparsificationConfig(
            density=self.shadow_density, grouping=used.grouping, rules=used.rules, bucket_cap_mb=used.bucket_cap_mb
        )
        model = trainer.lightning_module
        frozen = [name for name, p in named_parameters(model).items() if not p.requires_grad]
        self._shadow = Shadow(trained_parameters(model), self.shadow, settings, TorchCollective(), frozen)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            names = [SPARSIFIERS.name_of(one) for one in self.shadow]
            chosen = {
                "sparsifiers": ",".join(names),
                "density": settings.as_dict()["density"],
                "every": self.shadow_every,
            }
            log_settings(logger, {"sparse_shadow": chosen})


def plan_table(engine: Engine, longest: int | None = None) -> Table:
    """Return the groups of an engine with sizes, densities, exchange, and MB of a dense ring.

    Args:
        engine: with the groups.
        longest: number of groups that are listed one by one; None: all.
    """
    settings, n = engine.settings, engine.comm.world_size
    title = f"sparse_ddp: groups at {settings.density}"
    header = ["group", "parameters", "coordinates", "density now", "k now", "exchange", "dense MB"]
    rows = []
    listed = engine.groups[:longest]
    for running, group in zip(engine.stepper.groups, listed, strict=False):
        density, whole = running.density(engine.step), not running.selects(engine.step)
        k = group.numel if whole else group.picks(density)
        shown = "" if group.dense else "1" if whole else f"{density:.3g}"
        exchange = "dense" if whole else type(settings.exchange_in_use).__name__
        dense_mb = ring_all_reduce_bytes(group.numel * group.parameters[0].element_size, n) / MB
        sizes = [f"{len(group.parameters)}", f"{group.numel:,}"]
        rows.append([group.name, *sizes, shown, f"{k:,}", exchange, f"{dense_mb:.3g}"])
    if rest := engine.groups[len(listed) :]:
        rows.append([f"{len(rest)} more", "", f"{sum(g.numel for g in rest):,}", "", "", "", ""])
    return Table(title, header, rows, left=(0, 5))
