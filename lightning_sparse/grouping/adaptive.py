"""How much a group may send without being noticed: densities from a profile. Numbers only, no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lightning_sparse.grouping.profile import Profile, Timeline

HALVINGS = 40
Groups = Sequence[tuple[int, float | None]]
"""Coordinates of each, and the density that it has in any case."""


def hidden_densities(
    timeline: Timeline, profile: Profile, floor: float, cap: float, own: Sequence[float | None] = ()
) -> list[float]:
    """The largest density of each group whose exchange hides behind the backward pass of the next group.

    LAGS-SGD: a layer's compression ratio ``c = 1 / d`` is ``min(c_u, min {c: exchange(c) + select <= backward})``, with
    the backward of the layer that is computed meanwhile. Its error grows with the largest ratio of all layers
    (equation 18 there), so that each layer takes what it can get for nothing; what cannot hide takes the floor. Unlike
    there, an exchange that is late delays the next one, because one network carries both. Groups that DDP hands over in
    one bucket hide behind the same backward and take the same density. The last ones have nothing to hide behind: they
    take the floor. Where nothing overlaps with backward, all groups do.

    Args:
        timeline: of the groups.
        profile: what exchanges cost.
        floor: smallest density, in (0, 1].
        cap: largest density, in (0, 1], at least ``floor``.
        own: of each group, the density that it has in any case, or None; empty: none has any.

    Returns:
        A density for each group.

    References:
        Shi et al., Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with Convergence
        Guarantees (LAGS-SGD), ECAI 2020, arXiv 1911.08727, equations 18 and 19 (the formula from the text around it).
    """
    densities: list[float] = []
    ready = done = 0.0
    runs = list(_delivered_together(timeline))
    windows = [*(backward for _, backward in runs), 0.0][1:]
    fixed = iter(own or [None] * len(timeline[0]))
    for (numels, backward), window in zip(runs, windows, strict=True):
        groups = [(numel, next(fixed)) for numel in numels]
        ready += backward
        fits = partial(_ends_by, ready + window, profile, groups, ready, done)
        density = floor if profile.overlap == "nothing" else _largest(fits, floor, cap) or floor
        ready, done = _exchanged(profile, groups, ready, done, density)
        densities += [density if given is None else given for _, given in groups]
    return densities


def _delivered_together(timeline: Timeline) -> Iterator[tuple[list[int], float]]:
    """Runs of groups that come out of one bucket of DDP: they are ready together and share what they hide behind."""
    run: list[int] = []
    seconds = 0.0
    for numel, backward in zip(*timeline, strict=True):
        if run and backward > 0:
            yield run, seconds
            run = []
        if not run:
            seconds = backward
        run.append(numel)
    if run:
        yield run, seconds


def _exchanged(profile: Profile, groups: Groups, ready: float, done: float, density: float) -> tuple[float, float]:
    """When the last selection and the last exchange of these groups are done."""
    for numel, given in groups:
        cost = profile.cost(density if given is None else given)
        ready += cost.select_seconds(numel)
        done = max(ready, done) + cost.exchange_seconds(numel)
    return ready, done


def _ends_by(deadline: float, profile: Profile, groups: Groups, ready: float, done: float, density: float) -> bool:
    return _exchanged(profile, groups, ready, done, density)[1] <= deadline


def budget_density(
    step_seconds: Callable[[float], float], profile: Profile, exposed: float, floor: float, cap: float
) -> float:
    """The largest density of the whole model that keeps exposed communication below a share of the step.

    Args:
        step_seconds: of a whole step with the groups that would be used at a density.
        profile: what a step takes without any exchange.
        exposed: share of the whole step that may be exposed communication, in (0, 1).
        floor: smallest density, in (0, 1].
        cap: largest density, in (0, 1], at least ``floor``.

    Raises:
        ValueError: if even the floor exposes more.
    """

    def share(density: float) -> float:
        step = step_seconds(density)
        return (step - profile.compute_seconds) / step

    density = _largest(lambda density: share(density) <= exposed, floor, cap)
    if density is None:
        hint = (
            "Nothing overlaps with backward here: executor='thread' may help."
            if profile.overlap == "nothing"
            else "A faster network, larger batches or a sparsifier that costs less may help."
        )
        raise ValueError(
            f"Expected exposed communication of at most {exposed:.1%} of a step, but it is {share(floor):.1%} even at "
            f"the floor, density {floor}: raise the budget or lower the floor. {hint}"
        )
    return density


def _largest(fits: Callable[[float], bool], floor: float, cap: float) -> float | None:
    """The largest density that fits, on a logarithmic scale; None if the floor does not."""
    if fits(cap):
        return cap
    if not fits(floor):
        return None
    low, high = math.log(floor), math.log(cap)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(math.exp(middle)) else (low, middle)
    return max(floor, math.exp(low))  # rounding may lead below it
