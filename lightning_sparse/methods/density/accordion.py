"""Accordion: a density for each group that follows the rate of change of its gradients."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_integer, check_positive, is_integer
from lightning_sparse.core.layout import Gradient, sum_dtype
from lightning_sparse.methods.density.schedules import DensitySchedule, GroupDensity, check_density
from lightning_sparse.ops import take_from_runs


@dataclass(frozen=True)
class Accordion(DensitySchedule):
    """Send more while gradients change fast, and less otherwise; decided for each group by itself.

    After every ``interval`` steps, the norm of the group's summed updates over the interval is compared with that of
    the interval before. The next interval is *critical*, with density ``high``, if ``|now - before| >= threshold *
    before``; otherwise its density is ``low``. Until there are two norms to compare, every interval is critical, and so
    are the ``interval`` steps from each milestone on, for which the paper takes the steps where the learning rate is
    lowered.

    The sum of updates replaces the summed gradients of the paper: error feedback makes the two equal up to the
    residuals, and the updates are equal on all ranks, so that the decision needs no messages. Residuals grow when the
    density falls, so that only intervals of equal density are compared; a group stays in a new regime for two
    intervals at least. The released code uses a single mini-batch of rank 0 instead. The cost is one vector of the
    group's size, and on a device one wait per interval.

    Args:
        low: density while gradients are calm, in (0, 1].
        high: density while they change fast, in (0, 1], at least ``low``.
        interval: steps between decisions, at least 1. The paper decides every 10 epochs.
        threshold: relative change of the norm that counts as fast, above 0.
        milestones: steps at which the learning rate drops.

    Raises:
        ValueError: if a setting is outside its range.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> calm, loud = torch.ones(30, 2, 100), 4 * torch.ones(10, 2, 100)
        >>> schedule = ls.density.Accordion(low=0.1, high=0.5, interval=10)
        >>> steps = list(ls.simulate([*calm, *loud, *calm], sparsifier="everything", density=schedule))
        >>> [step.target_density for step in steps[::10]]
        [0.5, 0.5, 0.1, 0.1, 0.5, 0.5, 0.1]

    References:
        Agarwal et al., Accordion: Adaptive Gradient Communication via Critical Learning Regime Identification,
        MLSys 2021, arXiv 2010.16248, algorithm 1.
    """

    low: float
    high: float
    interval: int
    threshold: float = 0.5
    milestones: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_density(self.low, "low")
        check_density(self.high, "high")
        if self.low > self.high:
            raise ValueError(f"Expected low to be at most high, but got low={self.low} and high={self.high}.")
        check_integer(self.interval, "interval")
        if (
            isinstance(self.milestones, str)
            or not isinstance(self.milestones, Sequence)
            or not all(map(is_integer, self.milestones))
        ):
            raise ValueError(f"Expected milestones to be a sequence of steps, but got {self.milestones!r}.")
        check_positive(self.threshold, "threshold")

    def __call__(self, step: int) -> float:
        """Return the density before any update: ``high``."""
        return float(self.high)

    def for_group(self) -> AccordionDensity:
        """Return the regime of one group."""
        return AccordionDensity(self)


class AccordionDensity(GroupDensity):
    """The regime of one group.

    Args:
        schedule: the settings.
    """

    schedule: Accordion

    def __init__(self, schedule: Accordion) -> None:
        super().__init__(schedule)
        self.number, self.critical = 0, True
        self.seen: set[float] = set()
        """Densities of the updates of this interval: two if a milestone is within it."""
        self.before: dict[float, float] = {}
        """Norm of the sum of the interval before, by its density."""
        self.total: Tensor | None = None
        """(numel,) sum of the updates of this interval; None: there are none."""

    def __call__(self, step: int) -> float:
        """Return ``high`` in a critical interval or after a milestone, else ``low``."""
        if (number := step // self.schedule.interval) != self.number:
            self._decide()
            self.number = number
        milestones = sorted(self.schedule.milestones)
        latest = bisect.bisect_right(milestones, step)
        fresh = latest > 0 and step < milestones[latest - 1] + self.schedule.interval
        return float(self.schedule.high if self.critical or fresh else self.schedule.low)

    def observe(
        self,
        step: int,
        update: Gradient,
        skipped: Tensor | None = None,
        places: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """Add the update, free of the loss scale, to the sum."""
        self.seen.add(self(step))
        if self.total is None:
            dtype = sum_dtype(update.dtype)
            self.total = torch.zeros(update.numel, dtype=dtype, device=update.device)
        values = update.flat() if places is None else take_from_runs(update.runs, places)
        if scale is not None:
            values = values.to(self.total.dtype) / scale
        values = torch.nan_to_num(values, nan=0.0)
        if skipped is not None:
            values = values.masked_fill(skipped, 0.0)
        if places is None:
            self.total += values
        else:  # a coordinate that is repeated has the same value each time, which counts once
            self.total.index_copy_(0, places, self.total[places] + values)

    def state_dict(self) -> dict[str, Any]:
        """Return the interval so far, and the norms for its comparison."""
        return {
            "total": None if self.total is None else self.total.to("cpu", copy=True),
            "number": self.number,
            "seen": sorted(self.seen),
            "before": list(self.before.items()),
            "critical": self.critical,
        }

    def load_state_dict(self, state: Mapping[str, Any], numel: int, device: torch.device) -> None:
        """Continue within an interval."""
        try:
            total, number, critical = (state.get(field) for field in ("total", "number", "critical"))
            seen = {float(density) for density in state["seen"]}
            before = {float(density): float(norm) for density, norm in state["before"]}
            summed = total is None or (total.shape == (numel,) and total.is_floating_point())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Expected the state of {type(self).__name__}, but got {state!r}.") from error
        if not (summed and isinstance(critical, bool) and isinstance(number, int)):
            raise ValueError(f"Expected the state of {type(self).__name__} for {numel} coordinates, but got {state!r}.")
        self.number, self.seen, self.before, self.critical = number, seen, before, critical
        self.total = None if total is None else total.to(device, copy=True)

    def _decide(self) -> None:
        """Compare the interval that is over with the one before it, and begin the next one."""
        if self.total is not None and len(self.seen) == 1:
            [density] = self.seen
            norm = float(torch.linalg.vector_norm(self.total, dtype=torch.float64))
            if (before := self.before.get(density)) is not None:
                self.critical = norm != before and abs(norm - before) >= self.schedule.threshold * before
            self.before = {density: norm}
        self.seen, self.total = set(), None
