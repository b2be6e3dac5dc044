"""What callbacks ask a Trainer: its engine, and whether this is a step to do something at."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_sparse.reducer import Engine


def engine_of(trainer: Any) -> Engine | None:
    """The engine of a strategy that sparsifies."""
    return getattr(trainer.strategy, "engine", None)


def is_logging_step(trainer: Any) -> bool:
    """Exactly Lightning's own decision, which has no public name."""
    return bool(trainer._logger_connector.should_update_logs) and not trainer.fit_loop._should_accumulate()


def loss_scale(trainer: Any) -> Tensor | None:
    """() factor that the loss is multiplied by; None: it is not."""
    scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
    scale: Tensor | None = getattr(scaler, "_scale", None)  # public get_scale() waits for the device
    return scale
