"""`overlap=True` behind Accelerate and transformers: weights are those without it, and clipping is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sparse.accelerate import attach
from tests.doors import test_accelerate, test_huggingface
from tests.doors.trained import Net, Samples, equal
from tests.ranks import Ranks, error_of

SETTINGS: dict[str, Any] = {"density": 0.05, "grouping": "layer"}
HIDDEN: dict[str, Any] = {**SETTINGS, "overlap": True}


@pytest.mark.parametrize("told", [{}, {"optimizer": "SGD"}, {"fused": True}, {"accumulate": 1}])
def test_accelerate_trains_as_without_overlap(two_ranks: Ranks, told: dict[str, Any]) -> None:
    plain, hidden = (two_ranks(test_accelerate.job, 7, {**told, "clip": "", "settings": s}) for s in (SETTINGS, HIDDEN))
    for (weights, about), (expected, _) in zip(hidden, plain, strict=True):
        assert equal(weights, expected)
        assert about["step"] == 7


def refused(how: str) -> str:
    accelerator = test_accelerate.made()
    if how == "scaled":
        test_accelerate.scales(accelerator)
    model = Net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2 if how == "two" else 1)]
    wrapped, loader, *prepared = accelerator.prepare(model, DataLoader(Samples(), 4), *optimizers)

    def train() -> None:
        attach(accelerator, wrapped, prepared, **HIDDEN)
        for batch in loader:
            accelerator.backward(wrapped(**batch)["loss"])
            if how == "norm":
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            elif how == "value":
                accelerator.clip_grad_value_(wrapped.parameters(), 1e-4)
            prepared[0].step()
            prepared[0].zero_grad()

    return error_of(train)


SENTENCES = {
    "scaled": "Expected no scaled losses with overlap=True",
    "two": "Expected one optimizer with overlap=True",
    "norm": "Gradients were changed between backward and the optimizer's step",
    "value": "Gradients were changed between backward and the optimizer's step",
}


@pytest.mark.parametrize("how", SENTENCES)
def test_accelerate_refuses_what_changes_gradients(how: str) -> None:
    with Ranks(2) as ranks:
        for said in ranks(refused, how):
            assert SENTENCES[how] in said


@pytest.mark.parametrize("told", [{}, {"optim": "sgd"}])
def test_transformers_trains_as_without_overlap(two_ranks: Ranks, tmp_path: Path, told: dict[str, Any]) -> None:
    told = {**told, "max_grad_norm": 0.0}
    plain, hidden = (two_ranks(test_huggingface.job, str(tmp_path), s, told) for s in (SETTINGS, HIDDEN))
    for (weights, about), (expected, _) in zip(hidden, plain, strict=True):
        assert equal(weights, expected)
        assert about["step"] == 10


def clipped(folder: str) -> str:
    return error_of(lambda: test_huggingface.fit(folder, HIDDEN))


def test_transformers_clips_unless_it_is_told_not_to(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        for said in ranks(clipped, str(tmp_path)):
            assert "Expected no clipping with overlap=True" in said
            assert "max_grad_norm=1.0" in said
