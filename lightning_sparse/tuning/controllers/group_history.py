"""The watchdog's history of a group: norms, counts and waiting parameters."""

from __future__ import annotations

from collections import Counter
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
        self.density = self.norm = self.reference = 0.0
        """``norm``: of the residual at the latest check, mean over ranks; ``reference``: 0 until there is one."""
        self.reference_step = self.selected = self.target = 0
        self.in_a_row: Counter[str] = Counter()
        """Number of checks in a row with a fault, by kind of warning."""
        self._independent = group.sparsifier.agreement is Agreement.INDEPENDENT
        self.by = "by a single rank" if self._independent else "by all ranks together"
        """The selecting ranks, as words for a warning."""
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
    def threshold(self) -> str:
        """This rank's threshold, as words for a warning; empty if the method has none."""
        known = self._latest and self._latest.threshold
        return "" if known is None else f"; the threshold is {float(known):.3g}"

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

    def measure(self, group: GroupReducer, columns: Iterator[Tensor]) -> set[str]:
        """Take the norm of the residual from :meth:`report`; return the noted parameters whose residuals have moved.

        Args:
            group: of this history.
            columns: yields the results of :meth:`report` on all ranks, (n,) int64 each.
        """
        if group.memory.residual(group.state.memory) is None:
            return set()
        self.norm = float(next(columns).view(torch.float64).mean())
        return {name for name in self._noted if next(columns).any()}

    def update(self, group: GroupReducer, columns: Iterator[Tensor], step: int, excess: float, growth: float) -> None:
        """Evaluate a check.

        Args:
            group: of this history.
            columns: see :meth:`measure`.
            step: number of the step that begins.
            excess: factor by which the selection may differ from the density.
            growth: factor by which a residual may grow.
        """
        statistics = self._latest = group.statistics
        assert statistics is not None
        self.target = statistics.target
        if statistics.target_density != self.density:
            self.density, self._since, self.reference = statistics.target_density, step, 0.0
        self.selected = int(statistics.counts.max() if self._independent else statistics.union)
        moved = self.measure(group, columns)
        nothing, kept = not int(statistics.counts.sum()), self.norm > 0
        faults = {
            "growth": 0 < growth * self.reference < self.norm,
            "dead": kept and nothing,
            "saturation": self.selected > excess * self.target,
            "short": kept and not nothing and self.selected * excess < self.target,
        }
        self.in_a_row = Counter({kind: self.in_a_row[kind] + 1 for kind, holds in faults.items() if holds})
        if not self.reference and step - self._since >= FILLING / self.density:
            self.reference, self.reference_step = self.norm, step
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
