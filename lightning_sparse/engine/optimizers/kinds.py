"""Kinds of optimizers: those whose steps the engine can take, and memories that do not fit them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_sparse.core.checks import TINY
from lightning_sparse.core.layout import own
from lightning_sparse.methods.memory import Memory

ADAPTING = {"betas", "rho", "alpha", "etas", "lr_decay", "beta2_decay", "history_size"}
"""Settings of torch's optimizers other than SGD, each of which has one of these."""


def is_adam(kind: type[Optimizer]) -> bool:
    """Return True for torch's Adam and AdamW; nobody knows the steps of subclasses."""
    return kind in (torch.optim.Adam, torch.optim.AdamW)


def stepping(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that takes the steps of one that is wrapped around it.

    Such are ``ZeroRedundancyOptimizer`` and ``PostLocalSGDOptimizer`` of torch (``.optim``), those that Lightning and
    Fabric hand out (``.optimizer``), and SAM as most write it (``.base_optimizer``).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> type(stepping(torch.optim.AdamW([weight]))).__name__
        'AdamW'
    """
    in_parts = is_in_parts(*type(optimizer).__mro__)
    for name in ("optim", "optimizer", "base_optimizer"):
        inner = getattr(optimizer, name, None)
        if not isinstance(inner, Optimizer) or inner is optimizer:
            continue
        # Not one for some parameters only, as in mixed optimizers. Of one in parts it is this rank's.
        if in_parts or ids_of(inner) == ids_of(optimizer):
            return stepping(inner)
    return optimizer


@cache
def is_in_parts(*kinds: type[object]) -> bool:
    """Return True if one of these steps a part of the parameters on each rank."""
    return "ZeroRedundancyOptimizer" in [kind.__name__ for kind in kinds]


def is_called(word: str, optimizer: Optimizer) -> bool:
    """Return True if a class of an optimizer has a whole word, as in FusedLion8bit and lion, not in Medallion."""
    names = (base.__name__ for base in type(stepping(optimizer)).__mro__)
    return any(re.search(f"{word.title()}|{word.upper()}|^{word}|_{word}", name) for name in names)


def listed(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return one optimizer or several, as users give them, as a list.

    Raises:
        ValueError: for something else.
    """
    chosen = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    if not all(hasattr(one, "param_groups") for one in chosen):
        came = ", ".join(type(one).__name__ for one in chosen)
        raise ValueError(f"Expected an optimizer, or a list of them, but got {came}.")
    return chosen


def refuse_closure(optimizer: Optimizer) -> None:
    """Raise a ValueError for an optimizer whose step evaluates the loss, such as LBFGS: a flush has none."""
    if needs_closure(optimizer):
        raise ValueError(
            f"Expected optimizers that step with the gradients that are there, but the step of "
            f"{type(optimizer).__name__} evaluates the loss: it cannot apply what has waited at the end of training."
        )


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if the step of an optimizer evaluates the loss, such as LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@contextmanager
def with_settings(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Give the groups of an optimizer other settings within the block, such as rates of an earlier step."""
    pairs = list(zip(optimizer.param_groups, settings, strict=False))
    before = [{name: group[name] for name in others if name in group} for group, others in pairs]
    try:
        for group, others in pairs:
            group.update(others)
        yield
    finally:
        for (group, _), others in zip(pairs, before, strict=True):
            group.update(others)


@contextmanager
def gradients_aside(optimizers: Iterable[Optimizer], more: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters, also those of optimizers, have no gradients within the block; then those of before again."""
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    parameters = list({id(p): p for p in (*held, *more)}.values())
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def ids_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def rehearses(optimizer: Optimizer) -> bool:
    """Return True if an optimizer is about to take the step by which ``torch.distributed.checkpoint`` makes its state.

    It has no state yet, and its rates and all gradients are 0: nothing is applied.
    """
    if getattr(optimizer, "state", True):
        return False
    rates = [group.get("lr") for group in optimizer.param_groups]
    on_host = all(not isinstance(rate, torch.Tensor) or rate.device.type == "cpu" for rate in rates)
    if not on_host or any(rate != 0 for rate in rates):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return all(p.grad is not None and not bool(own(p.grad).any()) for p in parameters)


def holds(optimizer: Optimizer, parameters: Set[int]) -> bool:
    """Return True if an optimizer holds some of these parameters, given by their ids."""
    return bool(groups_with(optimizer, parameters))


def groups_with(optimizer: Optimizer, parameters: Set[int]) -> list[dict[str, Any]]:
    """Return its groups that hold some of these parameters."""
    return [group for group in optimizer.param_groups if not parameters.isdisjoint(map(id, group["params"]))]


def refusal(optimizer: Optimizer, parameters: Set[int]) -> str | None:
    """Say why the engine cannot take an optimizer's steps for some parameters; None: it can.

    Args:
        optimizer: any.
        parameters: ids of those that matter.
    """
    kind = type(stepping(optimizer))
    if not is_adam(kind):
        return f"{kind.__name__} is none of torch's Adam and AdamW"
    for group in groups_with(optimizer, parameters):
        if not group.get("eps", 0.0) >= TINY:
            return f"eps has to be at least {TINY:.2g}"
        for option in ("amsgrad", "differentiable"):
            if group.get(option):
                return f"{option}=True needs torch's own step"
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            return "Adam's weight_decay is added to gradients: use AdamW"
    return None


def decays_of(optimizers: Iterable[Optimizer]) -> list[tuple[float | None, float | None]]:
    """Return the second beta and eps of each parameter group of Adams; None: only a device knows it."""

    def known(value: Any) -> float | None:
        return None if isinstance(value, torch.Tensor) and value.device.type != "cpu" else float(value)

    found = []
    for optimizer in optimizers:
        if is_adam(type(stepping(optimizer))):
            found += [(known(group["betas"][1]), known(group["eps"])) for group in optimizer.param_groups]
    return found


def settings_of(optimizers: Iterable[Optimizer], parameters: Set[int]) -> set[tuple[float, float]]:
    """Return the second betas and eps that optimizers have for some parameters."""
    return {
        (float(group["betas"][1]), float(group["eps"]))
        for optimizer in optimizers
        for group in groups_with(optimizer, parameters)
    }


def adapts(optimizer: Optimizer) -> bool:
    """Return True if an optimizer divides gradients by a size of its own, as all of torch's do but SGD."""
    return any(ADAPTING & group.keys() for group in optimizer.param_groups)


def check_pair(memory: Memory, optimizer: Optimizer) -> None:
    """Look at an optimizer that will be given the averages of a memory; warn where the two may not go together.

    Raises:
        ValueError: if they do not.
    """
    name = type(optimizer).__name__
    if memory.decays and any(group.get("weight_decay", 0) for group in optimizer.param_groups):
        rank_zero_warn(
            f"WeightDecay adds the decay to the gradients, and {name} would apply its own on top of it. Set its "
            "weight_decay to 0, or use the memory without WeightDecay."
        )
    if memory.reads_rates and not isinstance(stepping(optimizer), SGD):
        raise ValueError(
            "Residual(rates=True) needs steps of lr * gradient, as torch.optim.SGD takes them, but got "
            f"{type(stepping(optimizer)).__name__}. Leave rates=False."
        )
    if memory.averages == "gradients":
        return
    has_momentum = any(group.get("momentum", 0) or group.get("betas", (0,))[0] for group in optimizer.param_groups)
    if memory.averages == "velocities" and has_momentum:
        rank_zero_warn(
            f"MomentumCorrection sends velocities, and {name} would apply momentum to them a second time. Use "
            "torch.optim.SGD with momentum=0, or memory=Residual()."
        )
    if memory.averages == "directions" and (adapts(optimizer) or has_momentum):
        raise ValueError(
            "AdamCorrection sends Adam's directions, and the optimizer must only apply them, but got "
            f"{name}{'' if adapts(optimizer) else ' with momentum'}. Set torch.optim.SGD(lr=<the lr you would give "
            "AdamW>, momentum=0, weight_decay=<AdamW's>)."
        )
