"""What a sparsifier is.

A sparsifier looks at one rank's accumulator and picks coordinates. It never touches the accumulator. Of other ranks it
knows the counts of the previous step, which are in the context, and what it asks them for: a sparsifier that needs
others while it selects is a generator that yields :mod:`messages <lightning_sparse.core.messages>`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.messages import Steps
from lightning_sparse.core.registry import Registry
from lightning_sparse.core.step import Agreement, Context, Selection

Selected = tuple[Selection, Any]
"""The picks of this rank, and the next state of the sparsifier."""


class Sparsifier(ABC):
    """Picks coordinates of a group. A frozen dataclass of hyper-parameters, nothing else: what evolves is the state."""

    agreement: ClassVar[Agreement]
    """How the picks of different ranks relate."""
    exchange: ClassVar[str]
    """Name of the natural exchange, used where the user asks for none."""
    follows_density: ClassVar[bool] = True
    """Whether a density of 1 means everything. The sparsifier is then not asked, and the group is exchanged as DDP does
    it, whatever the exchange: see :func:`~lightning_sparse.engine.pipeline.exchange_group`."""

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> Any:
        """State for one group of ``numel`` coordinates before its first step; None if there is none.

        Args:
            numel: coordinates of the group.
            world_size: number of ranks n.
            density: target density at the first step.
            device: where the group's tensors are.

        Raises:
            ValueError: if the method cannot serve such a group.
        """
        return None

    @abstractmethod
    def select(self, acc: Tensor, state: Any, ctx: Context) -> Selected | Steps[Selected]:
        """Pick.

        Args:
            acc: (numel,) finite accumulator of this rank; read only.
            state: what :meth:`init` or the previous call returned; not modified.
            ctx: the step.

        Returns:
            The picks and the next state, or a coroutine that asks for messages and ends with these.
        """

    def ranges(self, numel: int, state: Any, ctx: Context) -> Tensor | None:
        """(n, 2) first and past-the-end coordinate that each rank looked at, for methods that give ranks ranges.

        Args:
            numel: coordinates of the group.
            state: the state that :meth:`select` returned in this step.
            ctx: the same context.
        """
        return None


SPARSIFIERS: Registry[Sparsifier] = Registry("sparsifier", Sparsifier)  # type: ignore[type-abstract]
"""Sparsifiers by name, for configs, strategy names and error messages."""
