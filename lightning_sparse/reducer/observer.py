"""What looks on while an engine works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning_sparse.reducer.engine import Engine


class StepObserver(Protocol):
    """Called at the start of every step of an engine, whose groups it may inspect and change."""

    def before_step(self, engine: Engine) -> None:
        """The first gradients of a step are here and nothing is exchanged yet; called on all ranks."""

    def close(self) -> None:
        """The engine ends."""


def can_observe(given: Any) -> bool:
    """Whether something has the methods of a :class:`StepObserver`."""
    return all(callable(getattr(given, name, None)) for name in ("before_step", "close"))
