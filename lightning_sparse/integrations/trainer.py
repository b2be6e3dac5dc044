"""The strategies for the Trainer of either Lightning package: their common base, and that of DDP.

Lightning registers communication hooks on CUDA only; here the engine is attached on every device. The classes translate
between Lightning and the engine and decide nothing.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import keywords_of
from lightning_sparse.engine.network import BATCHES, LostRankError, TorchCollective, is_loss
from lightning_sparse.engine.optimizers.hooks import uninterrupted
from lightning_sparse.integrations.base import (
    CHECKPOINT_KEY,
    SparseStrategy,
    StrategyArguments,
    looking,
    readable,
    refuse_averages,
    refuse_with_overlap,
)
from lightning_sparse.integrations.earlier import Left, checksums, go_on
from lightning_sparse.integrations.telling import Telling

if TYPE_CHECKING:  # at run time the class of each package has its own base
    from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy
else:
    DDPStrategy = ParallelStrategy = object

TRAINED_ELSEWHERE = (
    "This checkpoint holds weights alone. They were trained by processes that fit has started and ended: what these "
    "had not sent, the states of their optimizers and their numbers of steps ended with them. A run that is resumed "
    "from it starts anew with these weights. To keep all of it, save within fit: by a ModelCheckpoint, or by "
    "trainer.save_checkpoint in on_train_end. The callback lightning_sparse.FlushResidual sends what is left before."
)
"""Warning instead of residuals if a fit was forked or spawned: Lightning returns weights and metrics only."""
FROZEN_WITHIN = (
    "Parameters were frozen within {}, so that gradients were not averaged. Freeze parameters between two steps, such "
    "as in on_train_epoch_start, or let DDP look for what a step does not use, with "
    "strategy=SparseDDPStrategy(find_unused_parameters=True)."
)
PACKAGES = ("lightning", "pytorch_lightning")
"""Lightning's own, which clip gradients by torch."""
UNUSED_PARAMETERS = (
    "It looks like your LightningModule has parameters that were not used in producing the loss returned by "
    "training_step. If this is intentional, let DDP look for them, with "
    "strategy=SparseDDPStrategy(find_unused_parameters=True) or strategy='sparse_ddp_find_unused_parameters_true'."
)
"""Replaces Lightning's sentence, which names dense strategies."""


class SparseTrainerMixin(SparseStrategy, ParallelStrategy):
    """A strategy for the Trainer whose averages come from an engine."""

    host = "Trainer"

    def _choose(self, *given: Any) -> dict[str, Any]:
        """Check and keep the settings; begin without an engine."""
        self._resume: tuple[Any, dict[str, Any] | None] | None = None
        self._earlier: tuple[Engine, dict[str, int]] | None = None
        """Engine of the fit before, and checksums of its weights."""
        self._left: Left | None = None
        self._telling = Telling()
        self._shown: list[Any] = []
        self._looks = ExitStack()
        """Open while weights are those that all ranks agree on."""
        self.engine: Engine | None = None
        """Open during fit; counts such as ``step`` can still be read afterwards."""
        return super()._choose(*given)

    def _begin(self, attach: Callable[[], Engine]) -> None:
        """Attach an engine, which continues where the one of an earlier fit has ended.

        Args:
            attach: returns it.
        """
        left, self._left = self._left, None
        if self._earlier is not None and self._earlier[0].step and self._resume is None:  # checkpoints take precedence
            left = Left.by(*self._earlier)
        self._close_engine()
        self.engine = self._earlier = None  # frees their buffers
        self.engine = attach()
        self._telling.follow(self.engine, self._trainer)
        go_on(self.engine, left)

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

    def on_train_start(self) -> None:
        """Call Lightning's hook; then log the first line and the settings."""
        super().on_train_start()
        if self.engine is not None:
            self._telling.start(self.engine, self.config)

    def on_validation_start(self) -> None:
        """Call Lightning's hook; then pause the clock of training, and look at the weights that all ranks agree on."""
        super().on_validation_start()
        self._telling.totals.pause()
        self._looks.enter_context(looking(self._open_engine))

    def on_validation_end(self) -> None:
        """Call Lightning's hook; then continue the clock of training, with this rank's weights."""
        super().on_validation_end()
        self._looks.close()
        self._telling.totals.go_on()

    def on_train_end(self) -> None:
        """Call Lightning's hook; then agree on weights that hooks have written to; log the last line and the totals."""
        super().on_train_end()
        if engine := self._open_engine:  # nobody can agree when it is closed
            engine.stepper.follow_changes()
        if self.engine is not None:
            self._telling.end(self.engine)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take a step as Lightning does; signals wait while the optimizer updates parameters."""
        self._follow_others()  # before the step's hooks; it forms gradients where optimization is automatic
        with uninterrupted():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module as Lightning does, with weights that all ranks agree on."""
        if (engine := self._open_engine) and not self._trainer.interrupted:
            engine.stepper.follow_changes()
        found: dict[str, Any] = super().lightning_module_state_dict()
        return found

    def _follow_others(self) -> None:
        """Show the current optimizers to the engine, if they have changed."""
        if (engine := self._open_engine) and [*map(id, self._shown)] != [*map(id, self.optimizers)]:
            self._follow_optimizers(engine)

    def _follow_optimizers(self, engine: Engine) -> None:
        """Show the current optimizers to the engine; let Lightning's plugin clip by the mean gradient.

        A plugin whose class clips in a way of its own goes on to do so.
        """
        plugin: Any = self.precision_plugin
        clips = self._trainer.gradient_clip_val
        with engine._failing_together():
            given = f"gradient_clip_val={clips}" if clips else ""
            refuse_with_overlap(engine, self.optimizers, given, getattr(plugin, "scaler", None))
            engine._show(self.optimizers)
            if engine.stepper.copies:
                refuse_averages(self._trainer.callbacks)
        self._shown = list(self.optimizers)
        ours: dict[str, Callable[..., Any]]
        ours = {"clip_grad_by_norm": self._clip_by_norm, "clip_grad_by_value": self._clip_by_value}
        for name, clip in ours.items():
            if getattr(type(plugin), name).__module__.split(".")[0] in PACKAGES:
                vars(plugin)[name] = partial(self._clip_what_it_holds, clip)

    def _clip_what_it_holds(self, clip: Callable[..., Any], optimizer: Any, clip_val: float) -> None:
        plugin: Any = self.precision_plugin
        clip(plugin.main_params(optimizer), clip_val)

    def teardown(self) -> None:
        """Close the engine, then everything else."""
        at_work = self._open_engine
        self._close_engine()
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        if at_work is not None:
            self._earlier = at_work, checksums(at_work)
        self._resume = None
        super().teardown()

    def _close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()  # leaves the weights that all ranks agree on
        self._looks.close()

    def on_exception(self, exception: BaseException) -> None:
        """Call Lightning's hook; let advice on unused parameters name this strategy instead of a dense one.

        Lightning has a collective in each step for signals to end: if a rank has gone, that may fail first.
        """
        super().on_exception(exception)
        if is_loss(exception) and not isinstance(exception, LostRankError):
            exception.add_note(f"sparse_ddp: another rank has ended or failed. {BATCHES}")
        exception.args = tuple(
            UNUSED_PARAMETERS if isinstance(arg, str) and "find_unused_parameters_true" in arg else arg
            for arg in exception.args
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return Lightning's state of a copy, which has no engine until it is set up."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "engine": None, "_earlier": None, "_shown": [], "_looks": ExitStack()}


@dataclass(frozen=True, kw_only=True)
class TrainerArguments(StrategyArguments):  # type: ignore[misc]  # see StrategyConfig
    """Arguments of the strategies for the Trainer."""

    precision_plugin: Any = None
    """Filled in by the Trainer."""


class SparseDDPMixin(SparseTrainerMixin, DDPStrategy):
    """DDP whose gradient all-reduce is a sparsified exchange with error feedback.

    Everything else is Lightning's ``DDPStrategy``: launchers, cluster environments, SyncBatchNorm, accumulation. A
    single device trains as plain DDP does, unless ``single_device="sparse"`` applies the method there, too.

    All arguments are keywords: the settings of :class:`~lightning_sparse.engine.config.StrategyConfig`, and those of
    Lightning's ``DDPStrategy`` in :class:`TrainerArguments`. Its other arguments, at the end of the signature, have to
    be None or at their defaults: they are there for configurations that were saved with a ``DDPStrategy``.

    Raises:
        ValueError: for settings that cannot work: unknown names, a density outside (0, 1], an exchange that does not
            accept the sparsifier, a second communication hook; at the start of fit, for an optimizer that does not go
            with the memory.
        TypeError: for keywords that this strategy does not know.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.SparseDDPStrategy(sparsifier="top_k", density=0.01, dense=["*.bias"])
        >>> strategy.config.exchange_in_use
        GatherPairs()
        >>> ls.SparseDDPStrategy(sparsifier="exdina")
        Traceback (most recent call last):
        ...
        ValueError: Unknown sparsifier 'exdina'. Did you mean 'exdyna'? Known names: clt_k, dgc, ...
    """

    _in_step = _accumulates = False
    """True while a training step runs; true after one whose gradients are accumulated."""

    @keywords_of(TrainerArguments)
    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__(**self._choose(TrainerArguments, given, keywords))

    def _setup_model(self, model: Any) -> Any:
        """Wrap the model as Lightning does, once it is known that DDP can."""
        self._check_model(model)
        return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        """Attach the engine. Lightning calls this after it wrapped the model; its version does nothing on a CPU."""
        self._begin(lambda: self._attach(self.model))
        self._continue()

    def _continue(self) -> None:
        """Load totals and residuals of the checkpoint that was loaded last into the engine, once."""
        resume, self._resume = self._resume, None
        if resume is not None and (engine := self._open_engine):
            self._restore(engine, *resume)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load weights as Lightning does, but after the change of precision, which would else round float64 weights."""
        module: Any = self.lightning_module
        self.precision_plugin.convert_module(module)
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load optimizers as Lightning does, and residuals, also if a callback loads a checkpoint within fit."""
        super().load_optimizer_state_dict(checkpoint)
        self._continue()

    def setup_optimizers(self, trainer: Any) -> None:
        """Set up optimizers as Lightning does, and show them to the engine.

        Raises:
            ValueError: if one does not go with the memory.
            RuntimeError: if Lightning has wrapped the model without attaching the exchange, as a later version might.
        """
        super().setup_optimizers(trainer)
        if self._open_engine is None:
            version = importlib.import_module(self.package).__version__
            raise RuntimeError(
                f"{self.package} {version} wrapped the model without calling _register_ddp_hooks, so that gradients "
                "would be averaged densely. Use a version that lightning-sparse is tested with, such as 2.6."
            )
        self._follow_optimizers(self._open_engine)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Follow changes of frozen parameters first, outside of ``no_sync()``; then block as Lightning does."""
        self._follow_frozen()
        with super().block_backward_sync():
            yield
        self._accumulates = not self._in_step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Follow changes of frozen parameters and of optimizers since the last step, then call Lightning's step."""
        self._follow_frozen()
        self._follow_others()
        self._in_step, self._accumulates = True, False
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._in_step = False

    def _follow_frozen(self) -> None:
        """Wrap the model again if parameters were frozen or thawed since the last step.

        Raises:
            RuntimeError: if that happened within a step or between batches that are accumulated, as DDP raises it.
        """
        if self._in_step or not self._membership_changed():
            return
        model: Any = self.model
        try:
            model._check_reducer_finalized()  # the new wrapper would not know
        except RuntimeError as error:
            raise RuntimeError(FROZEN_WITHIN.format("a step")) from error
        assert self.engine is not None
        if self._accumulates and not all(p.requires_grad for p in self.engine.stepper.parameters.values()):
            raise RuntimeError(FROZEN_WITHIN.format("batches whose gradients are accumulated"))
        self._wrap_again()

    def _membership_changed(self) -> bool:
        engine = self._open_engine
        if engine is None:
            return False
        thawed = any(p.requires_grad for p in engine.frozen.values())
        if self._ddp_kwargs.get("find_unused_parameters", False):
            return thawed  # frozen parameters count as unused
        return thawed or not all(p.requires_grad for p in engine.stepper.parameters.values())

    def _wrap_again(self) -> None:
        """Wrap the model in a new DDP, for the parameters that need gradients now, and keep all residuals."""
        assert self.engine is not None
        self.engine.stepper.follow_changes()
        self._left = Left.by(self.engine)
        self._resume = None  # a checkpoint that somebody has only read
        self._close_engine()
        wrapped: Any = self.model
        model = wrapped.module
        self.model = self.engine = wrapped = None
        gc.collect()  # the old reducer takes part in every backward until it is freed
        self.model = self._setup_model(model)
        self._register_ddp_hooks()
        assert self.engine is not None
        self._follow_optimizers(self.engine)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as Lightning does, and keep its path for residuals, and its entry."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        own = readable(checkpoint.get(CHECKPOINT_KEY))
        residuals = None if own is None else own.get("residuals")
        # The checkpoint's current value: side files must match it.
        if own and isinstance(residuals, dict) and "global_step" in residuals:
            own = {**own, "residuals": {**residuals, "global_step": checkpoint.get("global_step")}}
        self._resume = checkpoint_path, own
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as Lightning does, and every rank's residuals beside it."""
        own: dict[str, Any] = {}
        with self._residuals_beside(checkpoint, filepath, storage_options) as marker:
            if marker is not None:
                own["residuals"] = marker
            if self.engine is not None and "optimizer_states" in checkpoint:
                totals = self._telling.totals.state_dict()
                own["totals"] = totals if self._trainer.interrupted else self._mean_over_ranks(totals)
            if own or "optimizer_states" in checkpoint:  # a checkpoint without this entry is of a dense training
                checkpoint[CHECKPOINT_KEY] = own
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _residuals_beside(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any
    ) -> AbstractContextManager[dict[str, Any] | None]:
        if not self.config.save_residuals or "optimizer_states" not in checkpoint:
            return nullcontext()
        if self.engine is None:
            if getattr(self.launcher, "_already_fit", False):
                rank_zero_warn(TRAINED_ELSEWHERE)
            return nullcontext()
        write = partial(self.checkpoint_io.save_checkpoint, storage_options=storage_options)
        # After an error, Lightning lets callbacks save on the failed ranks; others may not take part.
        comm = None if self._trainer.interrupted else TorchCollective()
        if comm is not None:
            path = self._place_of_residuals(path)
        return self._side_files.beside(path, self.engine, write, comm, checkpoint.get("global_step"))

    def _place_of_residuals(self, path: Any) -> Any:
        """Return the path beside which residuals are written: where rank 0 writes the checkpoint.

        Names may hold metrics, which may differ from rank to rank.
        """
        return self.broadcast(path)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint as Lightning does, and the residuals beside it."""
        super().remove_checkpoint(filepath)
        self._side_files.remove(filepath, self.global_rank, self.world_size)

    def teardown(self) -> None:
        """Close the engine, then everything else."""
        super().teardown()
        self._side_files.sweep()
