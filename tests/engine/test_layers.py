"""Imports within the engine go one way: from the step to the network, and never back."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_sparse

ENGINE = Path(lightning_sparse.__file__).parent / "engine"
LAYERS = (
    {"ahead", "average", "calls", "config", "gradient_hooks", "signals", "stream", "network", "agreement", "weights"},
    {"drivers", "metrics", "share", "record", "diversity"},
    {"pipeline"},
    {"group"},
    {"regrouping"},
    {"copies", "moves", "meeting"},
    {"step"},
    {"optimizers"},
    {"state"},
    {"backward", "clipping", "view"},
    {"overlap"},
    {"engine"},
)
"""From the lowest on: the network, groups, the step, optimizers, states, the engine."""


def layer(module: str) -> int:
    [found] = [number for number, names in enumerate(LAYERS) if module.split(".")[0] in names]
    return found


def test_no_import_goes_upward() -> None:
    for path in sorted(ENGINE.rglob("*.py")):
        here = path.relative_to(ENGINE).with_suffix("").as_posix().replace("/", ".")
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith("lightning_sparse.engine."):
                there = module.removeprefix("lightning_sparse.engine.")
                assert "__init__" in here or layer(there) <= layer(here), f"{here} imports {there}"
