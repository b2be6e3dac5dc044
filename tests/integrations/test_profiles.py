"""Profiles and fallbacks behind `Trainer`: in checkpoints of both Lightning packages, on two real processes."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.methods.grouping import Group
from lightning_sparse.tuning.performance.cost import Line
from lightning_sparse.tuning.performance.profile import Profile
from tests.covering import by_default
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer
from tests.tuning.controllers.models import fix_costs

MERGED: dict[str, Any] = {
    "density": 0.05,
    "grouping": ls.tuning.OptimalMerge(warmup=1, steps=2),
    "rules": EVERYTHING_SPARSE,
    "executor": "thread",
}


def fit(
    package: str, options: dict[str, Any], epochs: int, load: str | None = None, save: str | None = None
) -> dict[str, Any]:
    """Groups at the first and at the last batch, the profile, what was printed, and the parameters."""
    plans: list[list[Group]] = []

    class Look(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            plans.append(trainer.strategy.engine.plan)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            plans.append(trainer.strategy.engine.plan)

    out = io.StringIO()
    trainer = make_trainer(package, strategy=options, max_epochs=epochs, callbacks=[Look()])
    with contextlib.redirect_stdout(out), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        fix_costs(patch, Line(1e-9, 1.0))
        # Where other settings go on; see test_checkpoints.py.
        warnings.filterwarnings("ignore", message=".*do not fit in every respect")
        module = make_module(package)
        trainer.fit(module, make_data(96), make_data(16), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    told = out.getvalue()
    return {"plans": plans, "profile": trainer.strategy.profile, "told": told, "parameters": flat(module)}


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_a_resumed_run_starts_with_the_groups_that_the_first_one_found(
    two_ranks: Ranks, tmp_path: Path, package: str
) -> None:
    path = str(tmp_path / "merged.ckpt")
    first, other = two_ranks(fit, package, MERGED, 1, None, path)
    assert first["profile"] == other["profile"]
    assert [group.name for group in first["plans"][0]] == ["model"]
    assert [group.name for group in first["plans"][-1]] != ["model"]
    assert "profiling 2 steps" in first["told"]
    kept = torch.load(path, weights_only=True)["lightning_sparse"]["profile"]
    assert Profile.from_dict(kept) == Profile.from_dict(first["profile"])

    again, other = two_ranks(fit, package, MERGED, 2, path)
    assert again["profile"] == other["profile"] == first["profile"]
    assert again["plans"] == [first["plans"][-1]] * 12
    assert "profiling 2 steps" not in again["told"]
    assert "groups by this profile" in again["told"]
    assert torch.equal(again["parameters"], other["parameters"])

    # With other settings, the profile would be wrong: a new one is made.
    for found in two_ranks(fit, package, MERGED | {"density": 0.1}, 2, path):
        assert [group.name for group in found["plans"][0]] == ["model"]
        assert found["profile"]["fingerprint"] != kept["fingerprint"]


@pytest.mark.thorough
def test_checkpoints_without_a_profile_stay_as_they_are(two_ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "plain.ckpt")
    for found in two_ranks(fit, "pytorch_lightning", {"sparsifier": "top_k"}, 1, None, path):
        assert found["profile"] is None
    assert "profile" not in torch.load(path, weights_only=True)["lightning_sparse"]
    # A run that was not profiled can go on with a profile, and the other way round.
    for found in two_ranks(fit, "pytorch_lightning", MERGED, 2, path):
        assert found["profile"] is not None
    merged = str(tmp_path / "merged.ckpt")
    two_ranks(fit, "pytorch_lightning", MERGED, 1, None, merged)
    assert "profile" in torch.load(merged, weights_only=True)["lightning_sparse"]
    for found in two_ranks(fit, "pytorch_lightning", {"sparsifier": "top_k"}, 2, merged):
        assert found["profile"] is None
        assert len(found["plans"]) == 12


def train_twice(package: str) -> list[tuple[bool, bool]]:
    """Two fits with one strategy; each is profiled."""
    module, data, seen = make_module(package), make_data(96), []
    trainer = make_trainer(package, strategy=MERGED, max_epochs=1)
    with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        fix_costs(patch, Line(1e-9, 1.0))
        for _ in range(2):
            trainer.fit(module, data, make_data(16))
            trainer.fit_loop.max_epochs += 1
            watched = any(p._post_accumulate_grad_hooks for p in module.parameters())
            seen.append((trainer.strategy.profile is not None, watched))
    return seen


@pytest.mark.parametrize("package", by_default(PACKAGES[::-1]))
def test_fit_again(two_ranks: Ranks, package: str) -> None:
    assert two_ranks(train_twice, package) == [[(True, False)] * 2] * 2


def fit_fallback(package: str, density: float, fallback: bool) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_sparse.tuning.controllers.dense_fallback.WARMUP", 1)
        patch.setattr("lightning_sparse.tuning.controllers.dense_fallback.STEPS", 2)
        options = {"density": density, "fallback": fallback, "grouping": ls.tuning.OptimalMerge(warmup=1, steps=2)}
        parameters: Tensor = fit(package, options, 2)[
            "parameters"
        ]  # groups merge, are dense, left out, and there again
    return parameters


def fit_ddp(package: str) -> Tensor:
    trainer, module = make_trainer(package, strategy="ddp", max_epochs=2), make_module(package)
    trainer.fit(module, make_data(96), make_data(16))
    return flat(module)


@pytest.mark.thorough
@pytest.mark.parametrize("package", PACKAGES)
def test_groups_and_modes_that_change_train_like_ddp_at_full_density(two_ranks: Ranks, package: str) -> None:
    plain = two_ranks(fit_ddp, package)
    for fallback in (False, True):
        for found, expected in zip(two_ranks(fit_fallback, package, 1.0, fallback), plain, strict=True):
            assert torch.equal(found, expected)
    first, second = two_ranks(fit_fallback, package, 0.05, True)
    assert torch.equal(first, second)
