"""Clipping between backward and step, as behind plain DDP: all ranks by one factor, from the norm of the mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.core.layout import own
from lightning_sparse.engine.step import Stepper


def norm_of_mean(steppers: Iterable[Stepper], parameters: Sequence[Tensor]) -> Tensor:
    """Return the () norm of the mean of the ranks' gradients; collective.

    Gradients that will be exchanged are sketched. All others count as they are: DDP has averaged them, or nobody will.

    Args:
        steppers: who exchange them.
        parameters: in the same order on all ranks.
    """
    found = [(stepper, local) for stepper in steppers if (local := stepper.local(parameters))]
    sketched = {id(p) for _, local in found for p in local}
    whole = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and id(p) not in sketched])
    if not found:
        return _whole(whole)
    norms = [stepper.norm(local) for stepper, local in found]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([*norms, _whole(whole).to(norms[0])]))
    return norm


def clip_by_norm(
    steppers: Sequence[Stepper],
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip gradients by :func:`norm_of_mean`, and return it; see :meth:`.Engine.clip_grad_norm_`."""
    given = list(parameters)
    if norm_type != 2:
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    if any(stepper.local(given) for stepper in steppers):
        norm = norm_of_mean(steppers, given)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError("The norm of the mean gradient is not finite, so it cannot be clipped.")
        if max_norm < math.inf:  # else the norm is asked for, and gradients are left alone
            # Of gradients in parts, each rank scales its own by the norm of all.
            here: Any = [SimpleNamespace(grad=p.grad if p.grad is None else own(p.grad)) for p in given]
            torch.nn.utils.clip_grads_with_norm_(here, max_norm, norm, foreach)
    else:
        norm = torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    for stepper in steppers:
        stepper.clipped = _whole(norm)
    return norm


def clip_by_value(steppers: Iterable[Stepper], parameters: Iterable[Tensor], limit: float) -> None:
    """Clip values: each rank's own of gradients that are not averaged yet, which are longer than their mean."""
    given = [p for p in parameters if p.grad is not None]
    for stepper in steppers:
        local = stepper.local(given)
        _clip_values(local, limit * math.sqrt(stepper.comm.world_size))
        done = set(map(id, local))
        given = [p for p in given if id(p) not in done]
    _clip_values(given, limit)


def _clip_values(parameters: Sequence[Tensor], limit: float) -> None:
    if parameters:  # torch's function does not take none
        torch.nn.utils.clip_grad_value_(parameters, limit)


def _whole(norm: Any) -> Tensor:
    """Return a norm as a plain tensor; collective where ranks have parts of gradients."""
    found: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return found
