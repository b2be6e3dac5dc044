"""Jobs of a comparison: every method on every source of gradients, in every setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lightning_sparse.core.registry import unknown
from lightning_sparse.density import check_density
from lightning_sparse.tools.compare.methods import DENSE, Method
from lightning_sparse.tools.compare.tasks import TASKS, check, label


class Job(NamedTuple):
    """One method in one setting."""

    source: str
    """Name of a task or stream."""
    ranks: int
    density: float
    """Density of the comparison; 1 for dense."""
    method: str
    seed: int
    steps: int
    every: int = 50
    """Steps between points of a training's curve."""
    text: str | None = None
    """Text file of the source ``text``; None: the one that comes with Python."""

    @property
    def key(self) -> tuple[str, int, float, str, int, int]:
        """Identity of a job; its result has the same key."""
        return label(self.source, self.text), *self[1:6]


def plan(
    sources: Sequence[str],
    *,
    kind: str,
    known: Sequence[str],
    ranks: Sequence[int],
    least_ranks: int,
    densities: Sequence[float],
    methods: Sequence[Method],
    seeds: Sequence[int],
    steps: int,
    every: int = 50,
    text: str | None = None,
) -> list[Job]:
    """Return jobs for every method on every source, number of ranks, seed and density; dense has one density only.

    Args:
        sources: names in ``known``.
        kind: word for a source in errors.
        known: all names.
        ranks: numbers of ranks.
        least_ranks: smallest allowed number of ranks.
        densities: each in (0, 1].
        methods: to compare.
        seeds: of the sources.
        steps: length, at least 1.
        every: steps between points of a curve, at least 1.
        text: file for the source ``text``.

    Raises:
        ValueError: for unknown names, numbers outside their ranges, and an unusable text.
    """
    for source in sources:
        if source not in known:
            raise unknown(kind, source, known)
    for name, number, least in (("ranks", min(ranks, default=least_ranks), least_ranks), ("steps", steps, 1)):
        if number < least:
            raise ValueError(f"Expected {name} to be at least {least}, but got {number}.")
    if every < 1:
        raise ValueError(f"Expected every to be at least 1, but got {every}.")
    if seeds and not -(2**63) <= min(seeds) <= max(seeds) < 2**64:
        raise ValueError(f"Expected seeds to be numbers of 64 bits, as torch takes them, but got {list(seeds)}.")
    lists = {f"{kind}s": sources, "ranks": ranks, "densities": densities, "sparsifiers": methods, "seeds": seeds}
    for name, given in lists.items():
        if not given:
            raise ValueError(f"Expected at least one of {name}, but got none.")
    check([name for name in sources if name in TASKS], ranks=max(ranks), text=text)
    jobs = [
        Job(source, n, 1.0 if method == DENSE else check_density(density), method.name, seed, steps, every, text)
        for source in sources
        for n in ranks
        for seed in seeds
        for density in densities
        for method in methods
    ]
    return list(dict.fromkeys(jobs))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block with one torch thread: tensors are small, and threads that wait for each other cost more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
