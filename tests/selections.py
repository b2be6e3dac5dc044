"""What one rank picks of one vector: shared by the tests of methods that estimate a threshold."""

from __future__ import annotations

import numpy as np
import torch

import lightning_sparse as ls
from lightning_sparse.core.step import Context, Selection

DENSITIES = [0.1, 0.01, 0.001]
SIZES = [10_000, 70_000, 300_000]


def select(sparsifier: ls.sparsifiers.Sparsifier, acc: np.ndarray, density: float, step: int = 0) -> Selection:
    acc = torch.from_numpy(acc)
    before = acc.clone()
    selection, state = sparsifier.select(acc, None, Context(step=step, density=density, rank=0, world_size=1))
    assert state is None
    assert torch.equal(acc, before)
    assert bool(selection.threshold.isfinite())
    assert selection.threshold.dtype == torch.float64
    return selection


def picks(selection: Selection) -> list[int]:
    return selection.indices[: int(selection.count)].tolist()


def assert_largest(picked: list[int], acc: np.ndarray) -> None:
    """No magnitude that was left out is larger than one that was picked."""
    rest = np.ones(acc.size, dtype=bool)
    rest[picked] = False
    assert np.abs(acc[picked]).min() >= np.abs(acc[rest]).max()
