"""Settings of a wrong kind are refused when a method is made, by a sentence, for every method of the registries."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.methods.density import DensitySchedule
from lightning_sparse.tools.advisor.prediction import scenarios
from lightning_sparse.tools.traffic import count_bytes
from tests.contract.cases import CASES

SCHEDULES = (ls.density.Constant, ls.Warmup)
KINDS: list[type] = [
    *(
        kind
        for registry in (ls.sparsifiers.SPARSIFIERS, ls.exchanges.EXCHANGES, ls.memories.MEMORIES)
        for _, kind in registry.items()
    ),
    *SCHEDULES,
]
NEEDED: dict[str, Any] = {
    "density": 0.5, "start": 0.5, "end": 0.1, "steps": 3, "max_norm": 1.0,
    "decay": 0.1,
}  # fmt: skip
"""Settings without a default."""
HUGE = 10**400
WRONG = ("a text", True, math.nan, HUGE, torch.tensor(0.5), ["1"])
"""No numbers that a setting could be."""


def settings() -> Iterator[tuple[type, str, Any]]:
    """Settings that are numbers or flags, and values of other kinds."""
    for kind in KINDS:
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        for field in fields(kind) if is_dataclass(kind) else ():
            if not field.init:
                continue
            accepted = set(getattr(hints[field.name], "__args__", (hints[field.name],)))
            if accepted & {int, float}:
                yield from ((kind, field.name, value) for value in WRONG if field.name != "seed" or value is not HUGE)
                if type(None) not in accepted:
                    yield kind, field.name, None
            elif bool in accepted:
                yield from ((kind, field.name, value) for value in ("False", 1, None))


def test_numbers_and_flags_of_other_kinds_are_refused_at_construction() -> None:
    seen = set()
    for kind, name, value in settings():
        needed = {f.name: NEEDED[f.name] for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
        with pytest.raises(ValueError, match=name):
            kind(**{**needed, name: value})
            pytest.fail(f"{kind.__name__}({name}={value!r}) was accepted")
        seen.add((kind, name))
    assert (ls.memories.MomentumCorrection, "nesterov") in seen
    assert (ls.sparsifiers.ExDyna, "alpha") in seen
    assert len(seen) > 25


class Given(DensitySchedule):
    """Gives what it was given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, step: int) -> float:
        return self.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", [5.0, 0.0, -1.0, math.nan, None, "0.1"])
def test_a_schedule_that_gives_no_density_is_told(value: Any) -> None:
    for case in CASES:
        with pytest.raises(ValueError, match="the density of a step to be a number in"):
            next(ls.simulate(torch.randn(1, 2, 64), sparsifier=case.sparsifier, density=Given(value)))


NUMPY: list[Callable[[Any], Any]] = [np.float32, np.float64, np.int32, np.int64, np.bool_]


def of_numpy(value: Any) -> list[Any]:
    """The value as numbers of numpy that are equal to it, or nearly so."""
    kinds = {bool: NUMPY[4:], int: NUMPY[2:4], float: NUMPY[:2]}.get(type(value), [])
    return [kind(value) for kind in kinds]


def test_numbers_of_numpy_are_kept_as_those_of_python() -> None:
    seen = set()
    for kind in (
        *KINDS,
        *(kind for _, kind in ls.grouping.GROUPINGS.items()),
        ls.tuning.HiddenDensity,
        ls.Rules,
        ls.Watch,
    ):
        for field in fields(kind) if is_dataclass(kind) else ():
            given = NEEDED[field.name] if field.default is MISSING and field.name in NEEDED else field.default
            optional = given is None and "int" in str(field.type)
            for value in of_numpy(3 if optional else given) if field.init else ():
                needed = {f.name: NEEDED[f.name] for f in fields(kind) if f.default is MISSING and f.name in NEEDED}
                kept = getattr(kind(**{**needed, field.name: value}), field.name)
                assert type(kept) in (bool, int, float) and kept == value, (kind, field.name, kept)
                seen.add((kind, field.name))
    assert {
        (ls.sparsifiers.ExDyna, "num_blocks"),
        (ls.Watch, "adam"),
        (ls.Rules, "dense_ndim"),
        (ls.Warmup, "steps"),
    } < seen
    assert len(seen) > 40


@pytest.mark.parametrize(
    "given",
    [
        {"density": 0.5}, {"bucket_cap_mb": 4}, {"bucket_cap_mb": 0.5}, {"strict_resume": True}, {"node_size": 2},
        {"save_residuals": False}, {"find_unused_parameters": True}, {"watch": {"every": 7}},
        {"rules": {"densities": {"a": 0.25}}}, {"density": {"start": 0.5, "end": 0.125, "steps": 4}},
    ],
    ids=str,
)  # fmt: skip
def test_strategies_save_numbers_of_numpy_as_those_of_python(given: dict[str, Any]) -> None:
    makers: dict[str, Any] = {"watch": ls.Watch, "rules": ls.Rules, "density": ls.Warmup}

    def made(value: Any) -> Any:
        [(name, setting)] = given.items()
        setting = makers[name](**as_kind(setting, value)) if isinstance(setting, dict) else as_kind(setting, value)
        return ls.SparseDDPStrategy(**{name: setting}).config

    def as_kind(setting: Any, numpy: bool) -> Any:
        if isinstance(setting, dict):
            return {name: as_kind(one, numpy) for name, one in setting.items()}
        if isinstance(setting, list):
            return [as_kind(one, numpy) for one in setting]
        return of_numpy(setting)[-1] if numpy else setting

    assert made(True) == made(False)
    assert json.dumps(made(True).as_dict()) == json.dumps(made(False).as_dict())
    assert made(True).algorithm == made(False).algorithm  # which a saved state is compared by


def test_callbacks_and_functions_take_numbers_of_numpy() -> None:
    two, true = np.int64(2), np.True_
    for callback in (
        ls.SparsityMonitor(groups=true, shadow_every=two, shadow_density=np.float32(0.5)),
        ls.GradientDistribution(every=two, most=two),
        ls.PartitionMap(every=two, most=two),
        ls.FlushResidual(every_n_epochs=two),
    ):
        assert not [v for v in vars(callback).values() if isinstance(v, np.generic)], vars(callback)
    counted = count_bytes("top_k", np.int64(100), world_size=two, density=np.float32(0.5))
    assert counted == count_bytes("top_k", 100, world_size=2, density=0.5)
    rates = np.logspace(0, 1, 2)
    assert scenarios(1, np.array([2, 4]), rates) == scenarios(1, [2, 4], [1.0, 10.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected density to be a number"):
        ls.SparseDDPStrategy(density=np.float32(2))


def test_numbers_of_numpy_are_densities() -> None:
    steps = [
        next(ls.simulate(torch.ones(1, 2, 64), sparsifier="top_k", density=Given(kind(0.25))))
        for kind in (float, np.float32)
    ]
    assert steps[0].indices.tolist() == steps[1].indices.tolist()
