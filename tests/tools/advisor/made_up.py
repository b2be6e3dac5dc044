"""Measurements and predictions that nobody measured or predicted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from lightning_sparse.methods.grouping import ParameterSize
from lightning_sparse.tools.advisor import Advice, Measured, Method, Prediction, Scenario
from lightning_sparse.tools.advisor.networks import on
from lightning_sparse.tuning.performance.cost import Line
from lightning_sparse.tuning.performance.network import Network
from lightning_sparse.tuning.performance.profile import GroupCost, LayerTime, Profile, Traffic

NOTHING = Line(0.0, 0.0)
HERE = Scenario(2, None)


def method(name: str, density: float, cost: GroupCost, builtin: bool = False) -> Method:
    return Method(name, density, cost, builtin)


def measured(
    layers: int = 5,
    overlap: Any = "comm",
    seed: int = 0,
    ranks: int = 2,
    kind: str = "float32.cpu",
    messages: Any = "group",
) -> Measured:
    """Layers of a weight and a bias, dense DDP with its hooks, and two sparsifiers."""
    generator = random.Random(seed)

    def line() -> Line:
        return Line(generator.uniform(0, 3e-4), generator.uniform(0, 3e-9))

    sizes, times = [], []
    for i in range(layers):
        weight, bias = int(10 ** generator.uniform(3, 7)), int(10 ** generator.uniform(0, 3))
        sizes += [ParameterSize(f"m{i}.weight", weight, 4, kind), ParameterSize(f"m{i}.bias", bias, 4, kind)]
        times.append(LayerTime(f"m{i}", (f"m{i}.bias", f"m{i}.weight"), weight + bias, generator.uniform(0, 5e-3)))
    network = Network(line(), line(), ranks)

    def cost(density: float, *operations: str) -> GroupCost:
        traffic = tuple(Traffic(name, 1.0, Line(8.0, 4 * density)) for name in operations)
        return on(network, GroupCost(density, line(), line(), line(), traffic))

    methods = [
        method(name, 1.0, cost(1.0, "all_reduce"), builtin=True) for name in ("dense", "fp16", "bf16", "powersgd")
    ]
    for density in (0.1, 0.01):
        methods.append(method("top_k", density, cost(density, "all_gather")))
        shared = cost(density, "all_gather", "all_reduce")
        methods.append(method("shared_top_k", density, shared))
    buckets = generator.choice([(2.0**16, 2.0**18), (1e9, 1e9), (0.0, 0.0)])
    profile = Profile(times[::-1], 4e-3, network, [methods[0].cost], overlap, buckets, messages)
    return Measured(sizes, profile, methods)


def predicted(
    method: str,
    over_dense: float,
    density: float = 0.01,
    grouping: str = "model",
    groups: int = 1,
    scenario: Scenario = HERE,
) -> Prediction:
    """In a scenario where dense DDP takes 10 ms, 7 of them without exchange."""
    builtin = method in ("dense", "fp16", "bf16", "powersgd")
    seconds = 10e-3 * over_dense
    if builtin:
        density, grouping = 1.0, "bucket"
    what = (method, density, builtin, grouping, groups)
    return Prediction(scenario, *what, seconds, seconds - 7e-3, seconds / 10e-3, seconds)


def advice(rows: Sequence[Prediction], kind: str = "float32.cpu") -> Advice:
    """With dense DDP in every scenario."""
    scenarios = dict.fromkeys(row.scenario for row in rows)
    dense = [predicted("dense", 1.0, scenario=scenario) for scenario in scenarios]
    return Advice(measured(kind=kind), (*dense, *rows))
