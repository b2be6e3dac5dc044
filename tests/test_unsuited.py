"""Optimizers are known by their names, and whatever else their settings hold ends no training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_sparse.memory.unsuited import unsuited


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"betas": (0.9,)}, (0.9, None)),
        ({"betas": 0.8}, (0.8, None)),
        ({"betas": [torch.tensor(0.9), torch.tensor(0.99)]}, (pytest.approx(0.9), pytest.approx(0.99))),
        ({"beta1": 0.7}, (0.7, None)),
        ({"betas": ()}, None),
        ({"betas": (0.0, 0.9)}, None),
        ({"betas": "high"}, None),
        ({"beta1": "high"}, None),
        ({}, None),
    ],
)
def test_settings_of_other_packages_are_read_as_far_as_they_are_numbers(setting: dict[str, Any], expected: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = type("OwnAdam", (torch.optim.SGD,), {})([weight], lr=0.1)
    optimizer.param_groups[0].update(setting)
    found = unsuited(optimizer, {id(weight)})
    assert (None if found is None else found[2:]) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [("FusedLion8bit", "lion"), ("lion", "lion"), ("MuonWithAuxAdam", "muon"), ("Medallion", None), ("Million", None)],
)
def test_optimizers_of_one_length_are_known_by_a_whole_word(name: str, kind: str | None) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    found = unsuited(type(name, (torch.optim.SGD,), {})([weight], lr=0.1), {id(weight)})
    assert (None if found is None else found.kind) == kind
