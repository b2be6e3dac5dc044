"""How much to send: schedules over steps, and the only place where densities become counts."""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


def check_density(density: float, name: str = "density") -> float:
    """Return ``density`` if it lies in (0, 1], else raise.

    Raises:
        ValueError: if it is no real number in (0, 1].
    """
    if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0 < density <= 1:
        raise ValueError(
            f"Expected {name} to be a number in (0, 1], the share of coordinates that is sent, but got {density!r}."
        )
    return float(density)


def count(density: float, numel: int) -> int:
    """Number of coordinates k that a density stands for in a group: ``max(1, floor(density * numel))``.

    k is what *each rank* picks in independent methods (Top-k, hard-threshold) and what *all ranks together* pick in
    exclusive ones (MiCRO, ExDyna), as in the papers. A product that misses an integer by rounding alone is taken as
    that integer.

    Example:
        >>> count(0.01, 12_345), count(0.001, 10), count(1.0, 7), count(0.29, 100)
        (123, 1, 7, 29)
    """
    return max(1, min(numel, math.floor(density * numel * (1 + 1e-12))))


class DensitySchedule(ABC):
    """Target density as a function of the step; a frozen dataclass of its settings."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Density in (0, 1] for a step, counted in synchronised backward passes from 0."""

    def for_group(self) -> GroupDensity:
        """What decides for one group on one rank; the schedule itself, unless it watches the updates."""
        return GroupDensity(self)


class GroupDensity:
    """The density of one group. Equal on all ranks, because it sees nothing but what is equal on all ranks.

    Args:
        schedule: decides by the step alone.
    """

    def __init__(self, schedule: DensitySchedule) -> None:
        self.schedule = schedule
        self.learned: Any = None
        """What has been learned from the updates; replaced by :meth:`observed` and never changed."""

    def __call__(self, step: int) -> float:
        """Density in (0, 1] at a step."""
        return self.schedule(step)

    def observe(self, step: int, update: Tensor, void: Tensor | None = None) -> None:
        """Take note of a step's update, (numel,); the arguments are those of :meth:`observed`."""
        self.learned = self.observed(step, update, void)
        self.take_in()

    def observed(self, step: int, update: Tensor, void: Tensor | None = None, places: Tensor | None = None) -> Any:
        """What has been learned after a step, for :attr:`learned`; what was before stays valid until :meth:`take_in`.

        Args:
            step: its number.
            update: (numel,), NaN throughout if this group's gradient was not finite.
            void: () whether the step counts for nothing; None: only if the update is NaN.
            places: coordinates of the update, which is zero elsewhere; None: all.
        """
        return self.learned

    def take_in(self) -> None:
        """What was learned before the latest step is not needed any more."""

    def state_dict(self, learned: Any) -> dict[str, Any]:
        """What has been learned, as plain data and tensors on the CPU."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], numel: int, device: torch.device) -> None:
        """Go on where another one of the same schedule and group, of ``numel`` coordinates, was.

        Raises:
            ValueError: if it was none, with nothing changed.
        """


@dataclass(frozen=True)
class Constant(DensitySchedule):
    """The same density at every step.

    Args:
        density: share of coordinates that is sent, in (0, 1].

    Raises:
        ValueError: if the density is outside (0, 1].

    Example:
        >>> Constant(0.01)(1000)
        0.01
    """

    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    def __call__(self, step: int) -> float:
        """Density at ``step``."""
        return float(self.density)


@dataclass(frozen=True)
class Warmup(DensitySchedule):
    """Go from one density to another geometrically, then stay there.

    ``density(t) = start * (end / start) ** (t / steps)`` for ``t < steps``, ``end`` afterwards. Early gradients change
    fast, and a residual of early steps is stale when it is sent; DGC therefore starts dense and lowers the density
    exponentially over the first epochs (there in five stairs, 0.25, 0.0625, ...; here without stairs).

    Args:
        start: density at step 0, in (0, 1].
        end: density from step ``steps`` on, in (0, 1].
        steps: length of the warm-up in synchronised backward passes, at least 1.

    Raises:
        ValueError: if a density is outside (0, 1] or ``steps`` is no positive integer.

    Example:
        >>> schedule = Warmup(0.25, 0.01, steps=500)
        >>> [round(schedule(t), 4) for t in (0, 250, 500, 1000)]
        [0.25, 0.05, 0.01, 0.01]

    References:
        Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3.3 (warm-up training).
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_density(self.start, "start")
        check_density(self.end, "end")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"Expected steps to be a positive integer but got {self.steps!r}.")

    def __call__(self, step: int) -> float:
        """Density at ``step``."""
        if step >= self.steps:
            return float(self.end)
        return float(self.start * (self.end / self.start) ** (step / self.steps))


@dataclass(frozen=True)
class Accordion(DensitySchedule):
    """Send more while gradients change fast, and less while they do not; decided for each group by itself.

    After every ``interval`` steps, the norm of the group's summed updates over the interval is compared with that of
    the interval before. The next interval is *critical*, with density ``high``, if ``|now - before| >= threshold *
    before``; otherwise its density is ``low``. Until there are two norms to compare, every interval is critical, and so
    are the ``interval`` steps from each milestone on, for which the paper takes the steps where the learning rate is
    lowered.

    The sum of updates stands in for the summed gradients of the paper: error feedback makes the two equal up to what is
    still in the residuals, and the updates are equal on all ranks, so that nothing is sent to agree on the decision.
    Residuals take up more when the density falls, so that only intervals of equal density are compared; a group stays
    in a new regime for two intervals at least. The released code looks at a single mini-batch of rank 0 instead. Costs
    one vector of the group's size, and on a device one wait per interval.

    Args:
        low: density while gradients are calm, in (0, 1].
        high: density while they are not, in (0, 1], at least ``low``.
        interval: steps between decisions, at least 1. The paper decides every 10 epochs.
        threshold: relative change of the norm that counts as fast, above 0.
        milestones: steps at which the learning rate drops.

    Raises:
        ValueError: if a setting is outside its range.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> calm, loud = torch.ones(30, 2, 100), 4 * torch.ones(10, 2, 100)
        >>> schedule = ls.Accordion(low=0.1, high=0.5, interval=10)
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
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1:
            raise ValueError(f"Expected interval to be a positive integer, but got {self.interval!r}.")
        if (
            isinstance(self.milestones, str)
            or not isinstance(self.milestones, Sequence)
            or not all(isinstance(step, int) and not isinstance(step, bool) for step in self.milestones)
        ):
            raise ValueError(f"Expected milestones to be a sequence of steps, but got {self.milestones!r}.")
        if not (self.threshold > 0 and math.isfinite(self.threshold)):
            raise ValueError(f"Expected threshold to be a positive number, but got {self.threshold!r}.")

    def __call__(self, step: int) -> float:
        """Density at a step of which no updates have been seen: ``high``."""
        return float(self.high)

    def for_group(self) -> AccordionDensity:
        """One group's regime."""
        return AccordionDensity(self)


class Interval(NamedTuple):
    """What Accordion knows of a group."""

    number: int = 0
    seen: frozenset[float] = frozenset()
    """Densities of the updates of this interval: two, if a milestone came in between."""
    before: Mapping[float, float] = {}
    """Norm of the sum of the interval before, by its density."""
    critical: bool = True
    total: Tensor | None = None
    """(numel,) sum of the updates of this interval so far, but for what ``latest`` says; none of them in a ``fresh``
    interval, whatever the tensor holds."""
    fresh: bool = False
    latest: tuple[Tensor, Tensor] | None = None
    """Coordinates of the latest update, and what the sum is there after it."""

    def sum_in(self, total: Tensor) -> Tensor:
        """The sum of all updates of the interval in a tensor that holds ``total``. To do it twice changes nothing."""
        if self.fresh:
            total.zero_()
        return total if self.latest is None else total.index_copy_(0, *self.latest)


class AccordionDensity(GroupDensity):
    """The regime of one group.

    Args:
        schedule: the settings.
    """

    schedule: Accordion
    learned: Interval

    def __init__(self, schedule: Accordion) -> None:
        super().__init__(schedule)
        self.learned = Interval()

    def __call__(self, step: int) -> float:
        """``high`` in a critical interval or after a milestone, else ``low``."""
        if (number := step // self.schedule.interval) != self.learned.number:
            self.learned = self._decided()._replace(number=number)
        milestones = sorted(self.schedule.milestones)
        latest = bisect.bisect_right(milestones, step)
        fresh = latest > 0 and step < milestones[latest - 1] + self.schedule.interval
        return float(self.schedule.high if self.learned.critical or fresh else self.schedule.low)

    def observed(self, step: int, update: Tensor, void: Tensor | None = None, places: Tensor | None = None) -> Interval:
        """Add the update up."""
        density, now = self(step), self.learned
        total = now.total
        if total is None:
            total = torch.zeros_like(update, dtype=torch.promote_types(update.dtype, torch.float32))
        if places is not None:
            places = places[places < total.numel()]
            update = update[places]
        update = torch.nan_to_num(update, nan=0.0)
        if void is not None:
            update = update.masked_fill(void, 0.0)
        before = total if places is None else total[places]
        after = update.to(total.dtype) if now.fresh else before + update
        seen = now.seen | {density}
        if places is None:
            return now._replace(seen=seen, total=after, fresh=False, latest=None)
        return now._replace(seen=seen, total=total, latest=(places, after))

    def take_in(self) -> None:
        """Bring the sum up to date."""
        if self.learned.total is not None:
            self.learned.sum_in(self.learned.total)
            self.learned = self.learned._replace(fresh=False, latest=None)

    def state_dict(self, learned: Interval) -> dict[str, Any]:
        """The interval so far, and what the next one will be compared with."""
        return {
            "total": None if learned.total is None else learned.sum_in(learned.total.to("cpu", copy=True)),
            "number": learned.number,
            "seen": sorted(learned.seen),
            "before": list(learned.before.items()),
            "critical": learned.critical,
        }

    def load_state_dict(self, state: Mapping[str, Any], numel: int, device: torch.device) -> None:
        """Go on within an interval."""
        total, number, critical = (state.get(field) for field in ("total", "number", "critical"))
        try:
            seen = frozenset(float(density) for density in state["seen"])
            before = {float(density): float(norm) for density, norm in state["before"]}
            summed = total is None or (total.shape == (numel,) and total.is_floating_point())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Expected the state of {type(self).__name__}, but got {state!r}.") from error
        if not (summed and isinstance(critical, bool) and isinstance(number, int)):
            raise ValueError(f"Expected the state of {type(self).__name__} for {numel} coordinates, but got {state!r}.")
        total = None if total is None else total.to(device, copy=True)
        self.learned = Interval(number, seen, before, critical, total)

    def _decided(self) -> Interval:
        """After a comparison of the interval that is over with the one before it."""
        now = self.learned
        if now.total is None:
            return now
        critical, norms = now.critical, now.before
        if len(now.seen) == 1:
            [density] = now.seen
            norm = float(torch.linalg.vector_norm(now.total, dtype=torch.float64))
            if (before := norms.get(density)) is not None:
                critical = norm != before and abs(norm - before) >= self.schedule.threshold * before
            norms = {density: norm}
        return now._replace(seen=frozenset(), before=norms, critical=critical, fresh=True)


@dataclass(frozen=True)
class ProfiledDensity(DensitySchedule):
    """A density that follows from a profile of the first steps; the floor until the profile is there.

    Args:
        floor: smallest density, in (0, 1].
        cap: largest density, in (0, 1], at least ``floor``.

    Raises:
        ValueError: if a setting is outside its range.
    """

    floor: float = 0.001
    cap: float = 0.1

    def __post_init__(self) -> None:
        check_density(self.floor, "floor")
        check_density(self.cap, "cap")
        if self.floor > self.cap:
            raise ValueError(f"Expected floor to be at most cap, but got floor={self.floor} and cap={self.cap}.")

    def __call__(self, step: int) -> float:
        """The floor."""
        return float(self.floor)

    @property
    def tried(self) -> list[float]:
        """Densities at which costs are measured; between them, costs are taken as straight lines."""
        return sorted({self.floor, math.sqrt(self.floor * self.cap), self.cap})


@dataclass(frozen=True)
class HiddenDensity(ProfiledDensity):
    """Each group sends as much as still hides behind the backward pass of the next group: LAGS-SGD.

    See :func:`~lightning_sparse.grouping.hidden_densities`. Most useful with ``grouping="layer"`` or
    ``OptimalMerge()``, and only where exchanges go on beside backward (on CUDA, or with ``executor="thread"``):
    elsewhere nothing hides, and every group keeps the floor.

    Args:
        floor: smallest density, in (0, 1]; also of the group that comes last, behind which nothing is computed.
        cap: largest density, in (0, 1], at least ``floor``.

    Raises:
        ValueError: if a setting is outside its range.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.SparseDDPStrategy(density=ls.HiddenDensity(0.001, 0.25), grouping="layer", executor="thread")

    References:
        Shi et al., Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with Convergence
        Guarantees (LAGS-SGD), ECAI 2020, arXiv 1911.08727, equations 18 and 19.
    """


@dataclass(frozen=True)
class TimeBudget(ProfiledDensity):
    """The mildest density, for the whole model, that keeps exposed communication below a share of the step.

    With ``grouping=OptimalMerge()``, groups and density are found together.

    Args:
        floor: smallest density, in (0, 1].
        cap: largest density, in (0, 1], at least ``floor``.
        exposed: share of a step that may be exposed communication, in (0, 1). When the first steps have been profiled
            and not even the floor keeps it, training stops with an error on all ranks.

    Raises:
        ValueError: if a setting is outside its range.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.SparseDDPStrategy(density=ls.TimeBudget(exposed=0.1), grouping=ls.OptimalMerge())
    """

    exposed: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.exposed, (int, float)) and not isinstance(self.exposed, bool)
        if not number or not 0 < self.exposed < 1:
            raise ValueError(f"Expected exposed to be a share of the step in (0, 1), but got {self.exposed!r}.")


def as_schedule(density: float | DensitySchedule) -> DensitySchedule:
    """Turn a number into a :class:`Constant`; leave schedules as they are.

    Raises:
        ValueError: if it is neither a number in (0, 1] nor a :class:`DensitySchedule`.
    """
    return density if isinstance(density, DensitySchedule) else Constant(check_density(density))
