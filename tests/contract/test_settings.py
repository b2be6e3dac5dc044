"""Settings of a wrong kind are refused when a method is made, by a sentence, for every method of the registries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.methods.density import DensitySchedule
from tests.contract.cases import CASES

SCHEDULES = (ls.density.Constant, ls.Warmup, ls.density.Accordion)
KINDS: list[type] = [
    *(
        kind
        for registry in (ls.sparsifiers.SPARSIFIERS, ls.exchanges.EXCHANGES, ls.memories.MEMORIES)
        for _, kind in registry.items()
    ),
    *SCHEDULES,
]
NEEDED: dict[str, Any] = {
    "density": 0.5, "start": 0.5, "end": 0.1, "steps": 3, "low": 0.1, "high": 0.5, "interval": 2, "max_norm": 1.0,
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


def test_numbers_of_numpy_are_densities() -> None:
    steps = [
        next(ls.simulate(torch.ones(1, 2, 64), sparsifier="top_k", density=Given(kind(0.25))))
        for kind in (float, np.float32)
    ]
    assert steps[0].indices.tolist() == steps[1].indices.tolist()
