"""The base class of callbacks, for the Trainers of all installed packages, and copies of a rank's gradients."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_sparse.core.layout import flattened, own
from lightning_sparse.core.names import named_parameters
from lightning_sparse.engine import Engine
from lightning_sparse.engine.gradient_hooks import on_gradients
from lightning_sparse.integrations import packages

if TYPE_CHECKING:
    from pytorch_lightning import Callback as Base
else:

    class Base(*(importlib.import_module(name).Callback for name in packages.installed())):
        """Callback of each of these packages."""


class Callback(Base):
    """Callback that asks a Trainer for its engine, its logging steps and its loss scale."""

    @staticmethod
    def _engine_of(trainer: Any) -> Engine | None:
        """Return the engine of a strategy that sparsifies, or None."""
        return getattr(trainer.strategy, "engine", None)

    def _warn_that_nothing_is_sparse(self, trainer: Any, what: str, also: str = "") -> None:
        """Warn that the callback has nothing to do, because the strategy does not sparsify.

        Args:
            trainer: of the strategy.
            what: a verb.
            also: another way out.
        """
        rank_zero_warn(
            f"{type(self).__name__} has nothing to {what}: the strategy {type(trainer.strategy).__name__} does not "
            f"sparsify. Use strategy='sparse_ddp'{also} or remove the callback."
        )

    @staticmethod
    def _is_logging_step(trainer: Any) -> bool:
        """Return Lightning's own decision to log, which has no public name."""
        return bool(trainer._logger_connector.should_update_logs) and not trainer.fit_loop._should_accumulate()

    @staticmethod
    def _loss_scale(trainer: Any) -> Tensor | None:
        """Return the factor of the loss, (), or None without a scaler."""
        scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
        scale: Tensor | None = getattr(scaler, "_scale", None)  # public get_scale() waits for the device
        return scale

    @staticmethod
    def _log_numbers(pl_module: Any, numbers: Mapping[str, float], under: str = "", **options: Any) -> None:
        """Log numbers by name, ``sparse/<under><name>``, in the row of the step."""
        named = {f"sparse/{under}{name}": number for name, number in numbers.items()}
        pl_module.log_dict(named, **{"on_step": True, "on_epoch": False, **options})


class LocalGradients:
    """Copies gradients as backward finishes them, between :meth:`start` and :meth:`take`; costs nothing otherwise.

    The copy is made before DDP or a communication hook sees the gradient, and changes nothing for them. With
    accumulated gradients, the last backward's copies count: they are the sums. Of sharded parameters, this rank's part
    is copied.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters
        self._found: dict[str, Tensor] = {}
        self._hooks: ExitStack | None = None

    @property
    def started(self) -> bool:
        """True if gradients are being copied."""
        return self._hooks is not None

    def start(self) -> None:
        """Copy the gradients of the next backward."""
        self._hooks = self._hooks or on_gradients(self._parameters, self._copy)

    def _copy(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._found[name] = flattened(own(parameter.grad)).clone()

    def take(self, scale: Tensor | None = None) -> dict[str, Tensor]:
        """Stop copying and return the copies, flat, by name, without parameters that had no gradient.

        Args:
            scale: () factor of the loss, to be divided out.
        """
        if self._hooks is not None:
            self._hooks.close()
        self._hooks, found, self._found = None, self._found, {}
        return found if scale is None else {name: gradient.div_(scale) for name, gradient in found.items()}


def trained_parameters(module: Module) -> dict[str, Parameter]:
    """Return floating-point parameters that need a gradient, by name."""
    named = named_parameters(module).items()
    return {n: p for n, p in named if p.requires_grad and p.is_floating_point() and p.numel()}
