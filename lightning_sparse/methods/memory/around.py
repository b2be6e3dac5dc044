"""What memories have in common that change the gradient and leave the rest to another memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Absorbed, Context, Update
from lightning_sparse.methods.memory.base import Memory


class Around(Memory):
    """Changes each rank's gradient before another memory accumulates it; dense groups' gradients, too."""

    memory: Memory
    """The memory inside; a field of every subclass."""

    @abstractmethod
    def change_(self, grad: Gradient, ctx: Context) -> None:
        """Change the gradient in place."""

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> Any:
        """The state of the memory inside."""
        return self.memory.init(numel, device, dtype)

    def absorb_(self, state: Any, grad: Gradient, ctx: Context) -> Absorbed:
        """Change the gradient and pass it on."""
        self.change_(grad, ctx)
        return self.memory.absorb_(state, grad, ctx)

    def settle_(
        self, state: Any, update: Update, rounding: Tensor | None = None, skipped: Tensor | None = None
    ) -> None:
        """Settle the memory inside."""
        self.memory.settle_(state, update, rounding, skipped)

    def divisors(self, state: Any, update: Update, ctx: Context) -> Tensor | None:
        """Return those of the memory inside."""
        return self.memory.divisors(state, update, ctx)

    def divide_all(
        self, state: Any, average: Tensor, mean: Callable[[Tensor], Tensor], density: float
    ) -> Tensor | None:
        """Return those of the memory inside."""
        return self.memory.divide_all(state, average, mean, density)

    def lengthen_(self, divisors: Tensor, by: Tensor) -> None:
        """Multiply those of the memory inside."""
        self.memory.lengthen_(divisors, by)

    def complete_(self, state: Any, span: slice, names: Collection[str]) -> None:
        """Complete the state of the memory inside."""
        self.memory.complete_(state, span, names)

    def start_(self, state: Any, second: Tensor, spans: Sequence[slice], steps: float) -> None:
        """Start the memory inside."""
        self.memory.start_(state, second, spans, steps)

    def adapt_(self, state: Any, before: Memory) -> None:
        """Adapt the memory inside."""
        self.memory.adapt_(state, before.memory if isinstance(before, Around) else before)

    def scale_(self, state: Any, factors: Sequence[tuple[slice, float]]) -> None:
        """Scale the residual of the memory inside."""
        self.memory.scale_(state, factors)

    def vectors(self, state: Any) -> dict[str, Tensor]:
        """Return those of the memory inside."""
        return self.memory.vectors(state)

    def residual(self, state: Any) -> Tensor | None:
        """Return that of the memory inside."""
        return self.memory.residual(state)

    def carry_(self, state: Any, target: slice, memory: Memory, other: Any, source: slice) -> None:
        """Carry between the memories inside."""
        self.memory.carry_(state, target, memory.memory if isinstance(memory, Around) else memory, other, source)

    def counters(self, state: Any) -> dict[str, Tensor]:
        """Return those of the memory inside."""
        return self.memory.counters(state)

    def for_dense(self) -> Memory:
        """Dense groups' gradients are changed in the same way."""
        changed: Memory = replace(self, memory=self.memory.for_dense())  # type: ignore[type-var]  # all are dataclasses
        return changed

    @property
    def reads_parameters(self) -> bool:
        """Whether this memory or the one inside needs them."""
        return self.memory.reads_parameters

    @property
    def remembers_at_once(self) -> bool:
        """As the memory inside."""
        return self.memory.remembers_at_once

    @property
    def needs_second(self) -> bool:
        """As the memory inside."""
        return self.memory.needs_second

    @property
    def second_decay(self) -> float:
        """As the memory inside."""
        return self.memory.second_decay

    @property
    def averages(self) -> Literal["gradients", "velocities", "directions"]:
        """As the memory inside."""
        return self.memory.averages

    @property
    def decays(self) -> bool:
        """As the memory inside."""
        return self.memory.decays


def check_inside(memory: object) -> None:
    """Raise unless this is a memory.

    Raises:
        ValueError: saying what came.
    """
    if not isinstance(memory, Memory):
        raise ValueError(f"Expected memory to be a Memory such as Residual(), but got {memory!r}.")
