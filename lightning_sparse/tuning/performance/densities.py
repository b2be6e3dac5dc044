"""Densities from a profile of a step: those at which the exchange hides behind backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_sparse.methods.density import DensitySchedule, check_density
from lightning_sparse.methods.grouping import Group
from lightning_sparse.tuning.performance.cost import Progress, Timeline
from lightning_sparse.tuning.performance.profile import Profile

HALVINGS = 40
Groups = Sequence[tuple[int, float | None]]
"""Coordinates of each group, and its own density if it has one."""


@dataclass(frozen=True)
class HiddenDensity(DensitySchedule):
    """Each group has the largest density that hides behind the backward pass of the next group: LAGS-SGD.

    A setting of training with ``overlap=True``: the first steps are timed, at the smallest density, and then each group
    gets its own, see :func:`~lightning_sparse.tuning.performance.densities.hidden_densities`. Most useful with
    ``grouping="layer"`` or ``OptimalMerge()``. Without overlap it is refused: nothing hides there. With a given
    profile, :meth:`assign` is a function of a plan.

    Args:
        floor: smallest density, in (0, 1]; also of the last group, which no computation can hide.
        cap: largest density, in (0, 1], at least ``floor``.

    Raises:
        ValueError: if a setting is outside its range.

    Example:
        >>> import lightning_sparse as ls
        >>> ls.SparseDDPStrategy(density=ls.tuning.HiddenDensity(0.001, 0.25))
        Traceback (most recent call last):
        ...
        ValueError: Expected density to be one such as 0.01, but got HiddenDensity(floor=0.001, cap=0.25), which ...

    References:
        Shi et al., Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with Convergence
        Guarantees (LAGS-SGD), ECAI 2020, arXiv 1911.08727, equations 18 and 19.
    """

    floor: float = 0.001
    cap: float = 0.1

    def __post_init__(self) -> None:
        check_density(self.floor, "floor")
        check_density(self.cap, "cap")
        if self.floor > self.cap:
            raise ValueError(f"Expected floor to be at most cap, but got floor={self.floor} and cap={self.cap}.")

    needs_profile = True

    def __call__(self, step: int) -> float:
        """Return the floor."""
        return float(self.floor)

    @property
    def tried(self) -> list[float]:
        """Densities at which costs are measured; between them, costs are taken as straight lines."""
        return sorted({self.floor, math.sqrt(self.floor * self.cap), self.cap})

    def assign(self, plan: list[Group], profile: Profile) -> list[Group]:
        """Return the plan with the density of each group that hides, unless it has one of its own."""
        groups, timeline = profile.timeline(plan)
        densities = hidden_densities(timeline, profile, self.floor, self.cap, [group.density for group in groups])
        found = {group.name: density for group, density in zip(groups, densities, strict=True)}
        return [group._replace(density=found.get(group.name)) for group in plan]


def hidden_densities(
    timeline: Timeline, profile: Profile, floor: float, cap: float, own: Sequence[float | None] = ()
) -> list[float]:
    """Return the largest density of each group whose exchange hides behind the backward pass of the next group.

    LAGS-SGD: a layer's compression ratio ``c = 1 / d`` is ``min(c_u, min {c: exchange(c) + select <= backward})``, with
    the backward of the layer that is computed meanwhile. Its error grows with the largest ratio of all layers
    (equation 18 there), so that each layer takes the largest free density; a layer that cannot hide takes the floor.
    Unlike there, a late exchange delays the next one, because one network carries both. Groups of one DDP bucket hide
    behind the same backward and take the same density. The last ones have nothing to hide behind: they take the floor.
    If nothing overlaps with backward, or messages travel together after it, all groups take the floor.

    Args:
        timeline: of the groups.
        profile: with the cost of exchanges.
        floor: smallest density, in (0, 1].
        cap: largest density, in (0, 1], at least ``floor``.
        own: each group's own density, or None; empty: no group has one.

    Returns:
        A density for each group.

    References:
        Shi et al., Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with Convergence
        Guarantees (LAGS-SGD), ECAI 2020, arXiv 1911.08727, equations 18 and 19 (the formula from the text around it).
    """
    runs: list[tuple[list[tuple[int, float | None]], float]] = []
    """Groups of one DDP bucket, which are ready together, and the seconds of backward before them."""
    for numel, backward, given in zip(*timeline, own or [None] * len(timeline[0]), strict=True):
        if not runs or backward > 0:
            runs.append(([], backward))
        runs[-1][0].append((numel, given))
    windows = [*(backward for _, backward in runs), 0.0][1:]
    nothing_hides = profile.overlap == "none" or profile.messages == "step"
    densities: list[float] = []
    progress = Progress()
    for (groups, backward), window in zip(runs, windows, strict=True):
        progress = progress._replace(ready=progress.ready + backward)
        fits = partial(_ends_by, progress.ready + window, profile, groups, progress)
        density = floor if nothing_hides else _largest(fits, floor, cap)
        progress = _exchanged(profile, groups, progress, density)
        densities += [density if given is None else given for _, given in groups]
    return densities


def _exchanged(profile: Profile, groups: Groups, progress: Progress, density: float) -> Progress:
    """Return the progress after these groups, which are ready together."""
    for numel, given in groups:
        progress = progress.after(numel, 0.0, profile.cost(density if given is None else given))
    return progress


def _ends_by(deadline: float, profile: Profile, groups: Groups, progress: Progress, density: float) -> bool:
    return _exchanged(profile, groups, progress, density).done <= deadline


def _largest(fits: Callable[[float], bool], floor: float, cap: float) -> float:
    """Return the largest density that fits, by bisection of its logarithm; the floor if none does."""
    if fits(cap):
        return cap
    if not fits(floor):
        return floor
    low, high = math.log(floor), math.log(cap)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(math.exp(middle)) else (low, middle)
    return max(floor, math.exp(low))  # rounding may lead below it
