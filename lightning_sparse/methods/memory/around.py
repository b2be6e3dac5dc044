"""What memories have in common that change the gradient and leave the rest to another memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Context, Update
from lightning_sparse.methods.memory.base import Memory


@dataclass(frozen=True)
class AroundState:
    """The state of the memory inside."""

    numel: int
    inner: Any


class Around(Memory):
    """Changes each rank's gradient before another memory accumulates it; dense groups' gradients, too."""

    memory: Memory
    """The memory inside; a field of every subclass."""

    @abstractmethod
    def change_(self, grad: Gradient, ctx: Context) -> None:
        """Change the gradient in place."""

    def init(self, numel: int, device: torch.device, dtype: torch.dtype) -> AroundState:
        """As the memory inside."""
        return AroundState(numel, self.memory.init(numel, device, dtype))

    def accumulate_(self, state: AroundState, grad: Gradient, ctx: Context) -> Tensor:
        """Change the gradient and pass it on."""
        self.change_(grad, ctx)
        return self.memory.accumulate_(state.inner, grad, ctx)

    def score_(self, state: AroundState, acc: Tensor, grad: Gradient, ctx: Context) -> Tensor | None:
        """As the memory inside."""
        return self.memory.score_(state.inner, acc, grad, ctx)

    def second(self, state: AroundState) -> Tensor | None:
        """As the memory inside."""
        return self.memory.second(state.inner)

    def divisor(self, state: AroundState) -> Tensor | None:
        """As the memory inside."""
        return self.memory.divisor(state.inner)

    def lengthen_(self, state: AroundState, where: Tensor | slice, by: Tensor) -> None:
        """As the memory inside."""
        self.memory.lengthen_(state.inner, where, by)

    def divide_all_(
        self, state: AroundState, average: Tensor, mean: Callable[[Tensor], Tensor], density: float
    ) -> None:
        """As the memory inside."""
        self.memory.divide_all_(state.inner, average, mean, density)

    def complete_(self, state: AroundState, span: slice, names: Collection[str]) -> None:
        """As the memory inside."""
        self.memory.complete_(state.inner, span, names)

    def start_(self, state: AroundState, second: Tensor, spans: Sequence[slice], steps: float) -> None:
        """As the memory inside."""
        self.memory.start_(state.inner, second, spans, steps)

    def settle_(self, state: AroundState, update: Update, rounding: Tensor | None = None) -> None:
        """As the memory inside."""
        self.memory.settle_(state.inner, update, rounding)

    def commit(self, state: AroundState, void: Tensor | bool, unused: Sequence[slice] = ()) -> AroundState:
        """As the memory inside."""
        return replace(state, inner=self.memory.commit(state.inner, void, unused))

    def scale(self, state: AroundState, factors: Sequence[tuple[slice, float]]) -> AroundState:
        """As the memory inside."""
        return replace(state, inner=self.memory.scale(state.inner, factors))

    def vectors(self, state: AroundState) -> dict[str, Tensor]:
        """As the memory inside."""
        return self.memory.vectors(state.inner)

    def residual(self, state: AroundState) -> Tensor | None:
        """As the memory inside."""
        return self.memory.residual(state.inner)

    def carry_(self, state: AroundState, target: slice, memory: Memory, other: Any, source: slice) -> None:
        """As the memories inside."""
        if isinstance(memory, Around):
            memory, other = memory.memory, other.inner
        self.memory.carry_(state.inner, target, memory, other, source)

    def counters(self, state: AroundState) -> dict[str, Tensor]:
        """As the memory inside."""
        return self.memory.counters(state.inner)

    def for_dense(self) -> Memory:
        """Dense groups' gradients are changed in the same way."""
        changed: Memory = replace(self, memory=self.memory.for_dense())  # type: ignore[type-var]  # all are dataclasses
        return changed

    @property
    def reads_parameters(self) -> bool:
        """Whether this memory or the one inside needs them."""
        return self.memory.reads_parameters

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
