"""Fixtures for sparsifiers."""

from __future__ import annotations

import pytest

from lightning_sparse import ops
from lightning_sparse.methods.sparsifiers import estimation


@pytest.fixture
def static_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that bracket their threshold take the formulation for devices."""
    for module in (ops, estimation, ops):
        monkeypatch.setattr(module, "static_shapes", lambda device: True)
