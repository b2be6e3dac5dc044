"""Results of comparisons as figures; methods that this package proposes stand out.

matplotlib is needed; it is imported when a figure is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_sparse.tools.compare import recorded
from lightning_sparse.tools.compare.methods import DENSE, METHODS
from lightning_sparse.tools.compare.tables import by_method, contests, title
from lightning_sparse.tools.compare.training import CurvePoint, Result
from lightning_sparse.tools.style import (
    COLOURS,
    INK,
    MARKERS,
    Look,
    common_legend,
    label_ends,
    look,
    panels,
    plain_numbers,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ours() -> list[str]:
    """Return the methods that this package proposes, which stand out in all figures."""
    return [method.name for method in METHODS if method.ours]


def looks() -> dict[str, Look]:
    """Return the look of every method, the same in all figures."""
    published = [method.name for method in METHODS if not method.ours]
    return {name: look(place) for place, name in enumerate([*ours(), *published])}


def judge_figures(results: Sequence[Result], curves: Sequence[CurvePoint], folder: Path) -> list[Path]:
    """Draw training loss and validation quality against megabytes sent, a panel for each contest; means over seeds.

    Bands reach from the smallest to the largest value of the seeds. The end of dense training is a horizontal line: its
    traffic is far outside. Losses and perplexities beyond 1.5 times the median of the first points leave the panel.
    Runs that diverged have no curve; the name at the line has the number of remaining runs, and a panel's last line
    lists methods without any.

    Args:
        results: of the runs to draw.
        curves: of these runs, others are left out.
        folder: for ``judge_loss.svg`` and ``judge_quality.svg``.

    Returns:
        The files.
    """
    points: dict[Any, list[CurvePoint]] = {}
    for point in curves:
        points.setdefault(point[:6], []).append(point)
    rooms = contests(results)
    names = [result.quality_name for result in results]
    quality = names[0] if len(set(names)) == 1 else "quality"
    measures: dict[str, tuple[str, Callable[[Any], float]]] = {
        "loss": ("training loss", lambda x: float(x.loss)),
        "quality": (f"validation {quality}", lambda x: float(x.quality)),
    }
    files = []
    for name, (axis, measure) in measures.items():
        columns = len({result.density for room in rooms for result in room if result.method != DENSE.name})
        figure, places = panels(len(rooms), max(1, columns), 8.0, 5.5)
        for panel, contest in zip(places, rooms, strict=True):
            panel.set(title=title(contest), xlabel="megabytes sent by each rank", ylabel=axis)
            if name == "loss" or contest[0].quality_name == "perplexity":
                panel.set_yscale("log")
            if name == "quality":
                panel.set_ylabel(f"validation {contest[0].quality_name}")
            _draw_contest(panel, contest, points, measure)
            if panel.get_yscale() == "log":
                _cut(panel)
            plain_numbers(panel.yaxis)
            label_ends(panel, bold=ours())
        files.append(save(figure, folder / f"judge_{name}.svg"))
    return files


def _draw_contest(
    panel: Axes, contest: list[Result], points: dict[Any, list[CurvePoint]], measure: Callable[[Any], float]
) -> None:
    drawn_as, lost = looks(), []
    for method, runs in by_method(contest).items():
        if method == DENSE.name:
            ends = [measure(run) for run in runs]
            panel.axhline(fmean(ends), color=INK, linestyle="-.", linewidth=1, label="_dense")
            panel.text(
                0.01,
                fmean(ends),
                "dense, at its end",
                va="bottom",
                fontsize=8,
                clip_on=True,
                transform=panel.get_yaxis_transform(),
            )
            continue
        drawn = [points[run.key] for run in runs if run.key in points]
        if not drawn:
            lost.append(method)
            continue
        label = method if len(drawn) == len(runs) else f"{method}, {len(drawn)} of {len(runs)} runs"
        # A repeated point is of a run that was interrupted and repeated.
        by_step = [{point.step: point for point in run} for run in drawn]
        steps = sorted(set.intersection(*(set(run) for run in by_step)))
        at = [fmean(run[step].megabytes for run in by_step) for step in steps]
        values = [[measure(run[step]) for run in by_step] for step in steps]
        line, mine = drawn_as[method].line, method in ours()
        line |= {"linewidth": 2.4, "zorder": 3} if mine else {}
        panel.plot(at, [fmean(some) for some in values], label=label, **line)
        band = {"color": line["color"], "alpha": 0.18 if mine else 0.06, "linewidth": 0}
        panel.fill_between(at, [min(some) for some in values], [max(some) for some in values], **band)
    if lost:
        panel.set_xlabel(f"{panel.get_xlabel()}\nno curve, all runs diverged: {', '.join(lost)}")


def _cut(panel: Axes) -> None:
    """Limit the axis, so that a diverging method does not hide the differences between the others."""
    firsts = [float(line.get_ydata()[0]) for line in panel.get_lines()]  # type: ignore[index,arg-type]
    firsts = [first for first in firsts if math.isfinite(first)]
    if firsts and (top := 1.5 * median(firsts)) < panel.get_ylim()[1]:
        panel.set_ylim(top=top)


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


def simulate_figures(rows: Sequence[recorded.Row], folder: Path) -> list[Path]:
    """Draw dots for each method, a figure for each measure and a panel for each stream and density.

    Args:
        rows: in the order of methods; several seeds are drawn as several dots.
        folder: for ``simulate_<measure>.svg``.

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
        files.append(save(figure, folder / f"simulate_{name}.svg"))
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
