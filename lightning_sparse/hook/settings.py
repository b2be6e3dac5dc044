"""What the user chose."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch

from lightning_sparse.collective import Collective
from lightning_sparse.density import DensitySchedule, as_schedule
from lightning_sparse.exchanges import Exchange, as_exchange
from lightning_sparse.memory import Memory, as_memory
from lightning_sparse.sparsifiers import SPARSIFIERS, Sparsifier

EXECUTORS = ("auto", "inline", "thread")


class Settings(NamedTuple):
    """What the user chose, checked and resolved."""

    sparsifier: Sparsifier
    density: DensitySchedule
    memory: Memory
    exchange: Exchange
    executor: str

    @classmethod
    def check(
        cls,
        sparsifier: Sparsifier | str,
        density: float | DensitySchedule,
        memory: Memory | None,
        exchange: Exchange | str | None,
        executor: str,
    ) -> Settings:
        """Resolve names and check that the parts go together.

        Raises:
            ValueError: for an unknown name, a density outside (0, 1], something that is no memory, or an exchange that
                does not accept the sparsifier.
        """
        resolved = SPARSIFIERS.resolve(sparsifier)
        memory = as_memory(memory)
        if executor not in EXECUTORS:
            raise ValueError(f"Expected executor to be one of {', '.join(map(repr, EXECUTORS))}, but got {executor!r}.")
        return cls(resolved, as_schedule(density), memory, as_exchange(exchange, resolved), executor)


def check_equal_on_ranks(what: Any, comm: Collective, device: torch.device) -> None:
    """Raise on all ranks if they were not given the same."""
    digest = hashlib.sha256(repr(what).encode()).digest()[:8]
    own = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
    digests = comm.all_gather(own).flatten().tolist()
    if len(set(digests)) > 1:
        differ = [rank for rank, other in enumerate(digests) if other != digests[0]]
        raise RuntimeError(
            f"The ranks disagree: rank(s) {differ} have other settings or other parameters than rank 0. Every rank "
            f"must build the same model and the same sparsifier settings. Here, on rank {comm.rank}: {what[0]}."
        )
