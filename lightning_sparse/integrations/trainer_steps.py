"""The common part of the strategies for the Trainer: an engine during fit, bound to the Trainer's optimizers.

The class translates between Lightning and the engine and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_sparse.engine import Engine
from lightning_sparse.engine.network import LostRankError
from lightning_sparse.engine.network.process_group import BATCHES, is_loss
from lightning_sparse.engine.optimizers.hooks import SAVING, uninterrupted
from lightning_sparse.integrations.base import SparseStrategy, profile_of
from lightning_sparse.integrations.callback import Callback
from lightning_sparse.integrations.earlier import Left, checksums
from lightning_sparse.integrations.telling import Telling

if TYPE_CHECKING:  # at run time the class of each package has its own base
    from pytorch_lightning.strategies import ParallelStrategy as Base
else:
    Base = object

UNUSED_PARAMETERS = (
    "It looks like your LightningModule has parameters that were not used in producing the loss returned by "
    "training_step. If this is intentional, let DDP look for them, with "
    "strategy=SparseDDPStrategy(find_unused_parameters=True) or strategy='sparse_ddp_find_unused_parameters_true'."
)
"""Replaces Lightning's sentence, which names dense strategies."""


def _has_own_clipping(module: Any) -> bool:
    """Return True if the user has overridden ``configure_gradient_clipping``."""
    name = "configure_gradient_clipping"
    of_lightning = next(vars(kind)[name] for kind in reversed(type(module).__mro__) if name in vars(kind))
    return getattr(getattr(module, name), "__func__", None) is not of_lightning


class _DrainFirst(Callback):
    """Applies averages that are on their way when training ends, before other callbacks save or replace weights."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Apply them before SWA puts its average in place, to measure BatchNorm statistics in an epoch more."""
        measuring = any(getattr(one, "_model_contains_batch_norm", False) for one in trainer.callbacks)
        if measuring and trainer.current_epoch + 1 == trainer.max_epochs:
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Apply them; the strategy's own hook comes behind those of all callbacks."""
        engine = self.engine_of(trainer)
        if engine is not None and engine.optimizers_in_use:
            engine.drain()


class SparseTrainerMixin(SparseStrategy, Base):
    """A strategy for the Trainer whose averages come from an engine."""

    host = "Trainer"

    def _have_no_engine(self) -> None:
        """Begin without an engine; for the constructor."""
        self._profile: dict[str, Any] | None = None
        self._resume: tuple[Any, dict[str, Any] | None] | None = None
        self._earlier: tuple[Engine, dict[str, int]] | None = None
        """Engine of the fit before, and checksums of its weights."""
        self._left: Left | None = None
        self._totals: dict[str, float] | None = None
        self._telling = Telling()
        self._shown: list[Any] = []
        self.engine: Engine | None = None
        """Open during fit; counts such as ``step`` can still be read afterwards."""

    def _begin(self, attach: Callable[[dict[str, Any] | None], Engine]) -> None:
        """Attach an engine, which continues where the one of an earlier fit has ended.

        Args:
            attach: returns it, given the profile of an earlier run.
        """
        profile = self._profile or self.profile  # from a checkpoint, or from an earlier fit
        left, self._left = self._left, None
        if self._earlier is not None and self._earlier[0].step and self._resume is None:  # checkpoints take precedence
            left = Left.by(*self._earlier)
        self._close_engine()
        self.engine = self._earlier = None  # frees their buffers
        self.engine = attach(profile)
        self._take_totals()
        self._telling.follow(self.engine, self._trainer)
        self._go_on(self.engine, left)

    def _take_totals(self) -> None:
        """Go on with the totals of the checkpoint that was loaded last, once; its profile is in use or of no use."""
        totals, self._totals, self._profile = self._totals, None, None
        if totals is not None:
            self._telling.totals.load_state_dict(totals)

    @property
    def engines(self) -> list[Engine]:
        """The engine, if there is one."""
        return [] if self.engine is None else [self.engine]

    @property
    def _open_engine(self) -> Engine | None:
        return None if self.engine is None or self.engine.closed else self.engine

    @property
    def _trainer(self) -> Any:
        module: Any = self.lightning_module
        return module.trainer

    def _clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip as the precision plugin does, unless this step's gradients were clipped before the exchange."""
        algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
        if not self._clips_locally(getattr(optimizer, "optimizer", optimizer), clip_val, algorithm):
            plugin: Any = self.precision_plugin
            type(plugin).clip_gradients(plugin, optimizer, clip_val, gradient_clip_algorithm)

    def on_train_start(self) -> None:
        """Call Lightning's hook; then log the first line and the settings."""
        super().on_train_start()
        if self.engine is not None:
            self._telling.start(self.engine, self.config)
            self._drain_first(bool(self.engine.settings.delay))

    def on_validation_start(self) -> None:
        """Call Lightning's hook; then pause the clock of training."""
        super().on_validation_start()
        self._telling.totals.pause()

    def on_validation_end(self) -> None:
        """Call Lightning's hook; then continue the clock of training."""
        super().on_validation_end()
        self._telling.totals.go_on()

    def on_train_end(self) -> None:
        """Call Lightning's hook; then log the last line and the totals."""
        super().on_train_end()
        self._drain_first(False)
        if self.engine is not None:
            self._telling.end(self.engine)

    def _drain_first(self, wanted: bool) -> None:
        """Let averages be applied before other callbacks act at the end of training, or no more."""
        callbacks = self._trainer.callbacks
        callbacks[:] = [one for one in callbacks if not isinstance(one, _DrainFirst)]
        if wanted:
            callbacks.insert(0, _DrainFirst())

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take a step as Lightning does; skip it after non-finite gradients if no loss scaler does so.

        Signals wait while the optimizer updates parameters. Those that request a checkpoint wait from the end of
        backward on, so that ranks save the same step; Ctrl-C does not, because callbacks run in between.
        """
        self._follow_others()  # before the step's hooks; it forms gradients where optimization is automatic
        with uninterrupted() as hold:

            def then_skip() -> Any:
                result = closure()
                self._skip_void(optimizer, self.precision_plugin)
                hold.start(SAVING)
                return result

            return super().optimizer_step(optimizer, then_skip, model, **kwargs)

    def _follow_others(self) -> None:
        """Bind the current optimizers, if they have changed since the last binding."""
        if (engine := self._open_engine) and [*map(id, self._shown)] != [*map(id, self.optimizers)]:
            self._follow_optimizers(engine)

    def _follow_optimizers(self, engine: Engine) -> None:
        """Bind the current optimizers to the engine; let it clip gradients instead of averages, if that is better."""
        self._follow_together(engine, self.optimizers)
        self._shown = list(self.optimizers)
        module: Any = self.lightning_module
        trainer = module.trainer
        if module.automatic_optimization and not _has_own_clipping(module):  # from the first step on
            algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm) or "norm"
            for optimizer in self.optimizers:
                self._clips_locally(optimizer, trainer.gradient_clip_val, algorithm, known=True)
        # All of Lightning's clipping calls this.
        vars(self.precision_plugin)["clip_gradients"] = self._clip_gradients

    @property
    def profile(self) -> dict[str, Any] | None:
        """The measured :class:`~lightning_sparse.tuning.performance.Profile`, for groups and densities; or None."""
        return profile_of(self.engine)

    def _count_steps_left_out(self, engine: Engine) -> None:
        """Count averages as applied when a batch is over, even if not all of its optimizers have taken a step."""
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if batches.ready == batches.processed:
            engine.end_batch()

    def teardown(self) -> None:
        """Close the engine, then everything else."""
        at_work = self._open_engine
        if at_work is not None and not self._trainer.interrupted and at_work.optimizers_in_use:
            at_work.drain()  # averages of a checkpoint, in a fit that has nothing to train
        self._close_engine()
        vars(self.precision_plugin).pop("clip_gradients", None)
        if at_work is not None:
            self._earlier = at_work, checksums(at_work)
        self._resume = self._profile = self._totals = None
        super().teardown()

    def _close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def on_exception(self, exception: BaseException) -> None:
        """Call Lightning's hook; let advice on unused parameters name this strategy instead of a dense one.

        Lightning has a collective in each step for signals to end: if a rank has gone, that may fail first.
        """
        super().on_exception(exception)
        if self.lightning_module is not None:
            self._drain_first(False)
        if is_loss(exception) and not isinstance(exception, LostRankError):
            exception.add_note(f"sparse_ddp: another rank has ended or failed. {BATCHES}")
        exception.args = tuple(
            UNUSED_PARAMETERS if isinstance(arg, str) and "find_unused_parameters_true" in arg else arg
            for arg in exception.args
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return Lightning's state of a copy, which has no engine until it is set up."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "engine": None, "_earlier": None, "_shown": []}
