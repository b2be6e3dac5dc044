"""Queries of callbacks to a Trainer: its engine, logging steps, the loss scale."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sparse.engine import Engine


def engine_of(trainer: Any) -> Engine | None:
    """Return the engine of a strategy that sparsifies, or None."""
    return getattr(trainer.strategy, "engine", None)


def warn_that_nothing_is_sparse(trainer: Any, callback: str, what: str) -> None:
    """Warn that a callback has nothing to do (``what``: a verb), because the strategy does not sparsify."""
    rank_zero_warn(
        f"{callback} has nothing to {what}: the strategy {type(trainer.strategy).__name__} does not sparsify. Use "
        "strategy='sparse_ddp' or remove the callback."
    )


def is_logging_step(trainer: Any) -> bool:
    """Return Lightning's own decision to log, which has no public name."""
    return bool(trainer._logger_connector.should_update_logs) and not trainer.fit_loop._should_accumulate()


def loss_scale(trainer: Any) -> Tensor | None:
    """Return the factor of the loss, (), or None without a scaler."""
    scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
    scale: Tensor | None = getattr(scaler, "_scale", None)  # public get_scale() waits for the device
    return scale
