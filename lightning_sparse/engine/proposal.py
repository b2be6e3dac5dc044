"""The result of a group's exchange, until it is known whether the step counts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.step import GroupState, Update
from lightning_sparse.engine.metrics import Statistics
from lightning_sparse.ops import put_


class Proposed(NamedTuple):
    """A step of a group that has been exchanged, and is not settled yet."""

    update: Update
    rounding: Tensor | None
    """(u,) what casting the average to the gradient's dtype lost; None: nothing."""
    after: GroupState
    """The state that a step that counts leaves; its memory is the group's own, which has not been settled."""
    statistics: Statistics
    void: Tensor
    """() bool: whether something was not finite on any rank."""
    divisor: Tensor | None = None
    """(u,) what averages are divided by, see :meth:`~lightning_sparse.methods.memory.Memory.divisors`."""


def spread_divisor(indices: Tensor | None, by: Tensor, numel: int) -> Tensor:
    """Return the (numel,) divisors of all coordinates: 1 where no average arrived."""
    if indices is None:
        return by
    every = torch.ones(numel + 1, dtype=by.dtype, device=by.device)
    put_(every, indices, by)
    return every[:-1]
