"""Detection of optimizers that train worse behind error feedback, with measured costs and remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import ASGD, SGD, Optimizer

from lightning_sparse.core.console import page
from lightning_sparse.engine.optimizers.kinds import groups_with, holds, is_called, stepping

ADAM = "torch's AdamW with an exchange that carries second moments, such as the default one of 'union_top_k'"
OTHERS = f"Use torch's SGD, or {ADAM}; or keep the parameters that it steps dense, for instance dense=['*.weight']."
MEANT = "memory='residual' says that it is meant so."
BY_NAME = ("lion", "rprop", "muon", "lbfgs")
"""Parts of class names of optimizers that are recognised by name."""
ROOTS = ("rmsprop", "adagrad", "adadelta", "adafactor")
"""Parts of class names of optimizers that divide by second moments and may have no first one."""
PROBLEMS = {
    "lion": "steps by signs, behind the sparse exchange by those of what arrived last, as long as nothing else "
    "arrives. With Lion at density 0.01, a small GPT ended at a perplexity of 280 instead of 179, an LSTM at 136 "
    f"instead of 118. {OTHERS}",
    "rprop": "steps by signs, behind the sparse exchange by those of what arrives, which is a sum of many gradients or "
    f"nothing. {OTHERS}",
    "muon": "makes all directions of a matrix equally long, behind the sparse exchange those of a few coordinates. "
    "With Muon at density 0.01, a small GPT ended at a perplexity of 154 instead of 122, an LSTM at 87 instead of 80. "
    f"{OTHERS}",
    "lbfgs": "decides on each rank, by that rank's own loss, how often it evaluates its closure. Behind the sparse "
    "exchange, as behind DDP, ranks may stop after different numbers of evaluations, and then wait for each other. "
    f"Use torch's SGD, or {ADAM}.",
    "momentum": "keeps momentum ({beta1:g}) behind the sparse exchange, and spends what has waited over the steps "
    "after its arrival. That is made up for with torch.optim.SGD itself only, not with classes derived from it. A "
    "network on CIFAR-10 with SGD at density 0.01 ended at 61 % errors without, at 45 % with it, and at 44 % with "
    f"dense training. Use torch.optim.SGD, or its AdamW; {MEANT}",
    "roots": "divides by second moments of what arrives behind the sparse exchange, sums of many gradients and zeros, "
    "so that at the rate of dense training its steps are too short. A small LSTM with AdamW without a first moment "
    "ended in this way at a perplexity of 36 instead of 28, and of 31 at twice the rate (density 0.01). Use "
    f"{ADAM}, or search the rate upwards; {MEANT}",
    "unknown": "keeps a state of its own behind the sparse exchange, where a coordinate gets a zero most of the time, "
    "and then the sum of what has waited. Compare its loss with that of dense training (sparsifier='everything'), or "
    f"use torch's SGD, or its AdamW; {MEANT}",
    "first moment": "keeps a first moment (beta1 = {beta1:g}) behind the sparse exchange, and spreads what has waited "
    "over the steps after its arrival. A small GPT with AdamW at density 0.01 ended at a perplexity of 264 instead of "
    f"139. Use {ADAM}, with the default memory: at the same learning rate that ends at 135 to 140. Or set "
    "{betas} and search the rate upwards, to about four times that of dense training.",
}
"""Sentences on the problem, its cost, and the settings that avoid it, by kind."""


class Unsuited(NamedTuple):
    """An optimizer that trains worse behind error feedback."""

    optimizer: str
    """Name of the class."""
    kind: str
    """Key of :data:`PROBLEMS`: one of :data:`BY_NAME`; ``"first moment"`` or ``"momentum"``, which it keeps;
    ``"roots"``: of :data:`ROOTS`; ``"unknown"``: it keeps another state."""
    beta1: float | None = None
    """Of the first moment, or the momentum."""
    beta2: float | None = None
    """None if the optimizer has no such setting."""

    @property
    def by_choice(self) -> bool:
        """True if a user who has chosen a memory may intend this: learning rates can be tuned for it."""
        return self.kind in ("momentum", "roots", "unknown")

    def remedy(self) -> str:
        """Return sentences on the problem, its cost, and the settings that avoid it."""
        more = page("guide/optimizers")
        betas = "beta1=None" if self.beta2 is None else f"betas=(0.0, {self.beta2:g})"
        return f"{self.optimizer} {PROBLEMS[self.kind].format(beta1=self.beta1, betas=betas)} More: {more}."


def unsuited(optimizer: Optimizer, parameters: Set[int]) -> Unsuited | None:
    """Return the problem of an optimizer for some parameters; None if none is known.

    The state of an unknown optimizer is known after its first step.

    Args:
        optimizer: of any package.
        parameters: ids of the parameters to check.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1, 1))
        >>> unsuited(torch.optim.AdamW([weight]), {id(weight)})
        Unsuited(optimizer='AdamW', kind='first moment', beta1=0.9, beta2=0.999)
        >>> unsuited(torch.optim.AdamW([weight], betas=(0.0, 0.999)), {id(weight)})
        >>> unsuited(torch.optim.Muon([weight]), {id(weight)})
        Unsuited(optimizer='Muon', kind='muon', beta1=None, beta2=None)
        >>> unsuited(torch.optim.SGD([weight], momentum=0.9), {id(weight)})
    """
    inner = stepping(optimizer)
    name = type(inner).__name__
    if type(inner) in (SGD, ASGD) or not holds(optimizer, parameters):
        return None
    names = [base.__name__ for base in type(inner).__mro__]
    for kind in BY_NAME:
        if is_called(kind, inner):
            return Unsuited(name, kind)
    understood = False
    for group in groups_with(optimizer, parameters):
        beta1, beta2, momentum = _averaging(group, name.lower())
        if beta1:
            return Unsuited(name, "first moment", beta1, beta2)
        if momentum:
            return Unsuited(name, "momentum", momentum)
        understood = understood or beta1 is not None
    if any(word in one.lower() for one in names for word in ROOTS):
        return Unsuited(name, "roots")
    return Unsuited(name, "unknown") if not understood and _keeps(inner, parameters) else None


def _keeps(optimizer: Optimizer, parameters: Set[int]) -> bool:
    """Return True if an optimizer keeps more than scalars for some parameters."""
    known = getattr(optimizer, "state", {})  # optimizers of users need not be torch's
    states = (state for parameter, state in known.items() if id(parameter) in parameters)
    return any(isinstance(part, Tensor) and part.numel() > 1 for state in states for part in state.values())


def _averaging(group: Mapping[str, Any], name: str) -> tuple[float | None, float | None, float | None]:
    """Return first and second decay of an Adam, and momentum, of a parameter group of an optimizer of this name."""
    betas, momentum = group.get("betas"), _number(group.get("momentum"))
    given = (group.get("beta1"),) if betas is None else betas if isinstance(betas, Sequence) else (betas,)
    first, second = (_number(beta) for beta in (*given, None, None)[:2])
    if "rmsprop" in name:  # bitsandbytes keeps all settings in betas
        return None, None, momentum or second
    if "sgd" in name or "lars" in name:
        return None, None, momentum or first
    return first, second, momentum


def _number(beta: Any) -> float | None:
    """Return a decay as a float, or None for any other value of another package's optimizer."""
    try:
        return float(beta)
    except (TypeError, ValueError, RuntimeError):
        return None
