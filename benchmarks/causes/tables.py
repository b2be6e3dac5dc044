"""Tables of docs/reports/causes.md, from kept results only."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.race.tasks import SHAKESPEARE

DENSE = "dense"


class Run(NamedTuple):
    """A training."""

    name: str
    """A variant, or `dense`, or `dense, beta1 0`."""
    ranks: int
    steps: int
    rate: float = 1.0
    seed: int = 0
    task: str = SHAKESPEARE.name
    """That of nanoGPT's script, or one of words."""


Found = Mapping[Run, Mapping[str, Any]]
"""Lines of results, by what was trained."""


def loss(found: Found, run: Run) -> float | None:
    """Return the last loss of a training; None: not trained."""
    return float(found[run]["curve"][-1][1]) if run in found else None


def behind(found: Found, run: Run) -> float | None:
    """Return how far it ends behind dense training of the same seed, in nats; None: one of them is not known."""
    own, dense = loss(found, run), loss(found, run._replace(name=DENSE))
    return None if own is None or dense is None or run.name == DENSE else own - dense


def csv_tables(found: Found) -> dict[str, str]:
    """Return the text of each file of a table, by its name."""
    made = {"causes": parts(found), "causes-rates": rates(found), "causes-words": words(found)}
    files = {}
    for name, rows in made.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        files[f"{name}.csv"] = text.getvalue()
    return files


def parts(found: Found) -> list[list[str]]:
    """Parts of the rule: the script's rate, where a seed is compared with dense training; the best ones first."""
    rows = []
    for run in (run for run in found if run == Run(run.name, 8, 1000) and not run.name.startswith("library")):
        curve = [f"{point:.3f}" for _, point in found[run]["curve"]]
        ends = [behind(found, run._replace(seed=seed)) for seed in (0, 1)]
        if run._replace(seed=1) in found:
            rows.append((loss(found, run), [run.name, f"{found[run]['density']:.4g}", *curve, *map(signed, ends)]))
    heads = ["variant", "density", "250 steps", "500", "750", "1000", "behind dense", "seed 1, behind dense"]
    return [heads, *(cells for _, cells in sorted(rows))]


def rates(found: Found) -> list[list[str]]:
    """Losses at multiples of the rate, of variants that were trained at several."""
    columns = [(1.0, 0, 1000), (2.0, 0, 1000), (4.0, 0, 1000), (1.0, 1, 1000), (4.0, 1, 1000), (1.0, 0, 2000)]
    heads = ["variant", "seed 0, rate 1", "rate 2", "rate 4", "seed 1, rate 1", "rate 4", "seed 0, rate 1, 2000 steps"]
    rows = []
    for name in dict.fromkeys(run.name for run in found if run.rate > 1 and run.task == SHAKESPEARE.name):
        cells = []
        for rate, seed, steps in columns:
            run = Run(name, 8, steps, rate, seed)
            own, end = loss(found, run), behind(found, run)
            cells.append("" if own is None else f"{own:.3f}" + (f" ({end:+.3f})" if end is not None else ""))
        exchanged = name == DENSE or shown(name) != name
        rows.append([shown(name) if exchanged else f"{name}, formulas with sqrt(n)", *cells])
    return [heads, *sorted(rows, key=lambda row: (row[0] != DENSE, row[3] or "9", row[0]))]


def words(found: Found) -> list[list[str]]:
    """Perplexities of words with four ranks, and how far they are from dense training."""
    tasks = {"lstm-600": "LSTM", "gpt-300": "GPT"}
    seeds = [(task, seed) for task in tasks for seed in (1, 2)]
    rows = []
    for name in dict.fromkeys(run.name for run in found if run.task in tasks):
        cells = []
        for task, seed in seeds:
            for run in (run for run in found if (run.name, run.task, run.seed) == (name, task, seed)):
                own, end = loss(found, run), behind(found, run)
                assert own is not None
                beside = f" ({100 * math.expm1(end):+.1f} %)" if end is not None else ""
                cells.append(f"{math.exp(own):.1f}{beside}")
                break
            else:
                cells.append("")
        rows.append([shown(name), *cells])
    return [["variant", *(f"{tasks[task]}, seed {seed}" for task, seed in seeds)], *rows]


def shown(name: str) -> str:
    """Return what a row is called: what the library exchanges, by its sparsifier."""
    factor, *others = name.split(", ")
    if factor not in ("library", "sqrt(n)", "exact factor"):
        return name
    sparsifier = "`MeanTopK`" if "MeanTopK" in others else "`UnionTopK`"
    own = [] if factor == "library" else [factor]
    return ", ".join([sparsifier, *(other for other in others if other != "MeanTopK"), *own])


def signed(value: float | None) -> str:
    """Return it with its sign, or nothing."""
    return "" if value is None else f"{value:+.3f}"
