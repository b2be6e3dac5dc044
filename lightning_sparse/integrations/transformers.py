"""Connects ``transformers.Trainer``, as ``lightning_sparse.huggingface``."""

from __future__ import annotations

import os
from typing import Any

from transformers import DefaultFlowCallback, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import StrategyConfig, from_keywords, keywords_of
from lightning_sparse.integrations.accelerate import Accelerated
from lightning_sparse.integrations.base import looking


@keywords_of(StrategyConfig)
def prepare_trainer(trainer: Trainer, /, **keywords: Any) -> Trainer:
    """Let a ``transformers.Trainer`` exchange sparsified gradients. All ranks must call this, before ``train()``.

    The Trainer stays the object it is, of a subclass of its class. From then on,

    - ``train()`` attaches the engine to the model that Accelerate has wrapped; gradients are exchanged when the
      optimizer steps;
    - ``max_grad_norm`` (1.0 by default) clips by the norm of the mean gradient, as with DDP, which is logged as
      ``grad_norm``; below a density of 1 it is estimated (``docs/guide/optimizers.md``);
    - checkpoints hold every rank's residuals, with a marker that is written last, and
      ``train(resume_from_checkpoint=...)`` continues with them; not with ``save_only_model``;
    - rows of the log with a loss also have ``sparse/...``, in all loggers of the Trainer;
    - ``trainer.sparse_engine`` is the engine during and after training.

    With ``push_to_hub``, folders are uploaded before residuals are in them: a checkpoint from the hub resumes without.

    Returns:
        The given Trainer.

    Raises:
        TypeError: for something that is no ``transformers.Trainer``, or a keyword that it does not know.
        ValueError: for settings that cannot work, here; for models that are sharded, in ``train()``.
        RuntimeError: if it was prepared before.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"Expected a transformers.Trainer, but got {type(trainer).__name__}.")
    if isinstance(trainer, _Prepared):
        raise RuntimeError("This Trainer was prepared already: call prepare_trainer once.")
    config = from_keywords(StrategyConfig, keywords, "prepare_trainer")
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_Prepared, kind), {"__module__": kind.__module__})
    callback = SparseDDPCallback(trainer, config)
    vars(trainer)["_sparse"] = callback
    # Behind the callback that decides what is logged; in front of all that copy a checkpoint's folder when it is saved.
    callbacks = trainer.callback_handler.callbacks
    flow = [i for i, one in enumerate(callbacks) if isinstance(one, DefaultFlowCallback)]
    callbacks.insert(flow[0] + 1 if flow else 0, callback)
    return trainer


class SparseDDPCallback(TrainerCallback):  # type: ignore[misc]  # without types
    """Attaches, saves and loads for :func:`prepare_trainer`, which is the only one to make it.

    It keeps no state in ``trainer_state.json``: a checkpoint that was saved without it must stay resumable.

    Args:
        trainer: whose callback it is; callbacks are given the plain model, and the engine needs the wrapped one.
        config: settings.
    """

    def __init__(self, trainer: Trainer, config: StrategyConfig) -> None:
        self._trainer = trainer
        self._attached = Accelerated(trainer.accelerator, config)
        self.resume: Any = None
        """Argument ``resume_from_checkpoint`` of ``train()``, of which callbacks are not told."""
        self.trial: Any = None
        """Argument ``trial`` of ``train()``, with which ``hyperparameter_search`` calls it: it has its own folder."""
        self._rows: dict[str, float] = {}

    @property
    def engine(self) -> Engine | None:
        """The engine; None before training, and with a single process."""
        return self._attached.engine

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the wrapped model, bind the optimizer, and continue with the residuals of a checkpoint."""
        self._attached.accelerator = self._trainer.accelerator
        clips = f"max_grad_norm={args.max_grad_norm}" if args.max_grad_norm else ""
        self._attached.attach(self._trainer.model_wrapped, [self._trainer.optimizer], clips)
        resume, self.resume = self.resume, None
        if resume is True:
            resume = get_last_checkpoint(args.output_dir)
        if resume:
            self._attached.load(resume)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the quantities of the step on all ranks, if the Trainer is about to log."""
        if control.should_log:
            self._rows |= self._attached.quantities()

    on_epoch_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the weights that all ranks agree on in the model."""
        if self.engine is not None:
            self.engine.stepper.follow_changes()
            self.engine.stepper.copies.show()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write residuals into the checkpoint's folder, when all else is there."""
        if args.save_only_model:
            return
        of_run = self._trainer._get_output_dir(trial=self.trial)
        folder = os.path.join(of_run, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._attached.save(folder, state.global_step)

    def take_rows(self) -> dict[str, float]:
        """Return the quantities of the latest logged step, once."""
        rows, self._rows = self._rows, {}
        return rows


class _Prepared:
    """Lets a Trainer's subclass tell its callback from where it resumes, and log the callback's quantities."""

    _sparse: SparseDDPCallback

    @property
    def sparse_engine(self) -> Engine | None:
        """The engine; None before training, and with a single process."""
        return self._sparse.engine

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as before, and continue with the residuals of a checkpoint."""
        self._sparse.resume, self._sparse.trial = resume_from_checkpoint, trial
        return super().train(resume_from_checkpoint, trial, *args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as before, with the weights that all ranks agree on."""
        with looking(self.sparse_engine):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as before, with the weights that all ranks agree on."""
        with looking(self.sparse_engine):
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """Log as before, with the exchange's quantities in rows that have a loss."""
        rows = self._sparse.take_rows() if "loss" in logs else {}
        return super().log({**logs, **rows}, *args, **kwargs)  # type: ignore[misc]
