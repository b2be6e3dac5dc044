"""Runs that nobody trained, as Lightning's loggers would have written them."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np

DENSE_STEP_MB = 0.25


def rows(
    steps: int = 300, seed: int = 0, sparsifier: str = "union_top_k", density: float = 0.01
) -> list[dict[str, float]]:
    """What `SparsityMonitor` and a model log every tenth step; a dense run logs its results only."""
    rng = np.random.default_rng(seed)
    found = []
    for step in range(9, steps, 10):
        row = {
            "step": step,
            "epoch": step // 100,
            "train/loss": 2.3 * math.exp(-step / 60) + 0.02 * rng.random() + 0.01,
        }
        if sparsifier != "dense":
            row |= sparse(step, density, rng)
        found.append(row)
        if step % 100 == 99:
            found.append({"step": step, "epoch": step // 100, "val/accuracy": 0.98 - 0.5 * math.exp(-step / 80)})
    return found


def sparse(step: int, density: float, rng: np.random.Generator) -> dict[str, float]:
    sent = 2.2 * density * DENSE_STEP_MB * (1 + 0.1 * rng.random())
    names = {
        "density": density * (1 + 0.05 * rng.standard_normal()),
        "target_density": density,
        "density_error": density * 0.02 * rng.random(),
        "padding_ratio": 1 + 0.3 * rng.random(),
        "build_up": 1 + 0.1 * rng.random(),
        "threshold": 0.01 * math.exp(-step / 200),
        "residual_norm": 3 * (1 - math.exp(-step / 50)),
        "threshold_over_residual": 0.004,
        "traffic/sent_mb": sent,
        "traffic/total_mb": 2.3 * density * DENSE_STEP_MB * (step + 1),
        "traffic/dense_total_mb": DENSE_STEP_MB * (step + 1),
        "traffic/ratio": DENSE_STEP_MB / sent,
        "time/select_ms": 2 + rng.random(),
        "time/exchange_ms": 4 + rng.random(),
        "time/exposed_ms": 3 + rng.random(),
        "time/total_s": 0.02 * (step + 1),
        "steps/skipped": float(step > 150),
        "steps/direct": 0.0,
    }
    return {f"sparse/{name}": value for name, value in names.items()}


def write_csv(folder: Path, logged: list[dict[str, float]], **settings: object) -> Path:
    """A folder of `CSVLogger`."""
    import yaml

    folder.mkdir(parents=True)
    names = list(dict.fromkeys(name for row in logged for name in row))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(logged)
    (folder / "hparams.yaml").write_text(yaml.safe_dump(settings))
    return folder


def compared(folder: Path) -> list[Path]:
    """Dense, UnionTopK and Top-k training of one model."""
    found = []
    for seed, name in enumerate(("dense", "union_top_k", "top_k")):
        settings = {} if name == "dense" else {"sparse_ddp": {"sparsifier": name, "density": 0.01}}
        found.append(write_csv(folder / name, rows(seed=seed, sparsifier=name), lr=0.05, **settings))
    return found
