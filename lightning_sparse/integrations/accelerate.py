"""The way in for Accelerate, as ``lightning_sparse.accelerate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer

from lightning_sparse.core.checks import expect, is_number
from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import StrategyConfig, from_keywords, with_keywords_of
from lightning_sparse.integrations.accelerated import Accelerated


@dataclass(frozen=True, kw_only=True)
class AccelerateArguments(StrategyConfig):  # type: ignore[misc]  # see StrategyConfig
    """Arguments of :func:`attach`: the settings of the strategies, and facts that are known before the first step."""

    max_grad_norm: float | None = None
    """Limit that ``accelerator.clip_grad_norm_`` will be called with; the first step is then clipped as all others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = self.max_grad_norm
        expect(limit is None or (is_number(limit) and limit > 0), "max_grad_norm", "a number above 0, or None", limit)


@with_keywords_of(AccelerateArguments)
def attach(accelerator: Any, model: Any, optimizer: Any, **keywords: Any) -> Engine | None:
    """Replace the gradient all-reduce of a model that an ``Accelerator`` has prepared. All ranks must call this.

    Model and optimizer, or a list of optimizers, are those that ``accelerator.prepare`` returned. After it,

    - the optimizer is bound: AdamW and momentum step as behind an exchange of sparse averages they should;
    - ``accelerator.clip_grad_norm_`` and ``clip_grad_value_`` clip each rank's gradients before they wait, where that
      is better than to clip averages (``docs/training.md``);
    - steps whose gradients are not finite on some rank are skipped on all;
    - ``accelerator.save_state`` writes each rank's residuals into the checkpoint's folder, with a marker that is
      written last, and ``accelerator.load_state`` lets the engine go on with them;
    - ``accelerator.end_training`` closes the engine.

    Returns:
        The engine; None with a single process, which trains as before.

    Raises:
        ValueError: for settings that cannot work; for a model that is not wrapped in ``DistributedDataParallel``.
        TypeError: for a keyword that it does not know.
        RuntimeError: on all ranks, if settings or models differ between ranks.
    """
    several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for one in several:
        expect(isinstance(one, Optimizer), "optimizer", "an optimizer, or a list of them", one)
    arguments = from_keywords(AccelerateArguments, keywords, "attach")
    attached = Accelerated(accelerator, StrategyConfig.of(arguments))
    engine = attached.attach(model, several, arguments.max_grad_norm)
    if engine is not None:
        _refuse_to_register(attached, accelerator.register_for_checkpointing)
        _add_files(attached)
        attached.redirect("end_training", partial(_end, attached, accelerator.end_training))
    return engine


def _end(attached: Accelerated, original: Callable[[], None]) -> None:
    """End the engine before its process groups: where one refers to them, their threads outlive the interpreter."""
    attached.end()
    original()


def _refuse_to_register(attached: Accelerated, register: Callable[..., None]) -> None:
    """Let ``register_for_checkpointing`` refuse engines: it would keep the residuals of the main process only."""

    def checked(*objects: Any) -> None:
        if any(isinstance(one, Engine) for one in objects):
            raise ValueError(
                "Expected objects whose state is equal on all processes, but got an engine, whose residuals differ "
                "from rank to rank: register_for_checkpointing keeps those of the main process only. Leave it out: "
                "accelerator.save_state() saves the residuals of all ranks already."
            )
        register(*objects)

    attached.redirect("register_for_checkpointing", checked)


def _add_files(attached: Accelerated) -> None:
    """Save residuals after, and load them after, all that the Accelerator saves and loads.

    Hooks of the Accelerator tell the folder, and run before it writes or reads; the marker must be the last file.
    """
    accelerator = attached.accelerator
    folders: list[Any] = []

    def note(models: Sequence[Any], *rest: Any) -> None:
        folders[:] = rest[-1:]

    def remove_marker(models: Sequence[Any], weights: Any, folder: Any) -> None:
        note(models, folder)
        attached.unmark(folder)

    def then(original: Callable[..., Any], act: Callable[[Any], None], *args: Any, **keywords: Any) -> Any:
        result = original(*args, **keywords)
        for folder in folders:
            act(folder)
        folders.clear()
        return result

    attached.until_end(accelerator.register_save_state_pre_hook(remove_marker).remove)
    attached.until_end(accelerator.register_load_state_pre_hook(note).remove)
    attached.redirect("save_state", partial(then, accelerator.save_state, attached.save))
    attached.redirect("load_state", partial(then, accelerator.load_state, attached.load))
