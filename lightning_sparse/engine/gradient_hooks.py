"""Hooks on gradients of single parameters: all that look at them begin here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_sparse.core.layout import own


def on_gradients(parameters: Mapping[str, Parameter], act: Callable[[str, Tensor], None]) -> ExitStack:
    """Call a function whenever a backward has finished the gradient of a parameter, before DDP sees it.

    Args:
        parameters: by name.
        act: is given a name, and the parameter.

    Returns:
        Removes the hooks when it is closed.
    """
    hooks = ExitStack()
    for name, p in parameters.items():
        hook = p.register_post_accumulate_grad_hook(partial(act, name))  # type: ignore[no-untyped-call]
        hooks.callback(hook.remove)
    return hooks


def refuse_sparse_gradients(
    parameters: Mapping[str, Parameter], failing_together: Callable[[str], AbstractContextManager[None]]
) -> list[RemovableHandle]:
    """Look at the first gradient of each parameter, before DDP ends with an error that names none for a sparse one.

    Args:
        parameters: by name.
        failing_together: within which errors are raised, given a place for a note.

    Returns:
        The hooks, to be removed when the engine ends.
    """
    handles: dict[str, RemovableHandle] = {}

    def look(name: str, parameter: Tensor) -> None:
        handles[name].remove()  # what makes sparse gradients does so from the first step on
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            with failing_together("in backward"):
                raise RuntimeError(
                    f"The gradient of {name!r} is a sparse tensor, as torch.nn.functional.embedding makes it with "
                    "sparse=True, which cannot be looked at as a flat vector. Set sparse=False: what is sent is "
                    "sparsified anyway."
                )

    for name, p in parameters.items():
        if own(p) is p:  # gradients of parts are dense
            handles[name] = p.register_post_accumulate_grad_hook(partial(look, name))  # type: ignore[no-untyped-call]
    return list(handles.values())
