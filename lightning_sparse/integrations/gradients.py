"""Copies of this rank's own gradients, before they are averaged, for observers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_sparse.core.layout import flattened, own


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
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def started(self) -> bool:
        """True if gradients are being copied."""
        return bool(self._hooks)

    def start(self) -> None:
        """Copy the gradients of the next backward."""
        self._hooks = self._hooks or [
            p.register_post_accumulate_grad_hook(partial(self._copy, name))  # type: ignore[no-untyped-call]
            for name, p in self._parameters.items()
        ]

    def _copy(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._found[name] = flattened(own(parameter.grad)).clone()

    def take(self, scale: Tensor | None = None) -> dict[str, Tensor]:
        """Stop copying and return the copies, flat, by name, without parameters that had no gradient.

        Args:
            scale: () factor of the loss, to be divided out.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks, found, self._found = [], self._found, {}
        return found if scale is None else {name: gradient.div_(scale) for name, gradient in found.items()}


def trained_parameters(module: Module) -> dict[str, Parameter]:
    """Return floating-point parameters that need a gradient, by name."""
    return {n: p for n, p in module.named_parameters() if p.requires_grad and p.is_floating_point() and p.numel()}
