"""Memories that transform the gradient and leave the rest to another memory."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Absorbed, Context
from lightning_sparse.methods.memory.base import Memory


def _inside(name: str) -> Any:
    """Return the attribute of the memory inside as a property."""
    return property(lambda transform: getattr(transform.memory, name))


class GradientTransform(Memory):
    """Transforms each rank's gradient before another memory absorbs it; dense groups' gradients, too.

    Everything but :meth:`transform_` is that of the memory inside.
    """

    memory: Memory
    """The memory inside; a field of every subclass."""

    init = _inside("init")
    measure_anew_ = _inside("measure_anew_")
    settle_ = _inside("settle_")
    skip_ = _inside("skip_")
    divisors = _inside("divisors")
    divide_all = _inside("divide_all")
    vectors = _inside("vectors")
    residual = _inside("residual")
    carry_ = _inside("carry_")
    complete_ = _inside("complete_")
    start_ = _inside("start_")
    adapt_ = _inside("adapt_")
    counters = _inside("counters")
    reads_parameters = _inside("reads_parameters")
    reads_rates = _inside("reads_rates")
    remembers_at_once = _inside("remembers_at_once")
    needs_second = _inside("needs_second")
    second_decay = _inside("second_decay")
    averages = _inside("averages")
    decays = _inside("decays")

    def __post_init__(self) -> None:
        if not isinstance(self.memory, Memory):
            raise ValueError(f"Expected memory to be a Memory such as Residual(), but got {self.memory!r}.")

    @abstractmethod
    def transform_(self, grad: Gradient, ctx: Context) -> None:
        """Change the gradient in place."""

    def absorb_(self, state: Any, grad: Gradient, ctx: Context) -> Absorbed:
        """Transform the gradient and pass it on."""
        self.transform_(grad, ctx)
        return self.memory.absorb_(state, grad, ctx)

    def for_dense(self) -> Memory:
        """Transform dense groups' gradients in the same way."""
        return self._around(self.memory.for_dense())

    def for_whole(self) -> Memory:
        """Transform gradients of groups of density 1 in the same way."""
        return self._around(self.memory.for_whole())

    def _around(self, memory: Memory) -> Memory:
        changed: Memory = replace(self, memory=memory)  # type: ignore[type-var]  # all are dataclasses
        return changed
