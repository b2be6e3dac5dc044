"""Adam and AdamW that engines find by themselves, and which optimizers the sparse exchange can step for."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

_made: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Found(Optimizer):
    """Is found by engines: made, copied or unpickled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _made.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _made.add(self)


class Adam(Found, torch.optim.Adam):
    """``torch.optim.Adam`` that also knows how to step behind a sparse exchange.

    All arguments, parameter groups, states and files are torch's. On one device, in plain DDP, behind a dense exchange
    and for parameters that stay dense, it *is* torch's. Of parameters that an engine of this package sparsifies, the
    engine takes the steps, with this optimizer's learning rate, second beta and eps, see
    :class:`~lightning_sparse.SecondMoment`; no first moment is kept of them.

    Strategies for the Trainer and for Fabric do the same for torch's own classes. With :func:`~lightning_sparse.attach`
    torch's classes have to be shown to the engine, ``engine.follow([optimizer])``, and these here are found.

    Not served, and left to torch as they are: ``amsgrad``, ``differentiable``, and a ``weight_decay`` of ``Adam``,
    which is added to gradients.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        >>> for weight, optimizer in zip(weights, (ls.Adam([weights[0]]), torch.optim.Adam([weights[1]]))):
        ...     weight.grad = torch.tensor([1.0, -2.0, 3.0])
        ...     optimizer.step()
        >>> torch.equal(*weights)
        True
    """


class AdamW(Found, torch.optim.AdamW):
    """``torch.optim.AdamW`` that also knows how to step behind a sparse exchange; see :class:`Adam`.

    Its weight decay is decoupled from gradients, and acts on all coordinates at every step.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = ls.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        >>> isinstance(optimizer, torch.optim.AdamW)
        True
    """


SERVED = (torch.optim.Adam, torch.optim.AdamW, Adam, AdamW)
"""Classes whose steps the engine can take; of subclasses nobody knows what their steps are."""


def stepping(optimizer: Optimizer) -> Optimizer:
    """The optimizer that takes the steps of one that is wrapped around it.

    Such are ``ZeroRedundancyOptimizer`` and ``PostLocalSGDOptimizer`` of torch (``.optim``), and those that Lightning
    and Fabric hand out (``.optimizer``).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> type(stepping(torch.optim.AdamW([weight]))).__name__
        'AdamW'
    """
    for name in ("optim", "optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer) and _takes_all_steps(inner, optimizer):
            return stepping(inner)
    return optimizer


def _takes_all_steps(inner: Optimizer, optimizer: Optimizer) -> bool:
    """Whether one takes all steps of another one, and not those of some parameters only, as in mixed optimizers."""
    if inner is optimizer:
        return False
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        return True  # of this rank's part; other ranks take the others
    return _ids(inner) == _ids(optimizer)


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def made_for(parameters: Collection[int]) -> list[Optimizer]:
    """Optimizers of this package that hold some of these parameters, given by their ids."""
    return [optimizer for optimizer in list(_made) if holds(optimizer, parameters)]


def holds(optimizer: Optimizer, parameters: Collection[int]) -> bool:
    """Whether an optimizer holds some of these parameters, given by their ids."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def refusal(optimizer: Optimizer, parameters: Collection[int]) -> str | None:
    """Why the engine cannot take an optimizer's steps for some parameters; None: it can.

    Args:
        optimizer: any.
        parameters: ids of those that matter.
    """
    kind = type(stepping(optimizer))
    if kind not in SERVED:
        return f"{kind.__name__} is none of torch's Adam and AdamW"
    for group in optimizer.param_groups:
        if not any(id(parameter) in parameters for parameter in group["params"]):
            continue
        if not group.get("eps", 0.0) > 0:
            return "eps has to be above 0"
        for option in ("amsgrad", "differentiable"):
            if group.get(option):
                return f"{option}=True needs torch's own step"
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            return "Adam's weight_decay is added to gradients: use AdamW"
    return None


def settings_of(optimizers: Iterable[Optimizer], parameters: Collection[int]) -> set[tuple[float, float]]:
    """The second beta and eps that optimizers have for some parameters."""
    return {
        (float(group["betas"][1]), float(group["eps"]))
        for optimizer in optimizers
        for group in optimizer.param_groups
        if any(id(parameter) in parameters for parameter in group["params"])
    }
