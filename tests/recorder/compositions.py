"""What is recorded: which settings go together, and which of all combinations are run.

A composition is written as text, by public names, and built by each tree for itself.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import lightning_sparse as ls
from tests.recorder import inside

Composition = dict[str, str]
"""A choice on each axis."""

NEEDED = {"HardThreshold": ["HardThreshold(threshold=2.0)"], "MergeBelow": ["MergeBelow(900)"]}
"""Of classes that cannot be made without settings, or do nothing with their defaults here."""
MORE = {
    "ExDyna": ["ExDyna(num_blocks=8)", "ExDyna(num_blocks=8, variant='published')"],
    "DGC": ["DGC(exact_below=1)"],
    "OkTopk": ["OkTopk(interval=3, gain=1.2)"],
    "StripedTopK": ["StripedTopK(block=1)"],
    "UnionTopK": ["UnionTopK(max_factor=1.1)"],
    "Residual": ["Residual(decay=0.5)"],
    "MomentumCorrection": ["MomentumCorrection(0.5, nesterov=True, masking=False)"],
    "AdamCorrection": ["AdamCorrection(beta1=0.75)"],
    "ClipByNorm": ["ClipByNorm(1.0, MomentumCorrection(0.5))"],
}
"""Further settings of a class, beside its defaults and, where it has one, its published variant."""
AXES = {
    "grouping": ["'layer'", "'bucket'", "'model'", *NEEDED["MergeBelow"]],
    "density": ["0.05", "Warmup(0.3, 0.02, steps=8)", "0.2", "1.0"],
    "dtype": ["float32", "bfloat16", "float16", "float64"],
    "optimizer": ["SGD", "momentum", "AdamW"],
    "layout": ["unused", "unused in views", "all used"],
    "also": ["", "slower", "scaler", "norm", "value", "regroup", "resume", "accumulate", "rules"],
    "ranks": ["3", "2", "4"],
}
"""What a sparsifier, an exchange and a memory are combined with; the first of each is preferred. A fallback measures
times, which no two runs share, and is left out, as is what is refused (OptimalMerge, HiddenDensity)."""


def settings_of(registry: Any) -> list[str]:
    """All that is made of the classes of a registry."""
    texts = []
    for _, cls in registry.items():
        name, parameters = cls.__name__, inspect.signature(cls).parameters
        defaults = all(p.default is not p.empty for p in parameters.values())
        texts += NEEDED.get(name) or ([f"{name}()"] if defaults else [f"{name}(0.5)"])
        if "variant" in parameters and not any("published" in more for more in MORE.get(name, ())):
            texts.append(f"{name}(variant='published')")
        texts += MORE.get(name, ())
    return texts


def fits(one: Composition) -> bool:
    """Whether the parts go together: the package says so where it is configured, and the rest is said here."""
    memory, optimizer = one["memory"], one["optimizer"]
    if ("MomentumCorrection" in memory or "AdamCorrection" in memory) and optimizer != "SGD":
        return False
    if one["also"] == "scaler" and one["dtype"] == "float16":  # refused by GradScaler
        return False
    if "published" in one["sparsifier"] and one["ranks"] == "4":  # their groups have to be larger
        return False
    return _accepts(one["exchange"], one["sparsifier"]) and _carries(one["exchange"], memory)


@cache
def _accepts(exchange: str, sparsifier: str, memory: str = "None") -> bool:
    try:
        ls.engine.config.SparsificationConfig(sparsifier=made(sparsifier), exchange=exchange, memory=made(memory))
    except ValueError:
        return False
    return True


@cache
def _carries(exchange: str, memory: str) -> bool:
    one = next(s for s in settings_of(ls.sparsifiers.SPARSIFIERS) if _accepts(exchange, s))
    return _accepts(exchange, one, memory)


def made(text: str) -> Any:
    """An object of text."""
    return eval(text, inside.public_names())


def keywords(one: Composition) -> dict[str, Any]:
    """The settings that :func:`lightning_sparse.attach` takes."""
    named = {name: made(one[name]) for name in ("sparsifier", "memory", "grouping", "density")}
    rules = ls.Rules(dense=["3.*"], densities={"1.weight": 0.3}) if one["also"] == "rules" else None
    return {**named, "exchange": one["exchange"], "rules": rules}


def name_of(one: Composition) -> str:
    return " | ".join(value for value in one.values() if value)


def chosen(rounds: int) -> Iterator[Composition]:
    """Every sparsifier with every exchange that accepts it, so many times.

    What stands beside them is chosen so that pairs of values meet that have not met: the same in every run.

    Args:
        rounds: how often each pair is there.
    """
    pairs = [(s, name) for s in settings_of(ls.sparsifiers.SPARSIFIERS) for name, _ in ls.exchanges.EXCHANGES.items()]
    axes = {"memory": ["None", *settings_of(ls.memories.MEMORIES)], **AXES}
    first = {name: values[0] for name, values in axes.items()}
    pairs = [pair for pair in pairs if fits({"sparsifier": pair[0], "exchange": pair[1], **first})]
    draw, met = random.Random(0), set[Any]()
    for turn in range(rounds):
        for sparsifier, exchange in pairs:
            head = {"sparsifier": sparsifier, "exchange": exchange}
            offered = [{**head, **first}] if turn == 0 and sparsifier == "UnionTopK()" else []
            offered += [{**head, **{name: draw.choice(of) for name, of in axes.items()}} for _ in range(20)]
            fitting = [one for one in offered if fits(one)]
            best = max(fitting, key=lambda one: len(_pairs(one) - met))
            met |= _pairs(best)
            yield best


def _pairs(one: Composition) -> set[Any]:
    return set(combinations(one.items(), 2))
