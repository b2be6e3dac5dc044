"""Draw the figures of docs/reports/equal-bytes.md, from the tables that `lightning-sparse compare` and `replay` leave.

Where trainings end: dots are seeds, lines reach from the least to the largest one, and a vertical line is the mean of
dense training. On recorded gradients: a dot for each method and number of ranks, a figure for each measure.

python benchmarks/compare_figures.py --compare FOLDER/compare.csv --replay FOLDER/replay.csv
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import CLI

from lightning_sparse.tools.compare import recorded
from lightning_sparse.tools.compare.methods import DENSE, METHODS
from lightning_sparse.tools.compare.sheets import Sheet
from lightning_sparse.tools.compare.tables import by_method, contests, title
from lightning_sparse.tools.compare.training import Result
from lightning_sparse.tools.style import (
    COLOURS,
    INK,
    MARKERS,
    Look,
    common_legend,
    look,
    panels,
    plain_numbers,
    robust_range,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ours() -> list[str]:
    """The methods that this package proposes, which stand out in all figures."""
    return [method.name for method in METHODS if method.ours]


def looks() -> dict[str, Look]:
    """The look of every method, the same in all figures."""
    published = [method.name for method in METHODS if not method.ours]
    return {name: look(place) for place, name in enumerate([*ours(), *published])}


def draw_ends(results: Sequence[Result], measure: str, path: Path) -> None:
    """One panel for each contest, methods in order of their mean loss.

    Args:
        results: of all trainings.
        measure: "loss" or "quality".
        path: of an SVG or PNG file.
    """
    rooms = contests(results)
    most = max(len(by_method(room)) for room in rooms)
    figure, places = panels(len(rooms), 2, 6.5, 1.2 + 0.24 * most)
    for panel, room in zip(places, rooms, strict=True):
        runs = by_method(room)
        dense = [getattr(run, measure) for run in runs.pop(DENSE.name, [])]
        means = {name: fmean(run.loss for run in some) for name, some in runs.items()}
        order = sorted(means, key=lambda name: (not math.isfinite(means[name]), means[name]))
        name = "training loss" if measure == "loss" else f"validation {room[0].quality_name}"
        panel.set_title(title(room), fontsize=10)
        if measure == "loss" or room[0].quality_name == "perplexity":
            panel.set_xscale("log")
        values = {method: [getattr(run, measure) for run in runs[method]] for method in order}
        for height, (method, some) in enumerate(values.items()):
            if method in ours():
                panel.axhspan(height - 0.5, height + 0.5, color="#F2F2F2", zorder=0)
            drawn_as = looks()[method]
            style = {"color": drawn_as.colour, "marker": drawn_as.marker, "linewidth": 1.2, "markersize": 5}
            panel.plot(sorted(some), [height] * len(some), **style)
        log = panel.get_xscale() == "log"
        low, high, *_ = robust_range([value for some in values.values() for value in some], log)
        low, high, *_ = robust_range([low, high, *dense], log)  # dense training is always shown
        panel.set_xlim(low, high)
        outside = [
            f"{method} ({fmean(some):.2g})" if math.isfinite(fmean(some)) else f"{method} (diverged)"
            for method, some in values.items()
            if not any(low <= value <= high for value in some)
        ]
        panel.axvline(fmean(dense), color=INK, linestyle="--", linewidth=1)
        panel.set_yticks(range(len(order)), order)
        panel.set_ylim(len(order) - 0.5, -0.5)
        for label in panel.get_yticklabels():
            label.set_fontweight("bold" if label.get_text() in ours() else "normal")
        left_out = f"\nfar outside: {', '.join(outside)}" if outside else ""
        panel.set_xlabel(f"{name} at the end (each seed; dashed: dense){left_out}")
        plain_numbers(panel.xaxis)
    save(figure, path)


class Axis(NamedTuple):
    """Axis of a measure of the open loop."""

    label: str
    scale: str = "linear"
    ideal: float | None = None


AXES = {
    "relative_density_error": Axis("density error / %", "symlog", 0.0),
    "steps_to_target": Axis("steps until the estimate stays within 10 % (right edge: never)"),
    "padding_ratio": Axis("padding ratio f(t)", ideal=1.0),
    "build_up": Axis("build-up u / k", "log", 1.0),
    "estimate": Axis("picks / intended picks, 5 % to 95 %", "log", 1.0),
    "captured": Axis("captured share of the best k coordinates' energy", ideal=1.0),
    "bytes_sent": Axis("bytes sent by each rank in a step", "log"),
}


def draw_replay(rows: Sequence[recorded.Row], folder: Path) -> list[Path]:
    """Draw dots for each method, a figure for each measure and a panel for each stream and density.

    Args:
        rows: in the order of methods; several seeds are drawn as several dots.
        folder: for ``replay_<measure>.svg``.

    Returns:
        The files.
    """
    streams, densities = list(dict.fromkeys(r.stream for r in rows)), sorted({r.density for r in rows}, reverse=True)
    rooms = [
        (stream, density)
        for stream, density in product(streams, densities)
        if any((row.stream, row.density) == (stream, density) for row in rows)
    ]
    files = []
    for name, axis in AXES.items():
        figure, places = panels(len(rooms), len(densities), 5.5, 1.5 + 0.25 * len({row.method for row in rows}))
        for panel, (stream, density) in zip(places, rooms, strict=True):
            some = [row for row in rows if (row.stream, row.density) == (stream, density)]
            panel.set(title=f"{stream}, density {density:g}", xlabel=axis.label)
            _draw_dots(panel, some, name, axis)
            plain_numbers(panel.xaxis)
        common_legend(figure, places)
        files.append(save(figure, folder / f"replay_{name}.svg"))
    return files


def _draw_dots(panel: Axes, rows: list[recorded.Row], name: str, axis: Axis) -> None:
    methods, ranks = list(dict.fromkeys(row.method for row in rows)), sorted({row.ranks for row in rows})
    if axis.scale == "symlog":
        panel.set_xscale("symlog", linthresh=1)
    else:
        panel.set_xscale(axis.scale)
    if axis.ideal is not None:
        panel.axvline(axis.ideal, color=INK, linewidth=0.8)
    for i, n in enumerate(ranks):
        some = [row for row in rows if row.ranks == n]
        heights = [methods.index(row.method) + 0.5 * ((i + 0.5) / len(ranks) - 0.5) for row in some]
        values = [_value(row, name) for row in some]
        look: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": "none",
        }
        panel.plot(values, heights, label=f"{n} ranks", markersize=5, **look)
        if name == "estimate":
            for row, height in zip(some, heights, strict=True):
                panel.plot([row.estimate_low, row.estimate_high], [height, height], color=look["color"], linewidth=1)
    panel.set_yticks(range(len(methods)), methods)
    panel.set_ylim(len(methods) - 0.5, -0.5)
    for label in panel.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() in ours() else "normal")
    for place, method in enumerate(methods):
        if method in ours():
            panel.axhspan(place - 0.5, place + 0.5, color="#F2F2F2", zorder=0)


def _value(row: recorded.Row, name: str) -> float:
    value = getattr(row, name)
    if value is None:
        return float(row.steps) if row.steps >= recorded.STAY else float("nan")  # else too few steps to decide
    # Zero has no place on a logarithmic axis.
    return float("nan") if AXES[name].scale == "log" and value <= 0 else float(value)


def main(compare: Path | None = None, replay: Path | None = None, folder: Path | None = None) -> None:
    """Draw what there is a table of.

    Args:
        compare: compare.csv, for compare_end_loss.svg and compare_end_quality.svg.
        replay: replay.csv, for replay_<measure>.svg.
        folder: for the figures; None: that of each table.
    """
    if compare:
        for measure in ("loss", "quality"):
            draw_ends(Sheet(compare, Result).read(), measure, (folder or compare.parent) / f"compare_end_{measure}.svg")
    if replay:
        draw_replay(Sheet(replay, recorded.Row).read(), folder or replay.parent)


if __name__ == "__main__":
    CLI(main, as_positional=False)
