"""Comparison of results with the spread between runs that differ in their seeds only."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from os.path import commonprefix
from statistics import fmean
from typing import NamedTuple

from lightning_sparse.core.console import plain
from lightning_sparse.tools.report.catalog import is_better_low
from lightning_sparse.tools.report.runs import Run

SEED = re.compile(r"seed|random_state", re.IGNORECASE)
"""Names of settings that differ between repetitions."""
PLACES = {
    "dirpath",
    "save_dir",
    "log_dir",
    "default_root_dir",
    "output_dir",
    "ckpt_path",
    "run_name",
    "experiment_name",
}
"""Names of settings with the location of a run."""
QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Of Student's t, for two-sided tests at 5 %, with 1 to 10 degrees of freedom; for more, the last one is safe."""
MOST_NAMED = 6
"""Settings or runs that a sentence names."""


class Repeated(NamedTuple):
    """Runs with the same settings except for seeds and locations."""

    label: str
    values: Sequence[float]
    """Final values of a result in runs with a finite one; at least one."""

    @property
    def mean(self) -> float:
        """Mean over runs."""
        return fmean(self.values)

    def __str__(self) -> str:
        return self.label if len(self.values) == 1 else f"{self.label} ({len(self.values)} runs)"


def repeated(runs: Sequence[Run], ends: Sequence[float]) -> list[Repeated]:
    """Group repetitions, in order of their first runs; a run without known settings is a group of its own.

    Args:
        runs: to compare.
        ends: final values of a result in each of them; non-finite ones are left out.
    """
    found: dict[object, list[tuple[str, float]]] = {}
    for place, (run, end) in enumerate(zip(runs, ends, strict=True)):
        if math.isfinite(end):
            of_method = frozenset((name, value) for name, value in run.settings.items() if not _of_run(name))
            found.setdefault(of_method or place, []).append((run.name, end))
    return [Repeated(_label([name for name, _ in one]), [end for _, end in one]) for one in found.values()]


def _of_run(name: str) -> bool:
    parts = name.split("/")
    return SEED.search(parts[-1]) is not None or parts[-1] in PLACES or "logger" in parts


def _label(names: Sequence[str]) -> str:
    """Return the common prefix of names, without a counter."""
    if len(names) == 1:
        return names[0]
    begin = commonprefix(list(names))  # noqa: RUF071  # by character, as intended
    return re.sub(r"[\W_]+(seed|version|run|s|v)?[\W_]*$", "", begin) or names[0]


def compared(name: str, groups: Sequence[Repeated]) -> list[str]:
    """Return sentences on the final values of a result, and on the significance of differences.

    Two means are level unless they differ by more than Student's t allows at 5 %, with the common spread of all groups
    of several runs.

    Args:
        name: of the result.
        groups: at least one.

    Example:
        >>> compared("loss", [Repeated("a", [1.0]), Repeated("b", [1.5])])[1]
        'One run of each setting cannot tell whether that matters: other seeds may change as much.'
        >>> compared("loss", [Repeated("a", [1.0, 1.1]), Repeated("b", [1.2, 1.3])])[1]
        'Level with it, given how runs of one setting differ (standard deviation 0.0707): b (2 runs), at 1.25.'
    """
    best, *others = sorted(groups, key=lambda one: one.mean, reverse=not is_better_low(name))
    freedom = sum(len(one.values) - 1 for one in groups)
    squares = sum((x - one.mean) ** 2 for one in groups for x in one.values)
    spread = math.sqrt(squares / freedom) if freedom else 0.0
    if not others:
        of_runs = f" on average of {len(best.values)} runs that differ in their seeds at most" if freedom else ""
        return [f"{name} ended at {plain(best.mean, 4)}{of_runs}{_deviation(spread)}."]
    shown = [plain(one.mean, 4) for one in (best, *others)]
    if len(set(shown)) == 1:
        return [f"{name} ended at {shown[0]} in all runs."]
    if not spread:
        why = "One run of each setting cannot tell whether that matters: other seeds may change as much."
        if freedom:
            why = "Runs of one setting do not differ and cannot tell whether that matters: give them different seeds."
        return [f"{name} ended best in {best}, at {shown[0]}, worst in {others[-1]}, at {shown[-1]}.", why]
    quantile = QUANTILES[min(freedom, len(QUANTILES)) - 1]

    def is_level(one: Repeated) -> bool:
        apart = abs(one.mean - best.mean)
        return apart <= quantile * spread * math.sqrt(1 / len(one.values) + 1 / len(best.values))

    said = [f"{name} ended best in {best}, at {shown[0]}."]
    level, behind = ([one for one in others if is_level(one) is kind] for kind in (True, False))
    if level:
        said.append(f"Level with it, given how runs of one setting differ{_deviation(spread)}: {_named(level)}.")
    if behind:
        said.append(f"Worse by more than runs of one setting differ{_deviation(spread)}: {_named(behind)}.")
    return said


def _deviation(spread: float) -> str:
    return f" (standard deviation {plain(spread)})" if spread else ""


def _named(groups: Sequence[Repeated]) -> str:
    more = f"; and {len(groups) - MOST_NAMED} more" if len(groups) > MOST_NAMED else ""
    return "; ".join(f"{one}, at {plain(one.mean, 4)}" for one in groups[:MOST_NAMED]) + more
