"""Style of all figures: readable in grey and by colour-blind readers, names at the lines, ranges without outliers.

Lines differ in colour, dash and marker at once. matplotlib is imported when something is drawn; the report's plotly
page uses the same looks, ranges and label positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]
"""Okabe and Ito's colours without yellow, which is too pale for lines; in grey, dashes and markers tell them apart."""
DASHES = ["-", "--", "-.", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">"]
INK, PALE = "#333333", "#BBBBBB"
"""Colours of texts and reference lines, and of lines behind the curves."""
FEW = 8
"""Most lines with their names at their ends on a page that can be filtered; more are named in one list."""


class Look(NamedTuple):
    """Style of a line; no two of the first 28 share a colour and a dash."""

    colour: str
    dash: str
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """Keywords for :meth:`matplotlib.axes.Axes.plot`."""
        return {"color": self.colour, "linestyle": self.dash, "marker": self.marker, "linewidth": 1.3, "markersize": 4}


def look(place: int) -> Look:
    """Return the look of the line at a place, from 0 on.

    Example:
        >>> look(0).dash, look(7).dash, look(7).colour == look(0).colour
        ('-', ':', True)
    """
    return Look(COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)], MARKERS[place % len(MARKERS)])


class Range(NamedTuple):
    """Range of an axis."""

    low: float
    high: float
    outside: int
    """Number of points outside."""
    lowest: float
    highest: float
    """Of all points."""


def wants_log(values: ArrayLike) -> bool:
    """Return True if values are positive and small ones need a logarithmic axis."""
    x = _finite(values)
    if not len(x) or x.min() <= 0:
        return False
    low, high = np.quantile(x, [0.05, 0.95])
    return bool(high > 30 * low)


def robust_range(values: ArrayLike, log: bool = False) -> Range:
    """Return a range that a few outliers do not dominate.

    Points more than three interquartile ranges beyond the quartiles are left outside if they are fewer than a tenth
    and the range without them is less than half as long.

    Args:
        values: of all lines of a panel; non-finite ones are left out, and non-positive ones on a logarithmic axis.
        log: True for a logarithmic axis.

    Example:
        >>> robust_range([1.0, 2.0, 3.0] * 10 + [1e6]).outside
        1
        >>> robust_range([1.0, 2.0, 3.0]).outside
        0
    """
    x = _finite(values)
    x = np.log10(x[x > 0]) if log else x
    if not len(x):
        return Range(*((0.1, 1.0) if log else (0.0, 1.0)), 0, math.nan, math.nan)
    first, middle, third = np.quantile(x, [0.25, 0.5, 0.75])
    reach = 3 * max(third - first, 0.02 if log else 0.05 * abs(middle))
    inside = x[(x >= first - reach) & (x <= third + reach)]
    low, high = float(x.min()), float(x.max())
    lowest, highest = (10**low, 10**high) if log else (low, high)
    outside = 0
    if len(inside) > 0.9 * len(x) and np.ptp(inside) < 0.5 * (high - low):
        low, high, outside = float(inside.min()), float(inside.max()), len(x) - len(inside)
    margin = 0.05 * (high - low) or (0.05 if log else 0.05 * abs(high) or 0.5)
    low, high = low - margin, high + margin
    return Range(*((10**low, 10**high) if log else (low, high)), outside, lowest, highest)


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    x = np.asarray(values, dtype=np.float64).ravel()
    return x[np.isfinite(x)]


def place_labels(ends: Sequence[tuple[float, float]], gap: float, width: float = 0.25) -> list[float]:
    """Return heights for labels of lines, so that none overlaps another.

    Args:
        ends: of the lines, across and up, in shares of the panel.
        gap: between two heights.
        width: of a label; labels of lines that end further apart do not overlap.

    Returns:
        Heights in the order of ``ends``, within the panel if there is room for all.

    Example:
        >>> place_labels([(1.0, 0.5), (1.0, 0.5), (0.2, 0.5)], gap=0.1)
        [0.45, 0.55, 0.5]
    """
    heights = [up for _, up in ends]
    order = sorted(range(len(ends)), key=lambda i: ends[i][0])
    clusters: list[list[int]] = []
    for i in order:
        if clusters and ends[i][0] - ends[clusters[-1][-1]][0] <= width:
            clusters[-1].append(i)
        else:
            clusters.append([i])
    for cluster in clusters:
        cluster.sort(key=lambda i: (heights[i], i))
        for i, height in zip(cluster, _apart([heights[i] for i in cluster], gap), strict=True):
            heights[i] = height
    return heights


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights apart as little as possible: blocks that meet become one, around their common middle."""
    blocks: list[tuple[float, int]] = []  # middle, labels
    for height in heights:
        block = (height, 1)
        while blocks and block[0] - blocks[-1][0] < gap * (block[1] + blocks[-1][1]) / 2:
            middle, labels = blocks.pop()
            total = labels + block[1]
            block = ((middle * labels + block[0] * block[1]) / total, total)
        blocks.append(block)
    found = [middle + gap * (i - (labels - 1) / 2) for middle, labels in blocks for i in range(labels)]
    for i, height in enumerate(found):  # from below, then from above
        found[i] = max(height, gap * i)
    for i in reversed(range(len(found))):
        found[i] = round(min(found[i], 1 - gap * (len(found) - 1 - i)), 10)
    return found


def panels(count: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Make a figure without pyplot, which would keep it and look for a screen.

    Args:
        count: of panels.
        columns: at most; panels fill line after line.
        width: of a panel, in inches.
        height: likewise.
    """
    from matplotlib.figure import Figure

    columns = max(1, min(columns, count))
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for unused in grid[count:]:
        unused.remove()
    for panel in grid[:count]:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, grid[:count]


def label_ends(
    panel: Axes, size: float = 8, bold: Sequence[str] = (), names: Sequence[tuple[Line2D, str]] | None = None
) -> None:
    """Write the names of a panel's lines at their ends, without overlap.

    Lines without points get none. Call this after limits and scales are set.

    Args:
        panel: with its lines.
        size: of the letters, in points.
        bold: names that stand out.
        names: lines with their names; None: all with a label that does not begin with "_".
    """
    panel.set_xlim(panel.get_xlim())  # fixed: labels are placed by them
    panel.set_ylim(panel.get_ylim())
    to_panel = panel.transData + panel.transAxes.inverted()
    if names is None:
        labels = [(line, str(line.get_label())) for line in panel.get_lines()]
        names = [(line, label) for line, label in labels if not label.startswith("_")]
    lines, ends = [], []
    for line, name in names:
        points = np.asarray(to_panel.transform(np.asarray(line.get_xydata(), dtype=np.float64).reshape(-1, 2)))
        seen = points[np.isfinite(points).all(axis=1)]
        if len(seen):
            lines.append((line, name))
            ends.append((min(1.0, float(seen[-1][0])), min(1.0, max(0.0, float(seen[-1][1])))))
    figure = panel.figure
    rows = panel.get_subplotspec().get_gridspec().nrows  # type: ignore[union-attr]
    points_up = 72 * figure.get_figheight() / rows * 0.78  # type: ignore[union-attr]
    points_across = 72 * figure.get_figwidth() * 0.6  # type: ignore[union-attr]
    longest = max((len(name) for _, name in lines), default=0)
    width = min(0.4, 0.6 * size * longest / points_across)
    leader = {"arrowstyle": "-", "relpos": (0, 0.5), "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2}
    for (line, name), end, height in zip(lines, ends, place_labels(ends, 1.25 * size / points_up, width), strict=True):
        panel.annotate(
            name,
            xy=end,
            xytext=(end[0] + 0.035, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=size,
            fontweight="bold" if name in bold else "normal",
            color=INK,
            bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.3},
            arrowprops=leader | {"color": line.get_color()},
        )


def plain_numbers(axis: Any) -> None:
    """Label an axis with a few plain numbers if it is logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if axis.get_scale() != "log":
        return
    low, high = axis.get_view_interval()
    few = LogLocator(subs=(1.0,) if high > 1e3 * low else (1.0, 2.0, 5.0))
    axis.set_major_locator(few if high > 8 * low else MaxNLocator(4))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def common_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Draw one legend for all panels, for entries that are not lines with ends."""
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=4, frameon=False)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as SVG with searchable texts, or as PNG, by the suffix of its name.

    The same figure gives the same SVG.
    """
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-sparse"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
