"""Optimizers are known by their names, and whatever else their settings hold ends no training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_sparse.tuning.unsuited import unsuited


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
    [
        ("FusedLion8bit", "lion"), ("lion", "lion"), ("MuonWithAuxAdam", "muon"), ("Medallion", None),
        ("Million", None), ("Rprop", "rprop"), ("LBFGSNew", "lbfgs"), ("RMSpropTF", "roots"), ("Adafactor", "roots"),
    ],
)  # fmt: skip
def test_optimizers_are_known_by_a_whole_word(name: str, kind: str | None) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    found = unsuited(type(name, (torch.optim.SGD,), {})([weight], lr=0.1), {id(weight)})
    assert (None if found is None else found.kind) == kind


@pytest.mark.parametrize(
    ("name", "settings", "kind"),
    [
        ("SGD", {"momentum": 0.9}, None),
        ("RMSprop", {}, "roots"),
        ("RMSprop", {"momentum": 0.5}, "momentum"),
        ("Adagrad", {}, "roots"),
        ("Adadelta", {}, "roots"),
        ("Adafactor", {}, "roots"),
        ("Rprop", {}, "rprop"),
        ("LBFGS", {}, "lbfgs"),
        ("ASGD", {}, None),
        ("Adamax", {}, "first moment"),
    ],
)
def test_optimizers_of_torch(name: str, settings: dict[str, Any], kind: str | None) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = getattr(torch.optim, name)([weight], **settings)
    found = unsuited(optimizer, {id(weight)})
    assert (None if found is None else found.kind) == kind
    assert found is None or found.remedy().startswith(f"{name} ")
    assert unsuited(optimizer, set()) is None


@pytest.mark.parametrize(
    ("name", "betas", "expected"),
    [("RMSprop8bit", (0.99, 0.0), ("roots", None)), ("RMSprop8bit", (0.99, 0.5), ("momentum", 0.5)),
     ("SGD8bit", (0.9, 0.1), ("momentum", 0.9)), ("SGD8bit", (0.0, 0.0), None),
     ("LARS8bit", (0.8, 0.0), ("momentum", 0.8))],
)  # fmt: skip
def test_betas_that_hold_other_settings(name: str, betas: tuple[float, float], expected: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = type(name, (torch.optim.Optimizer,), {})([weight], {"betas": betas})
    found = unsuited(optimizer, {id(weight)})
    assert (None if found is None else (found.kind, found.beta1)) == expected


def test_an_optimizer_without_a_state_keeps_nothing() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    own: Any = SimpleNamespace(param_groups=[{"params": [weight], "lr": 0.1}])
    assert unsuited(own, {id(weight)}) is None


class OwnSGD(torch.optim.SGD):
    """Whose steps nobody knows."""


def test_momentum_of_classes_derived_from_sgd_is_told_with_what_it_costs() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    found = unsuited(OwnSGD([weight], lr=0.1, momentum=0.9), {id(weight)})
    assert found is not None and found.kind == "momentum"
    for part in ("OwnSGD keeps momentum (0.9)", "torch.optim.SGD itself only", "docs/guide/optimizers.md"):
        assert part in found.remedy()
    assert unsuited(OwnSGD([weight], lr=0.1), {id(weight)}) is None


class Keeping(torch.optim.Optimizer):
    """Whose class and settings nobody knows."""

    def __init__(self, parameters: Any, kept: dict[str, Any], settings: dict[str, Any]) -> None:
        super().__init__(parameters, settings)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(kept)

    def step(self, closure: Any = None) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("kept", "settings", "kind"),
    [
        ({"average": torch.zeros(3)}, {}, "unknown"),
        ({"factors": torch.zeros(2, 2), "step": 1}, {"momentum": 0.0}, "unknown"),
        ({"step": torch.tensor(1.0), "name": "x"}, {}, None),
        ({}, {}, None),
        ({"exp_avg_sq": torch.zeros(3)}, {"betas": (0.0, 0.99)}, None),
        ({"average": torch.zeros(3)}, {"betas": (0.9, 0.99)}, "first moment"),
    ],
)
def test_an_optimizer_that_nobody_knows_is_told_of_if_it_keeps_something(
    kept: dict[str, Any], settings: dict[str, Any], kind: str | None
) -> None:
    weight, other = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    optimizer = Keeping([weight], kept, settings)
    found = unsuited(optimizer, {id(weight)})
    assert (None if found is None else found.kind) == kind
    assert found is None or found.remedy().startswith("Keeping keeps a ")
    assert unsuited(optimizer, {id(other)}) is None
