"""The methods that race: what each one is called, and what of it is searched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.race.methods.base import Method
from benchmarks.race.methods.demo import DeMo
from benchmarks.race.methods.dense import Dense, PowerSGD
from benchmarks.race.methods.drift import Drift
from benchmarks.race.methods.local import Local
from benchmarks.race.methods.optimizers import Averaged, Today
from benchmarks.race.methods.ours import ByRoot, Ours, TopK
from benchmarks.race.methods.sparseloco import SparseLoCo


@dataclass(frozen=True)
class Configuration:
    """A method with its fixed settings.

    Attributes:
        make: the class.
        settings: fixed ones, and where the search of others begins.
        outer: values of settings that are searched at the best rate, all with all.
        title: in tables.
        asks: of the user's optimizer.
    """

    make: Callable[..., Method]
    settings: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    title: str = ""
    asks: str = ""


ANY = "nothing: any optimizer"
ADAMW = "AdamW or SGD, whose step it takes"
INSIDE = "any optimizer, with a state on each rank; a second one outside"
OWN = "to be replaced: steps of signs"
DILOCO = {"outer": (0.35, 0.7, 1.4), "momentum": (0.3, 0.6, 0.9)}
LOCO_BEGIN = {"outer": 1.0, "decay": 0.95}
LOCO = {"outer": (0.5, 1.0, 2.0), "decay": (0.8, 0.95, 0.99)}


def _by_root(settings: Mapping[str, Any], title: str) -> Configuration:
    """Ours, with the factor of steps of earlier versions."""
    return Configuration(ByRoot, settings, title=f"{title}, sqrt(n)", asks=ADAMW)


CONFIGURATIONS: dict[str, Configuration] = {
    "dense": Configuration(Dense, title="AdamW, dense (DDP)", asks=ANY),
    "powersgd-1": Configuration(PowerSGD, {"rank": 1}, title="PowerSGD, rank 1", asks=ANY),
    "averaging-10": Configuration(Local, {"every": 10}, title="averaging, H 10", asks=INSIDE),
    "averaging-30": Configuration(Local, {"every": 30}, title="averaging, H 30", asks=INSIDE),
    "diloco-30": Configuration(
        Local, {"every": 30, "outer": 0.7, "momentum": 0.9}, DILOCO, title="DiLoCo, H 30", asks=INSIDE
    ),
    "sparseloco-10": Configuration(
        SparseLoCo, {"every": 10, **LOCO_BEGIN}, LOCO, title="SparseLoCo, H 10", asks=INSIDE
    ),
    "sparseloco-30": Configuration(
        SparseLoCo, {"every": 30, **LOCO_BEGIN}, LOCO, title="SparseLoCo, H 30", asks=INSIDE
    ),
    "demo": Configuration(DeMo, {"k": 32, "decay": 0.999}, title="DeMo, k 32", asks=OWN),
    "distro": Configuration(DeMo, {"k": 4, "decay": 0.995, "signs": True}, title="DisTrO, k 4, 1 bit", asks=OWN),
    "top_k": Configuration(TopK, {"density": 0.01}, title="Top-k 0.01, residual", asks=ANY),
    "ours": Configuration(Ours, {"density": 0.01}, title="ours, 0.01", asks=ADAMW),
    "ours-2": Configuration(Ours, {"density": 0.02}, title="ours, 0.02", asks=ADAMW),
    "ours-4": Configuration(Ours, {"density": 0.04}, title="ours, 0.04", asks=ADAMW),
    "root": _by_root({"density": 0.01}, "ours, 0.01"),
    "ours-50": _by_root({"density": 0.02}, "ours, 0.02"),
    "mean": _by_root({"density": 0.008, "voted": True}, "ours, MeanTopK, 0.008"),
    "ours-200": _by_root({"density": 0.005}, "ours, 0.005"),
    "ours-300": _by_root({"density": 0.0034}, "ours, 0.0034"),
    "ours-600": _by_root({"density": 0.0017}, "ours, 0.0017"),
    "turned": _by_root({"density": 0.01, "turned": True}, "ours, turned, 0.01"),
    "turned-300": _by_root({"density": 0.0034, "turned": True}, "ours, turned, 0.0034"),
    "chunked-300": _by_root({"density": 0.0034, "chunked": True}, "ours, 0.0034, of each chunk"),
    "decay-300": _by_root({"density": 0.0034, "keeps": 0.999}, "ours, 0.0034, residual decays"),
    "turned-600": _by_root({"density": 0.0017, "turned": True}, "ours, turned, 0.0017"),
    "whole-600": _by_root({"density": 0.0017, "whole": True}, "ours, 0.0017, vectors too"),
    "turned-whole-600": _by_root(
        {"density": 0.0017, "turned": True, "whole": True}, "ours, turned, 0.0017, vectors too"
    ),
    "late": _by_root({"density": 0.01, "late": True}, "ours, 0.01, one step late"),
    "late-ahead": _by_root({"density": 0.01, "late": True, "ahead": 1.0}, "ours, 0.01, one step late, extrapolated"),
    "parts": Configuration(Ours, {"density": 0.01, "parts": 2}, title="ours, 0.01, of each half", asks=ADAMW),
    "ours-1000": Configuration(Ours, {"density": 0.001}, title="ours, 0.001", asks=ADAMW),
}
"""By name. Settings of ours are fixed before any search; `sqrt(n)`: with the factor of steps of earlier versions."""

STEPS = {"factor": "root", "longer": "steps"}
"""The factor in each rank's own steps; else it is measured, and lengthens averages."""
DRIFTS: dict[str, dict[str, Any]] = {
    "average-gain": {},
    "average-drift": {"score": "drift"},
    "steps-gain": {**STEPS},
    "steps-drift": {**STEPS, "score": "drift"},
    "average-agreed": {"decay": "agreed"},
    "steps-agreed": {**STEPS, "decay": "agreed"},
    "average-sparse": {"embeddings": "second_moment"},
    "steps-sparse": {**STEPS, "embeddings": "second_moment"},
    "average-gain-joint": {"clipping": "joint"},
    "steps-gain-joint": {**STEPS, "clipping": "joint"},
    "average-warm": {"warm_up": 150},
    "steps-warm": {**STEPS, "warm_up": 150},
}
"""Variants of drift: where the factor is and the score, or what is special."""
OTHERS = {
    "adamw": "AdamW",
    "nadam": "NAdam",
    "rmsprop": "RMSprop",
    "adafactor": "Adafactor",
    "sgd": "SGD with momentum",
    "soap": "SOAP",
    "adamw8": "AdamW with 8 bits",
}
"""Names of optimizers that have one variant of drift, in tables. Steps of SGD are linear: their mean is not shorter."""


def _of_optimizers() -> Iterator[tuple[str, Configuration]]:
    for optimizer in ("muon", "lion"):
        own, title = {"optimizer": optimizer}, optimizer.capitalize()
        yield f"{optimizer}-dense", Configuration(Averaged, own, title=f"{title}, dense (DDP)")
        yield f"{optimizer}-today", Configuration(Today, own, title=f"{title}, today")
        joint = Configuration(Averaged, own | {"clipping": "joint"}, title=f"{title}, dense (DDP), clipped jointly")
        yield f"{optimizer}-dense-joint", joint
        for name, settings in DRIFTS.items():
            if optimizer == "muon" or not name.endswith("sparse"):
                yield f"{optimizer}-{name}", Configuration(Drift, own | settings, title=f"{title}, drift: {name}")
    for optimizer, title in OTHERS.items():
        own, factor = {"optimizer": optimizer}, {"factor": "one"} if optimizer == "sgd" else {}
        yield f"{optimizer}-dense", Configuration(Averaged, own, title=f"{title}, dense (DDP)")
        yield f"{optimizer}-today", Configuration(Today, own, title=f"{title}, today")
        drift = own | STEPS | factor
        yield f"{optimizer}-steps-gain", Configuration(Drift, drift, title=f"{title}, drift: steps-gain")
    yield "adamw-ours", _by_root({"density": 0.01}, "AdamW, by its own rule")


OPTIMIZERS: dict[str, Configuration] = dict(_of_optimizers())
"""Other optimizers than AdamW, which have a plan and a report of their own: `python -m benchmarks.drift`."""
ALL: dict[str, Configuration] = {**CONFIGURATIONS, **OPTIMIZERS}
"""All that can be trained."""
