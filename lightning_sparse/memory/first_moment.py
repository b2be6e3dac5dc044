"""Adam's first moment behind error feedback: who keeps one, and what to set instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from lightning_sparse.optim import stepping

FAMILY = ("adam", "adafactor")
"""Part of the names of classes: torch's Adam, AdamW, NAdam, RAdam, Adamax; fused and 8-bit ones of other packages."""


class FirstMoment(NamedTuple):
    """An optimizer of Adam's family that averages gradients over steps."""

    optimizer: str
    """Name of the class."""
    beta1: float
    beta2: float | None
    """None where the optimizer has no setting of this kind."""

    def remedy(self) -> str:
        """Sentences: what is wrong, what it costs, and what to set."""
        betas = "beta1=None" if self.beta2 is None else f"betas=(0.0, {self.beta2:g})"
        return (
            f"{self.optimizer} keeps a first moment (beta1 = {self.beta1:g}) behind the sparse exchange, and spreads "
            "what has waited in the residuals over the steps after its arrival. A small GPT with AdamW at density 0.01 "
            "ended at a perplexity of 264 instead of 139. Use lightning_sparse.AdamW, or torch's Adam or AdamW, with "
            "the default memory and a sparsifier whose exchange carries second moments, such as 'union_topk', and with "
            "lightning_sparse.attach call engine.follow([optimizer]) before training: at the same learning rate that "
            f"ends at 135 to 140. Or set {betas} and search the rate upwards, to about four times that of dense "
            "training. docs/adam.md says why."
        )


def first_moment(optimizer: Optimizer, parameters: Collection[int]) -> FirstMoment | None:
    """What an optimizer keeps of some parameters; None if it is not of Adam's family or keeps no first moment.

    Args:
        optimizer: of any package.
        parameters: ids of those that matter.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> first_moment(torch.optim.AdamW([weight]), {id(weight)})
        FirstMoment(optimizer='AdamW', beta1=0.9, beta2=0.999)
        >>> first_moment(torch.optim.AdamW([weight], betas=(0.0, 0.999)), {id(weight)})
        >>> first_moment(torch.optim.SGD([weight], momentum=0.9), {id(weight)})
    """
    if not of_adams_family(optimizer):
        return None
    for group in optimizer.param_groups:
        betas = group.get("betas")
        given = (group.get("beta1"),) if betas is None else betas if isinstance(betas, Sequence) else (betas,)
        beta1, beta2 = (_number(beta) for beta in (*given, None, None)[:2])
        if beta1 and any(id(parameter) in parameters for parameter in group["params"]):
            return FirstMoment(type(stepping(optimizer)).__name__, beta1, beta2)
    return None


def of_adams_family(optimizer: Optimizer) -> bool:
    """Whether an optimizer is of Adam's family, by the names of its classes."""
    return any(word in base.__name__.lower() for base in type(stepping(optimizer)).__mro__ for word in FAMILY)


def _number(beta: Any) -> float | None:
    """None for whatever else another package's optimizer may keep there."""
    try:
        return float(beta)
    except (TypeError, ValueError, RuntimeError):
        return None
