"""Results of comparisons as figures, for eyes of all kinds: our methods in colour, the published ones in greys.

Needs matplotlib, which is imported when a figure is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_sparse.compare import recorded
from lightning_sparse.compare.methods import DENSE, METHODS
from lightning_sparse.compare.tables import by_method, contests, title
from lightning_sparse.compare.training import CurvePoint, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
GREYS = ["#333333", "#707070", "#A0A0A0"]
DASHES = ["-", "--", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    dash: str
    marker: str
    ours: bool

    @property
    def line(self) -> dict[str, Any]:
        """Keywords for :meth:`matplotlib.axes.Axes.plot`."""
        width = {"linewidth": 2.2, "markersize": 5, "zorder": 3} if self.ours else {"linewidth": 1, "markersize": 4}
        return {"color": self.colour, "linestyle": self.dash, "marker": self.marker, **width}


def styles() -> dict[str, Style]:
    """The style of every method, the same in all figures."""
    ours = [method.name for method in METHODS if method.ours]
    published = [method.name for method in METHODS if not method.ours]
    chosen = {name: Style(COLOURS[i % 6], "-", MARKERS[i % 7], True) for i, name in enumerate(ours)}
    chosen |= {name: Style(GREYS[i % 3], DASHES[i // 3 % 3], MARKERS[i % 7], False) for i, name in enumerate(published)}
    return chosen


def judge_figures(results: Sequence[Result], curves: Sequence[CurvePoint], folder: Path) -> list[Path]:
    """Training loss and validation quality against megabytes sent, a panel for each contest; means over seeds.

    Bands reach from the smallest to the largest seed. Where dense training ends is a horizontal line: its traffic is
    far outside. Losses and perplexities beyond 1.5 times the median of the first points leave the panel. Runs that
    diverged have no curve; the legend tells how many of a method are left.

    Args:
        results: of the runs to draw.
        curves: of these runs, others are left out.
        folder: for ``judge_loss.png`` and ``judge_quality.png``.

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
        figure, panels = _panels(len(rooms), max(1, columns), 6.5, 5.0)
        for panel, contest in zip(panels, rooms, strict=True):
            panel.set(title=title(contest), xlabel="megabytes sent by each rank", ylabel=axis)
            if name == "loss" or contest[0].quality_name == "perplexity":
                panel.set_yscale("log")
            if name == "quality":
                panel.set_ylabel(f"validation {contest[0].quality_name}")
            _draw_contest(panel, contest, points, measure)
            if panel.get_yscale() == "log":
                _cut(panel)
            _plain_numbers(panel.yaxis)
        _common_legend(figure, panels)
        files.append(_save(figure, folder / f"judge_{name}.png"))
    return files


def _draw_contest(
    panel: Axes, contest: list[Result], points: dict[Any, list[CurvePoint]], measure: Callable[[Any], float]
) -> None:
    style = styles()
    for method, runs in by_method(contest).items():
        if method == DENSE.name:
            ends = [measure(run) for run in runs]
            panel.axhline(fmean(ends), color="black", linestyle="-.", linewidth=1, label="dense, at its end")
            continue
        drawn = [points[run.key] for run in runs if run.key in points]
        line = style[method]
        label = method if len(drawn) == len(runs) else f"{method}, {len(drawn)} of {len(runs)} runs"
        if not drawn:
            panel.plot([], [], label=label, **line.line)
            continue
        # A repeated point was written twice by a run that was interrupted and done again.
        by_step = [{point.step: point for point in run} for run in drawn]
        steps = sorted(set.intersection(*(set(run) for run in by_step)))
        at = [fmean(run[step].megabytes for run in by_step) for step in steps]
        values = [[measure(run[step]) for run in by_step] for step in steps]
        panel.plot(at, [fmean(some) for some in values], label=label, **line.line)
        panel.fill_between(at, [min(some) for some in values], [max(some) for some in values], **_band(line))


def _cut(panel: Axes) -> None:
    """Keep a method that runs away from hiding the differences between all others."""
    firsts = [float(line.get_ydata()[0]) for line in panel.get_lines() if len(line.get_xdata())]  # type: ignore[index,arg-type]
    firsts = [first for first in firsts if math.isfinite(first)]
    if firsts and (top := 1.5 * median(firsts)) < panel.get_ylim()[1]:
        panel.set_ylim(top=top)


def _band(style: Style) -> dict[str, Any]:
    return {"color": style.colour, "alpha": 0.18 if style.ours else 0.08, "linewidth": 0}


class Axis(NamedTuple):
    """How a measure of the open loop is drawn."""

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
    """Dots for each method, a figure for each measure and a panel for each stream and density.

    Args:
        rows: in the order that methods shall have; several seeds are drawn as several dots.
        folder: for ``simulate_<measure>.png``.

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
        figure, panels = _panels(len(rooms), len(densities), 5.5, 1.5 + 0.25 * len({row.method for row in rows}))
        for panel, (stream, density) in zip(panels, rooms, strict=True):
            some = [row for row in rows if (row.stream, row.density) == (stream, density)]
            panel.set(title=f"{stream}, density {density:g}", xlabel=axis.label)
            _draw_dots(panel, some, name, axis)
            _plain_numbers(panel.xaxis)
        _common_legend(figure, panels)
        files.append(_save(figure, folder / f"simulate_{name}.png"))
    return files


def _draw_dots(panel: Axes, rows: list[recorded.Row], name: str, axis: Axis) -> None:
    methods, ranks = list(dict.fromkeys(row.method for row in rows)), sorted({row.ranks for row in rows})
    ours = {method.name for method in METHODS if method.ours}
    if axis.scale == "symlog":
        panel.set_xscale("symlog", linthresh=1)
    else:
        panel.set_xscale(axis.scale)
    if axis.ideal is not None:
        panel.axvline(axis.ideal, color="black", linewidth=0.8)
    for i, n in enumerate(ranks):
        some = [row for row in rows if row.ranks == n]
        heights = [methods.index(row.method) + 0.5 * ((i + 0.5) / len(ranks) - 0.5) for row in some]
        values = [_value(row, name) for row in some]
        look: dict[str, Any] = {"color": COLOURS[i % 6], "marker": MARKERS[i % 7], "linestyle": "none"}
        panel.plot(values, heights, label=f"{n} ranks", markersize=5, **look)
        if name == "estimate":
            for row, height in zip(some, heights, strict=True):
                panel.plot([row.estimate_low, row.estimate_high], [height, height], color=look["color"], linewidth=1)
    panel.set_yticks(range(len(methods)), methods)
    panel.set_ylim(len(methods) - 0.5, -0.5)
    for label in panel.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() in ours else "normal")
    for place, method in enumerate(methods):
        if method in ours:
            panel.axhspan(place - 0.5, place + 0.5, color="#F2F2F2", zorder=0)


def _value(row: recorded.Row, name: str) -> float:
    value = getattr(row, name)
    if value is None:
        return float(row.steps)
    # Nothing at all has no place on a logarithmic axis.
    return float("nan") if AXES[name].scale == "log" and value <= 0 else float(value)


def _plain_numbers(axis: Any) -> None:
    """Label an axis with a few plain numbers if it is logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if axis.get_scale() != "log":
        return
    low, high = axis.get_view_interval()
    few = LogLocator(subs=(1.0,) if high > 1e3 * low else (1.0, 2.0, 5.0))
    axis.set_major_locator(few if high > 8 * low else MaxNLocator(4))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _panels(count: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure without pyplot, which would keep it, and look for a screen."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns + 2, height * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for unused in grid[count:]:
        unused.remove()
    for panel in grid[:count]:
        panel.grid(alpha=0.3)
    return figure, grid[:count]


def _common_legend(figure: Figure, panels: list[Axes]) -> None:
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", fontsize="small")


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
