"""Optimizers that train worse behind error feedback: which they are, what it costs, and what to set instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from lightning_sparse.optim import holds, stepping

FAMILY = ("adam", "adafactor")
"""Part of the names of classes: torch's Adam, AdamW, NAdam, RAdam, Adamax; fused and 8-bit ones of other packages."""
OF_ONE_LENGTH = {
    "lion": (
        "steps by signs, behind the sparse exchange by those of what arrived last, as long as nothing else arrives. "
        "With Lion at density 0.01, a small GPT ended at a perplexity of 280 instead of 179, an LSTM at 136 instead of "
        "118"
    ),
    "muon": (
        "makes all directions of a matrix equally long, behind the sparse exchange those of a few coordinates. With "
        "Muon at density 0.01, a small GPT ended at a perplexity of 154 instead of 122, an LSTM at 87 instead of 80"
    ),
}
"""Optimizers whose steps do not grow with gradients, by part of the names of classes: what happens to them."""


class Unsuited(NamedTuple):
    """An optimizer that trains worse behind error feedback."""

    optimizer: str
    """Name of the class."""
    kind: str
    """Key of :data:`OF_ONE_LENGTH`; or ``"adam"``: one of Adam's family that averages gradients over steps."""
    beta1: float | None = None
    """Of Adam's family."""
    beta2: float | None = None
    """None where the optimizer has no setting of this kind."""

    def remedy(self) -> str:
        """Sentences: what is wrong, what it costs, and what to set."""
        if self.kind in OF_ONE_LENGTH:
            return (
                f"{self.optimizer} {OF_ONE_LENGTH[self.kind]}. Use lightning_sparse.AdamW, or torch's AdamW or SGD, "
                "which the exchange serves; or keep the parameters that it steps dense, for instance "
                "dense=['*.weight']. docs/adam.md says more."
            )
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


def unsuited(optimizer: Optimizer, parameters: Collection[int]) -> Unsuited | None:
    """What is wrong with an optimizer for some parameters; None if nothing is known to be.

    Args:
        optimizer: of any package.
        parameters: ids of those that matter.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1, 1))
        >>> unsuited(torch.optim.AdamW([weight]), {id(weight)})
        Unsuited(optimizer='AdamW', kind='adam', beta1=0.9, beta2=0.999)
        >>> unsuited(torch.optim.AdamW([weight], betas=(0.0, 0.999)), {id(weight)})
        >>> unsuited(torch.optim.Muon([weight]), {id(weight)})
        Unsuited(optimizer='Muon', kind='muon', beta1=None, beta2=None)
        >>> unsuited(torch.optim.SGD([weight], momentum=0.9), {id(weight)})
    """
    name = type(stepping(optimizer)).__name__
    for kind in OF_ONE_LENGTH:
        if _is(kind, optimizer):
            return Unsuited(name, kind) if holds(optimizer, parameters) else None
    if not _of_adams_family(optimizer):
        return None
    for group in optimizer.param_groups:
        betas = group.get("betas")
        given = (group.get("beta1"),) if betas is None else betas if isinstance(betas, Sequence) else (betas,)
        beta1, beta2 = (_number(beta) for beta in (*given, None, None)[:2])
        if beta1 and any(id(parameter) in parameters for parameter in group["params"]):
            return Unsuited(name, "adam", beta1, beta2)
    return None


def may_be_unsuited(optimizer: Optimizer) -> bool:
    """Whether :func:`unsuited` knows an optimizer by the names of its classes."""
    return _of_adams_family(optimizer) or any(_is(kind, optimizer) for kind in OF_ONE_LENGTH)


def _of_adams_family(optimizer: Optimizer) -> bool:
    return any(word in name.lower() for name in _names(optimizer) for word in FAMILY)


def _is(kind: str, optimizer: Optimizer) -> bool:
    """By a whole word of a name, as in ``FusedLion8bit`` and ``lion``, not in ``Medallion``."""
    words = f"{kind.title()}|{kind.upper()}|^{kind}|_{kind}"
    return any(re.search(words, name) for name in _names(optimizer))


def _names(optimizer: Optimizer) -> list[str]:
    """Of its class and the classes that it is derived from."""
    return [base.__name__ for base in type(stepping(optimizer)).__mro__]


def _number(beta: Any) -> float | None:
    """None for whatever else another package's optimizer may keep there."""
    try:
        return float(beta)
    except (TypeError, ValueError, RuntimeError):
        return None
