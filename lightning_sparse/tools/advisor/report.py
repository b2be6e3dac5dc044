"""Advice as tables, as a figure, and as a configuration."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_sparse.core.console import Table
from lightning_sparse.tools.advisor.prediction import (
    EVERYTHING,
    HALVED,
    Prediction,
    Scenario,
    best_groupings,
    overlapped,
)
from lightning_sparse.tools.advisor.run import Advice, arguments_of, kept_settings
from lightning_sparse.tools.style import INK, label_ends, look, panels, plain_numbers, save

MARKERS = {"dense": "s", "fp16": "^", "bf16": "v", "powersgd": "D"}
"""Markers of DDP's methods in the figure."""
SHOWN = 12
"""Rows of the table on the terminal; the file has all of them."""


def overview(advice: Advice, scenario: Scenario | None = None, rows: int | None = None) -> Table:
    """Return the methods in one scenario, each with its fastest grouping, fastest first; always with DDP's methods."""
    scenario = scenario or advice.scenarios[0]
    ordered = sorted(_best(advice, scenario), key=lambda p: p.step_seconds)
    chosen = advice.best(scenario)
    cells = []
    for place, p in enumerate(ordered):
        if rows is None or place < rows or p.builtin or p == chosen:
            mark = " <- use this" if p == chosen else " (losing)" if p.over_dense >= 1.005 else ""
            cells.append(
                [
                    p.method + mark,
                    "" if p.builtin else f"{p.density:g}",
                    "DDP's buckets" if p.builtin else p.grouping,
                    str(p.groups),
                    f"{1e3 * p.step_seconds:.4g}",
                    f"{1e3 * p.exposed_seconds:.4g}",
                    "" if p.builtin else f"{1e3 * overlapped(advice.predictions, p).overlapped_seconds:.4g}",
                    f"{p.over_dense:.2f}",
                ]
            )
    header = ["method", "density", "grouping", "groups", "step ms", "exposed ms", "with overlap ms", "step / dense DDP"]
    return Table(f"Predicted step time, {scenario.label}", header, cells)


def across(advice: Advice) -> Table:
    """Return the best method in every scenario, and the ratios of the fastest of each kind to dense DDP."""
    cells = []
    for scenario in advice.scenarios:
        rows = _best(advice, scenario)
        dense = next(p for p in rows if p.method == "dense")
        best = advice.best(scenario)
        sparse = [p.over_dense for p in rows if p.sparse]
        cells.append(
            [
                scenario.label,
                _use(best),
                f"{1e3 * dense.step_seconds:.4g}",
                f"{1e3 * best.step_seconds:.4g}",
                f"{min(sparse):.2f}" if sparse else "",
                *(f"{_over(rows, name):.2f}" if _over(rows, name) else "" for name in ("fp16", "bf16", "powersgd")),
            ]
        )
    header = ["network", "use", "dense ms", "ms with it", "fastest sparse / dense", "fp16", "bf16", "PowerSGD 4"]
    return Table("What to use where; ratios are step times over dense DDP's, below 1 is faster", header, cells)


def _use(best: Prediction) -> str:
    if best.method == "dense":
        return "stay dense"
    if best.method == EVERYTHING:
        return f"dense, {best.grouping}"
    return f"dense, {best.method}" if best.builtin else f"{best.method} {best.density:g} ({best.grouping})"


def _over(rows: Sequence[Prediction], method: str) -> float | None:
    return next((p.over_dense for p in rows if p.method == method), None)


def _best(advice: Advice, scenario: Scenario) -> list[Prediction]:
    return best_groupings([p for p in advice.predictions if p.scenario == scenario])


def markdown(advice: Advice) -> str:
    """Return all of the advice as markdown, for a file."""
    verdicts = "".join(
        "".join(f"- {sentence}\n" for sentence in (advice.verdict(scenario), *advice.remarks(scenario)))
        for scenario in advice.scenarios
    )
    tables = [across(advice), *(overview(advice, scenario) for scenario in advice.scenarios)]
    notes = "".join(f"- {sentence}\n" for sentence in advice.assumptions())
    parts = [verdicts, *(table.markdown() for table in tables), "### Assumptions\n\n" + notes]
    return "\n".join(parts)


def write_csv(advice: Advice, path: Path) -> None:
    """Write all predictions, with every grouping."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*Scenario._fields, *Prediction._fields[1:]])
        for p in advice.predictions:
            writer.writerow([*p.scenario, *p[1:]])


def figure(advice: Advice, path: Path) -> None:
    """Draw step times over dense DDP's by scenario: a curve per method, at its fastest density and grouping.

    This needs matplotlib.
    """
    count = len(advice.scenarios)
    sheet, [axes] = panels(1, 1, max(7.0, 3.0 + 1.4 * count), 5.0)
    names: dict[str, list[float]] = {}
    for scenario in advice.scenarios:
        fastest: dict[str, float] = {}
        for p in _best(advice, scenario):
            fastest[p.method] = min(fastest.get(p.method, float("inf")), p.over_dense)
        for name, ratio in fastest.items():
            names.setdefault(name, []).append(ratio)
    for place, name in enumerate(sorted(names, key=lambda name: sum(names[name]))):
        builtin = {"color": INK, "linestyle": "--", "marker": MARKERS.get(name), "linewidth": 1.0}
        axes.plot(range(count), names[name], label=name, **(builtin if name in MARKERS else look(place).line))
    axes.axhline(1.0, color=INK, linewidth=0.8, label="_dense")
    axes.set_yscale("log")
    plain_numbers(axes.yaxis)
    axes.set_xticks(range(count), [scenario.label.replace(", ", "\n") for scenario in advice.scenarios])
    axes.set_ylabel("predicted step time / dense DDP")
    axes.set_title(
        "Each method at its fastest density and grouping; below 1 is faster than dense DDP", loc="left", fontsize=9
    )
    label_ends(axes)
    save(sheet, path)


CHOSEN = (
    *("dense", "rules", "memory", "node_size", "timeout"),
    *("single_device", "watch", "save_residuals", "strict_resume", "resize"),
)
"""Settings of our strategy that an advice leaves as they are."""


def strategy_config(advice: Advice, scenario: Scenario | None = None, given: Any = None) -> Any:
    """Return ``trainer.strategy`` of the advised configuration: DDP, or ours with its settings.

    Args:
        advice: to follow.
        scenario: None: the first one.
        given: the strategy so far; its start method and arguments of DDP are kept. Of ours, what says how it trains is
            kept, too: dense parameters, memory, nodes, treatment of skipped steps and of checkpoints.
    """
    kept = kept_settings(given)
    best = advice.best(scenario)
    if best.method in HALVED:
        hook = f"torch.distributed.algorithms.ddp_comm_hooks.default_hooks.{best.method}_compress_hook"
        return {"class_path": "DDPStrategy", "init_args": {"ddp_comm_hook": hook} | kept}
    if best.builtin:
        return {"class_path": "DDPStrategy", "init_args": kept} if kept else "ddp"
    groupings: dict[str, Any] = {"merge_below": {"class_path": "lightning_sparse.grouping.MergeBelow"}}
    settings: dict[str, Any] = {
        "sparsifier": best.method,
        "density": best.density,
        "grouping": groupings.get(best.grouping, best.grouping),
    }
    own = _own(given)
    settings |= {name: own[name] for name in CHOSEN if name in own}
    return {"class_path": "lightning_sparse.SparseDDPStrategy", "init_args": settings | kept}


def _own(given: Any) -> dict[str, Any]:
    """Return the settings of our strategy in a configuration."""
    ours = isinstance(given, dict) and "SparseDDPStrategy" in str(given.get("class_path"))
    return arguments_of(given) if ours else {}


def write_configs(advice: Advice, folder: Path, given: dict[str, Any] | None = None) -> list[Path]:
    """Write a LightningCLI configuration for each scenario: the given one, with the strategy to use there.

    Returns:
        The files: ``config.yaml`` for the first scenario, and others named after theirs.
    """
    import yaml

    given = dict(given or {})
    section = dict(given.get("fit") or given)
    trainer = dict(section.get("trainer") or {})
    paths: list[Path] = []
    for scenario in advice.scenarios:
        strategy = strategy_config(advice, scenario, trainer.get("strategy"))
        section["trainer"] = trainer | {"strategy": strategy}
        text = yaml.safe_dump(given | {"fit": section} if given.get("fit") else section, sort_keys=False)
        rate = "" if scenario.gbit is None else f"-{scenario.gbit:g}-gbit"
        rate += f"-{scenario.rtt_ms:g}-ms" if scenario.rtt_ms else ""
        paths.append(folder / (f"config-{scenario.ranks}-ranks{rate}.yaml" if paths else "config.yaml"))
        sentences = [advice.verdict(scenario), *advice.remarks(scenario)]
        if (memory := _own(trainer.get("strategy")).get("memory")) and not advice.best(scenario).sparse:
            sentences.append(
                f"The memory {memory} has no part in dense training: give the optimizer what it did, such as momentum "
                "or Adam's moments."
            )
        comments = "".join(f"# {sentence}\n" for sentence in sentences)
        paths[-1].write_text(comments + text, encoding="utf-8")
    return paths
