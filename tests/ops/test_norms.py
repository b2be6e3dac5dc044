"""Norms are right over all of float32's range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_sparse.ops.length import CHUNK, joint_norm, norm
from tests.engine.test_memory_cost import NUMEL, most


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-25, 1e-12, 1.0, 1e19, 3e37])
def test_norms_neither_overflow_nor_vanish(size: float) -> None:
    x = torch.linspace(-1, 1, 70_001) * size
    expected = float(np.linalg.norm(x.double().numpy()))
    for found in (norm(x), joint_norm([x[:100], x[100:2000], x[2000:]]), joint_norm([x[:30_000], x[30_000:]])):
        assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e25])
def test_no_vector_is_copied_as_a_whole(size: float) -> None:
    x = torch.full((40 * CHUNK,), size)
    assert NUMEL * most(lambda: norm(x)) < 2 * x.nbytes / 10
    assert float(norm(x)) == pytest.approx(size * x.numel() ** 0.5, rel=1e-6)
    assert float(norm(x[:0])) == 0
