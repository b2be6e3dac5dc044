"""Measures of the open loop in plain numpy, from what each rank held before and after each step.

Written from the definitions in :data:`lightning_sparse.tools.compare.recorded.QUANTITIES`, on data of the tests' own
network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Step(NamedTuple):
    before: np.ndarray
    """(n, numel) residual plus gradient."""
    after: np.ndarray
    """(n, numel) residual."""
    update: np.ndarray
    """(numel,)"""
    picks: list[int]
    """Of each rank."""
    updated: int
    """Coordinates in the update."""
    bytes_sent: list[float]
    """Of each rank."""


def captured(step: Step, k: int) -> float:
    held, left = step.before.sum(0), step.after.sum(0)
    best = np.sort(held**2)[::-1][:k].sum()
    return float(((held**2).sum() - (left**2).sum()) / best)


def steps_to_target(estimates: Sequence[float]) -> int | None:
    for first in range(len(estimates)):
        some = list(estimates[first : first + 10])
        if len(some) == 10 and min(some) > 0.8999999 and max(some) < 1.1000001:
            return first
    return None


def measures(steps: Sequence[Step], k: int, together: bool) -> dict[str, float | int | None]:
    """All measures; ``together``: k is meant for all ranks."""
    last = steps[2 * len(steps) // 3 :]
    rows = [[step.updated / k] if together else [picks / k for picks in step.picks] for step in steps]
    settled = np.concatenate(rows[min(60, len(rows) // 2) :])
    ratios = [len(s.picks) * max(s.picks) / sum(s.picks) if sum(s.picks) else 1.0 for s in last]
    return {
        "relative_density_error": float(np.mean([100 * abs(step.updated - k) / k for step in last])),
        "steps_to_target": steps_to_target([float(np.mean(row)) for row in rows]),
        "padding_ratio": float(np.mean(ratios)),
        "build_up": float(np.mean([step.updated / k for step in last])),
        "estimate": float(settled.mean()),
        "estimate_low": float(np.percentile(settled, 5)),
        "estimate_high": float(np.percentile(settled, 95)),
        "captured": float(np.mean([captured(step, k) for step in last])),
        "bytes_sent": float(np.mean([step.bytes_sent for step in steps])),
    }
