"""What the user chose."""

from __future__ import annotations

from typing import NamedTuple

from lightning_sparse.density import DensitySchedule, as_schedule
from lightning_sparse.exchanges import Exchange, as_exchange
from lightning_sparse.memory import Memory, NoMemory, as_memory
from lightning_sparse.sparsifiers import SPARSIFIERS, Sparsifier

EXECUTORS = ("auto", "inline", "thread")
NONFINITE = ("skip", "nan")
"""What to do with gradients that are not finite."""


class Settings(NamedTuple):
    """What the user chose, checked and resolved."""

    sparsifier: Sparsifier
    density: DensitySchedule
    memory: Memory
    exchange: Exchange
    executor: str
    nonfinite: str = "skip"
    lr_aware: bool = False

    @classmethod
    def check(
        cls,
        sparsifier: Sparsifier | str,
        density: float | DensitySchedule,
        memory: Memory | None,
        exchange: Exchange | str | None,
        executor: str,
        nonfinite: str = "skip",
        lr_aware: bool = False,
    ) -> Settings:
        """Resolve names and check that the parts go together.

        Raises:
            ValueError: for an unknown name, a density outside (0, 1], something that is no memory, an exchange that
                does not accept the sparsifier, or ``lr_aware`` with a memory that keeps no residual.
        """
        resolved = SPARSIFIERS.resolve(sparsifier)
        memory = as_memory(memory)
        if executor not in EXECUTORS:
            raise ValueError(f"Expected executor to be one of {', '.join(map(repr, EXECUTORS))}, but got {executor!r}.")
        if nonfinite not in NONFINITE:
            raise ValueError(
                f"Expected nonfinite to be one of {', '.join(map(repr, NONFINITE))}, but got {nonfinite!r}."
            )
        if lr_aware and isinstance(memory, NoMemory):
            raise ValueError(
                "lr_aware=True rescales residuals, and NoMemory has none. Use memory=Residual() or lr_aware=False."
            )
        resolved_exchange = as_exchange(exchange, resolved)
        return cls(resolved, as_schedule(density), memory, resolved_exchange, executor, nonfinite, bool(lr_aware))

    @property
    def algorithm(self) -> str:
        """What state that was saved depends on."""
        return repr((self.sparsifier, self.density, self.memory, self.exchange))
