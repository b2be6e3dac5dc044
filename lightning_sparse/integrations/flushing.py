"""Callback that flushes residuals at the end of training, for the Trainers of both Lightning packages."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

from lightning_sparse.api.flush import engines_of, flush
from lightning_sparse.core.checks import expect, is_integer, plain
from lightning_sparse.engine.optimizers.kinds import refuse_closure, with_settings
from lightning_sparse.integrations.callback import Callback


class FlushResidual(Callback):
    """Take one dense step with the residuals, at the end of training; see :func:`~lightning_sparse.flush`.

    In the last epoch of ``max_epochs`` or ``max_steps``, the flush follows the last batch: the last validation and
    checkpoints include its result. If training is stopped otherwise, by ``EarlyStopping`` or a time limit, it follows
    at the end of that epoch: after validation, and before the checkpoints that ``ModelCheckpoint`` writes then; or in
    ``on_train_end``, if the stop was decided later. A checkpoint from before a flush does not contain it: the residuals
    are beside it, and a run that is resumed from it loses nothing. After an exception, nothing is flushed.

    Weights that SWA has replaced by their average are not changed by a flush. With EMA, place this callback before that
    of the average, so that the last flush enters it.

    The step uses the learning rates of the latest step, because schedulers that end at 0 have reached it by then. It is
    no step of the Trainer: ``global_step`` does not count it, and nothing is clipped.

    Args:
        every_n_epochs: also flush after the last batch of every n-th epoch, at least 1; None: only at the end.

    Raises:
        ValueError: for other values; at the start of fit, for an optimizer whose step needs a closure, such as LBFGS.

    Example:
        >>> import lightning_sparse as ls
        >>> from pytorch_lightning import Trainer
        >>> trainer = Trainer(strategy="sparse_ddp", devices=2, accelerator="cpu", logger=False, max_epochs=3,
        ...                   callbacks=[ls.FlushResidual()], enable_model_summary=False)
    """

    def __init__(self, every_n_epochs: int | None = None) -> None:
        given = every_n_epochs is None or (is_integer(every_n_epochs) and every_n_epochs >= 1)
        expect(given, "every_n_epochs", "an integer from 1 on, or None", every_n_epochs)
        self.every_n_epochs = plain(every_n_epochs)
        self._rates: dict[int, list[dict[str, Any]]] = {}
        self._flushed: list[tuple[int, int]] = []
        self._averaged = False
        """True if the weights are an average, of which StochasticWeightAveraging measures the BatchNorm statistics."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Warn if there is nothing to flush."""
        self._rates, self._flushed, self._averaged = {}, [], False
        if not engines_of(trainer.strategy):
            self._warn_that_nothing_is_sparse(trainer, "do")
            return
        for optimizer in trainer.optimizers:
            refuse_closure(optimizer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Record the learning rates of this step."""
        self._rates[id(optimizer)] = [{"lr": copy.deepcopy(group["lr"])} for group in optimizer.param_groups]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Flush after the last batch, before validation."""
        self._averaged = self._averaged or getattr(trainer.fit_loop, "_skip_backward", False)
        steps_are_over = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if steps_are_over or (trainer.is_last_batch and self._ends_with_this_epoch(trainer)):
            self._flush(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Flush if training is stopped, before checkpoints are written."""
        if trainer.should_stop and trainer.fit_loop._can_stop_early:
            self._flush(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Flush the remaining residuals."""
        self._flush(trainer)

    def _ends_with_this_epoch(self, trainer: Any) -> bool:
        epochs = trainer.current_epoch + 1
        at_the_end = trainer.max_epochs not in (None, -1) and epochs >= trainer.max_epochs
        return at_the_end or (self.every_n_epochs is not None and epochs % self.every_n_epochs == 0)

    def _flush(self, trainer: Any) -> None:
        if self._averaged:
            return
        now = [(engine.step, engine._state.loads) for engine in engines_of(trainer.strategy)]
        if now != self._flushed:  # else residuals are empty: nothing was exchanged or loaded since
            with ExitStack() as latest:
                for optimizer in trainer.optimizers:
                    latest.enter_context(with_settings(optimizer, self._rates.get(id(optimizer), [])))
                flush(trainer)
            self._flushed = now
