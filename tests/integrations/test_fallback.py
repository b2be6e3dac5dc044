"""A fallback behind `Trainer`: groups that are sparse, dense, left to DDP, and there again, on two real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer


def fit(package: str, strategy: Any) -> Tensor:
    """Parameters after two epochs."""
    trainer, module = make_trainer(package, strategy=strategy, max_epochs=2), make_module(package)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_sparse.tuning.controllers.dense_fallback.WARMUP", 1)
        patch.setattr("lightning_sparse.tuning.controllers.dense_fallback.STEPS", 2)
        trainer.fit(module, make_data(96), make_data(16))
    return flat(module)


@pytest.mark.thorough
@pytest.mark.parametrize("package", PACKAGES)
def test_modes_that_change_train_like_ddp_at_full_density(two_ranks: Ranks, package: str) -> None:
    options = {"fallback": True, "grouping": "layer", "rules": EVERYTHING_SPARSE}
    plain = two_ranks(fit, package, "ddp")
    for found, expected in zip(two_ranks(fit, package, options | {"density": 1.0}), plain, strict=True):
        assert torch.equal(found, expected)
    first, second = two_ranks(fit, package, options | {"density": 0.05})
    assert torch.equal(first, second)
