"""What does each pass over a group cost, against a copy of the same vector on the same machine?

The passes are called by their names in ``lightning_sparse.ops``, which chooses how they are computed. A bound is
the bytes that a pass cannot do without, at the rate of a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_sparse import ops
from lightning_sparse.core.layout import Gradient, InRuns
from lightning_sparse.core.step import Candidates
from lightning_sparse.ops import on_device
from lightning_sparse.ops.adam import Moved, Step, Steps
from lightning_sparse.ops.momentum import Momentum, Spending, Stepped
from tests.gpu.checks import Check, Clock, Numbers, SkipError
from tests.gpu.machine import copy_rate, require_memory
from tests.gpu.timing import seconds_of
from tests.static_path import static_path

SIZES = {"cuda": {"25M": 25_000_000, "144M": 144_000_000, "1000M": 1_000_000_000}, "cpu": {"20k": 20_000}}
SHARE = 800
"""One pick for so many coordinates: those of one of 8 ranks at a density of 0.01."""


class Pass(NamedTuple):
    bytes_each: float
    """Bytes a coordinate that are read and written at least."""
    needs: float
    """Bytes a coordinate of memory at most."""
    make: Callable[[torch.device, int], Callable[[], Any]]


def lying(numel: int, runs: int, device: torch.device) -> list[torch.Tensor]:
    """A gradient of ones in so many runs, each in memory of its own."""
    return [torch.ones(part.numel(), device=device) for part in torch.empty(numel, device="meta").tensor_split(runs)]


def accumulate(device: torch.device, numel: int, runs: int = 1) -> Callable[[], Any]:
    acc, grad, hints = torch.ones(numel, device=device), lying(numel, runs, device), Candidates()
    return lambda: ops.accumulate_(acc, grad, 1.0, hints)


def weigh(device: torch.device, numel: int, runs: int = 1) -> Callable[[], Any]:
    (acc, second), grad = (torch.ones(numel, device=device) for _ in range(2)), lying(numel, runs, device)
    score = grad[0] if runs == 1 else InRuns(Gradient(grad))
    units = torch.tensor([1.0, 1.0, 0.999], dtype=torch.float64, device=device)
    by = ops.Weights(units, torch.full((), 0.5, dtype=torch.float64, device=device), 0.999, 1e-8, 0.0025)
    hints = Candidates()
    return lambda: on_device.weigh_(acc, second, score, grad, by, hints)


def hand_over(device: torch.device, numel: int) -> Callable[[], Any]:
    grad, places = torch.zeros(numel, device=device), torch.arange(0, numel, 100, device=device)
    average = torch.ones(len(places), device=device)
    return lambda: on_device.hand_over_([grad], places, average, None, True)


def step_of_adam(device: torch.device, numel: int) -> Callable[[], Any]:
    """Of 64 parameters, where averages have arrived at one coordinate in 100."""
    divisor, grad = torch.ones(numel, device=device), torch.zeros(numel, device=device)
    grad[::100] = 1.0
    parameters = torch.ones(numel, device=device).tensor_split(64)
    moved = [Moved(*x) for x in zip(parameters, grad.tensor_split(64), divisor.tensor_split(64), strict=True)]
    steps = Steps()
    return lambda: steps.take_(moved, Step(1e-3, 0.9999))


def spend(device: torch.device, numel: int) -> Callable[[], Any]:
    """Momentum of 64 parameters, as above."""
    grad, velocity, parameter = torch.zeros(numel, device=device), *torch.ones((2, numel), device=device)
    grad[::100] = 1.0
    vectors = parameter, grad, velocity, torch.zeros(numel, dtype=torch.uint8, device=device)
    stepped = [Stepped(*x) for x in zip(*(vector.tensor_split(64) for vector in vectors), strict=True)]
    spending = Spending()
    return lambda: spending.spend_(stepped, Momentum(1e-3, 0.9, 1.0, False))


def look_at(compute: Callable[[torch.Tensor, int], Any], device: torch.device, numel: int) -> Callable[[], Any]:
    x = torch.randn(numel, device=device)
    return lambda: compute(x, numel // SHARE)


def scatter(device: torch.device, numel: int) -> Callable[[], Any]:
    x, skipped = torch.ones(numel, device=device), torch.zeros((), dtype=torch.bool, device=device)
    places = torch.arange(0, numel, 100, device=device)
    values = torch.ones(len(places), device=device)
    return lambda: ops.scatter_(x, places, values, skipped)


def subtract(device: torch.device, numel: int) -> Callable[[], Any]:
    """At one coordinate in 100."""
    x = torch.ones(numel + 1, device=device)
    places = torch.arange(0, numel, 100, device=device)
    values = torch.ones(len(places), device=device)
    return lambda: ops.subtract_at_(x, places, values)


def unite(device: torch.device, numel: int) -> Callable[[], Any]:
    """Picks of 8 ranks, half of them spare, thinned to one in 100."""
    picks = torch.randint(numel, (8, 2 * (numel // SHARE)), device=device).sort().values.flatten()
    spare, levels = picks % 2 == 0, picks % 100
    return lambda: ops.united(picks, spare, levels, numel, None, numel // 100, 3)


def above(x: torch.Tensor, k: int) -> Any:
    return ops.above(x, torch.full((), 3.0, dtype=torch.float64, device=x.device), capacity=4 * k)


def summed(x: torch.Tensor, k: int) -> Any:
    return ops.summed(x, torch.ones((), dtype=torch.float64, device=x.device), False)


PASSES = {
    "accumulate_": Pass(16, 20, accumulate),
    "weigh_": Pass(24, 40, weigh),
    "accumulate_ in 64 runs": Pass(16, 20, partial(accumulate, runs=64)),
    "weigh_ in 64 runs": Pass(24, 40, partial(weigh, runs=64)),
    "hand_over_": Pass(0.56, 16, hand_over),
    "step of Adam": Pass(12, 24, step_of_adam),
    "momentum spent early": Pass(6, 96, spend),
    "all_finite": Pass(4, 8, partial(look_at, lambda x, k: ops.all_finite(x))),
    "top_k": Pass(4, 24, partial(look_at, ops.top_k)),
    "above": Pass(4, 32, partial(look_at, above)),
    "summed": Pass(4, 16, partial(look_at, summed)),
    "scatter_": Pass(4, 8, scatter),
    "subtract_at_": Pass(0.76, 8, subtract),
    "united": Pass(0.3, 16, unite),
}


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    for size, numel in SIZES[device.type].items():
        rate: list[float] = []
        yield Check(f"copy {size}", partial(note, rate, device, numel))
        for name, one in PASSES.items():
            yield Check(f"{name} {size}", partial(time, one, device, numel, rate))


def note(rate: list[float], device: torch.device, numel: int) -> Numbers:
    rate.append(copy_rate(device, numel))
    return {"GB/s": round(rate[0] / 1e9, 1)}


def time(one: Pass, device: torch.device, numel: int, rate: list[float]) -> Numbers:
    if not rate:
        raise SkipError("no rate to compare with")
    require_memory(device, one.needs * numel)
    with static_path():
        seconds = seconds_of(one.make(device, numel), device, repeats=7)
    floor = one.bytes_each * numel / rate[0]
    return {"ms": round(1e3 * seconds, 3), "times the bound": round(seconds / floor, 2)}
