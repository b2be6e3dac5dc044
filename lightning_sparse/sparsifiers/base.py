"""What a sparsifier is.

A sparsifier looks at one rank's accumulator and picks coordinates. It never touches the accumulator, and all that it
knows of other ranks comes in through the context: the counts of the previous step, and whatever the ranks share with
``ctx.gather`` while they select.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sparse.registry import Registry
from lightning_sparse.types import Agreement, Context, Selection


class Sparsifier(ABC):
    """Picks coordinates of a group. A frozen dataclass of hyper-parameters, nothing else: what evolves is the state."""

    agreement: ClassVar[Agreement]
    """How the picks of different ranks relate."""
    exchange: ClassVar[str]
    """Name of the natural exchange, used where the user asks for none."""

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
    def select(self, acc: Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
        """Pick.

        Args:
            acc: (numel,) finite accumulator of this rank; read only.
            state: what :meth:`init` or the previous call returned; not modified.
            ctx: the step.

        Returns:
            The picks and the next state.
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


def check_positive_integer(value: object, name: str) -> None:
    """Raise unless a setting is an integer of at least 1.

    Raises:
        ValueError: naming the setting.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"Expected {name} to be a positive integer, but got {value!r}.")
