"""Interface of sparsifiers.

A sparsifier reads one rank's accumulator and selects coordinates. It never writes to the accumulator. Of other ranks it
knows the counts of the previous step, which are in the context. A sparsifier that needs more from them while it selects
is a generator that yields :mod:`messages <lightning_sparse.core.messages>`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.checks import Settings
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.registry import Registry
from lightning_sparse.core.step import Agreement, Context, Selection

Selected = tuple[Selection, Any]
"""The selection of this rank, and the next state of the sparsifier."""


class Sparsifier(Settings, ABC):
    """Base class of sparsifiers: a frozen dataclass of hyper-parameters; anything that changes is in the state."""

    agreement: ClassVar[Agreement]
    """Relation between the selections of different ranks."""
    exchange: ClassVar[str]
    """Name of the natural exchange, the default."""
    is_its_exchange: ClassVar[bool] = False
    """True if the natural exchange is the method, so that no other takes its place by itself."""
    follows_density: ClassVar[bool] = True
    """True if a density of 1 means all coordinates. The sparsifier is then not called, and the group is averaged as by
    DDP, for any exchange: see :func:`~lightning_sparse.engine.pipeline.exchange_group`."""

    reads_runs: ClassVar[bool] = False
    """True if :meth:`select` takes scores as :class:`~lightning_sparse.core.layout.InRuns`, too; else they are joined,
    where a gradient lies in several runs."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Let a method that selects by itself get one vector, unless it says otherwise."""
        super().__init_subclass__(**given)
        if "select" in vars(cls) and "reads_runs" not in vars(cls):
            cls.reads_runs = False

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> Any:
        """Return the state for one group of ``numel`` coordinates before its first step; None if there is none.

        Args:
            numel: coordinates of the group.
            world_size: number of ranks n.
            density: target density at the first step.
            device: of the group's tensors.

        Raises:
            ValueError: if the method cannot serve such a group.
        """
        return None

    @abstractmethod
    def select(self, acc: Tensor, state: Any, ctx: Context) -> Selected | Steps[Selected]:
        """Select coordinates.

        Args:
            acc: (numel,) finite accumulator of this rank; read only.
            state: result of :meth:`init` or of the previous call; not modified.
            ctx: the step.

        Returns:
            The selection and the next state, or a coroutine that yields messages and returns these.
        """

    def ranges(self, numel: int, state: Any, ctx: Context) -> Tensor | None:
        """Return (n, 2) first and past-the-end coordinate of each rank's range, for methods with ranges.

        Args:
            numel: coordinates of the group.
            state: the state that :meth:`select` returned in this step.
            ctx: the same context.
        """
        return None


SPARSIFIERS: Registry[Sparsifier] = Registry("sparsifier", Sparsifier)  # type: ignore[type-abstract]
"""Sparsifiers by name, for configs, strategy names and error messages."""
