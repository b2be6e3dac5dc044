"""The watchdog's history of a group: norms, counts and waiting parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_sparse.core.step import Agreement
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.metrics import Statistics
from lightning_sparse.tuning.controllers.checksum import checksum
from lightning_sparse.tuning.controllers.filling import FILLING

CHECKS = 5
"""Number of checks without a coordinate sent after which a parameter that gets gradients is starving."""


class GroupHistory:
    """Results of checks of a group. Equal on all ranks, except for values that are recorded between checks.

    Args:
        group: a sparsified group.
    """

    def __init__(self, group: GroupReducer) -> None:
        self.name = group.plan.name
        self.density = 0.0
        self.norm = 0.0
        """Norm of the residual at the latest check, mean over ranks."""
        self.reference: float | None = None
        self.reference_step = 0
        self.grown = self.silent = self.excess = self.shortage = 0
        """Numbers of checks in a row with a grown residual, nothing selected, too much and too little selected."""
        self.selected = 0
        self._independent = group.sparsifier.agreement is Agreement.INDEPENDENT
        self._since = 0
        self._latest: Statistics | None = None
        self._waiting: dict[str, tuple[float, int]] = {}
        """Parameters without a coordinate in the latest update: expected coordinates since then, number of checks."""
        self._noted: dict[str, Tensor] = {}
        """Checksums of their residuals on this rank, one step before a check."""

    def is_behind(self, group: GroupReducer) -> bool:
        """Return True if the group has selected in a step since the latest check."""
        statistics = group.statistics
        return statistics is not None and statistics is not self._latest and statistics.sparse

    @property
    def target(self) -> int:
        """Target number of coordinates."""
        return 0 if self._latest is None else self._latest.target

    @property
    def by(self) -> str:
        """The selecting ranks, as words for a warning."""
        return "by a single rank" if self._independent else "by all ranks together"

    @property
    def threshold(self) -> float | None:
        """This rank's threshold; None if the method has none."""
        return None if self._latest is None or self._latest.threshold is None else float(self._latest.threshold)

    def note(self, group: GroupReducer) -> None:
        """Record checksums of the residuals of waiting parameters, to detect at the check if they move."""
        residual = group.memory.residual(group.state.memory)
        if residual is not None:
            self._noted = {name: checksum(residual[group.spans[name]]) for name in self._waiting}

    def report(self, group: GroupReducer) -> list[Tensor]:
        """Return this rank's numbers for :meth:`update` on all ranks, () int64 each."""
        residual = group.memory.residual(group.state.memory)
        if residual is None:
            return []
        norm = torch.linalg.vector_norm(residual).double().view(torch.int64)
        moved = [(checksum(residual[group.spans[name]]) != sum_).long() for name, sum_ in self._noted.items()]
        return [norm, *moved]

    def measure(self, group: GroupReducer, columns: Iterator[Tensor]) -> None:
        """Evaluate a measurement between checks: the norm of the residual."""
        if group.memory.residual(group.state.memory) is not None:
            self.norm = float(next(columns).view(torch.float64).mean())

    def update(self, group: GroupReducer, columns: Iterator[Tensor], step: int, excess: float, growth: float) -> None:
        """Evaluate a check.

        Args:
            group: of this history.
            columns: yields the results of :meth:`report` on all ranks, (n,) int64 each.
            step: number of the step that begins.
            excess: factor by which the selection may differ from the density.
            growth: factor by which a residual may grow.
        """
        statistics = self._latest = group.statistics
        assert statistics is not None
        if statistics.target_density != self.density:
            self.density, self._since = statistics.target_density, step
            self.reference, self.grown = None, 0
        limit = excess * statistics.target
        self.selected = int(statistics.counts.max() if self._independent else statistics.union)
        self.excess = self.excess + 1 if self.selected > limit else 0
        if group.memory.residual(group.state.memory) is None:
            return
        self.measure(group, columns)
        moved = {name for name in self._noted if next(columns).any()}
        if self.reference is None:
            if self.norm > 0 and step - self._since >= FILLING / self.density:
                self.reference, self.reference_step = self.norm, step
        else:
            self.grown = self.grown + 1 if self.norm > growth * self.reference else 0
        silent = self.norm > 0 and not int(statistics.counts.sum())
        self.silent = self.silent + 1 if silent else 0
        short = self.norm > 0 and not silent and self.selected * excess < statistics.target
        self.shortage = self.shortage + 1 if short else 0
        self._noted = {}
        self._wait(group.spans, statistics, moved - group.untouched)  # with lr_aware, all residuals move

    def _wait(self, spans: dict[str, slice], statistics: Statistics, moved: set[str]) -> None:
        if statistics.indices is None:
            self._waiting = {}
            return
        ends = torch.tensor([span.stop for span in spans.values()], device=statistics.indices.device)
        owners = torch.bucketize(statistics.indices, ends, right=True)  # the padding index has none
        served = torch.bincount(owners, minlength=len(spans) + 1).tolist()
        if not any(served[:-1]):  # the threshold is wrong
            return
        for (name, span), picks in zip(spans.items(), served, strict=False):
            expected, checks = self._waiting.get(name, (0.0, 0))
            if picks:
                self._waiting.pop(name, None)
            elif name in moved:
                self._waiting[name] = expected + self.density * (span.stop - span.start), checks + 1
            else:
                self._waiting[name] = expected, checks

    def starving(self, missed: int) -> list[tuple[str, float, int]]:
        """Return names, missed coordinates and checks of the parameters that wait for too long."""
        waiting = [(name, expected, checks) for name, (expected, checks) in self._waiting.items()]
        return [found for found in waiting if found[1] >= missed and found[2] >= CHECKS]
