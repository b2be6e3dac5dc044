"""A report's figures as files, for papers and pages without scripts; drawn with matplotlib."""

from __future__ import annotations

import itertools
import re
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_sparse.tools.report.figures import Bars, Panel, parts_of
from lightning_sparse.tools.report.runs import Run
from lightning_sparse.tools.style import (
    COLOURS,
    INK,
    PALE,
    common_legend,
    label_ends,
    look,
    panels,
    plain_numbers,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST_FILE = 60
"""Characters of a file's name; some take four of the 255 allowed bytes."""


def write_figures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write each figure of a report as an SVG file.

    Args:
        runs: as for :func:`~lightning_sparse.tools.report.page.write_page`.
        folder: for the files, which are named after the figures; made if it is missing.

    Raises:
        ValueError: if files cannot be written there, in one sentence.
    """
    import matplotlib

    drawn = [panel for part in parts_of(runs) for panel in part.panels]
    files = [folder / f"{name}.svg" for name in file_names([panel.title for panel in drawn])]
    # Names are of users, and no mathematics. Characters that a font lacks are still in the files, as text.
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        for panel, file in zip(drawn, files, strict=True):
            rows = len(panel.rows) if isinstance(panel, Bars) else 0
            figure, [axes] = panels(1, 1, 5.5, max(3.2, 1.2 + 0.28 * rows, 0.16 * len(runs) + 1))
            if isinstance(panel, Bars):
                _bars(axes, panel, runs)
                common_legend(figure, [axes])
            else:
                draw_lines(axes, panel)
            axes.set_title(panel.title, loc="left", fontsize=10)
            try:
                save(figure, file)
            except OSError as error:
                raise ValueError(f"Expected a folder to write to, but got {folder}: {error.strerror}.") from error
    return files


def file_names(titles: Sequence[str]) -> list[str]:
    """Return unique names for files, of letters and digits of any alphabet, also without regard to case.

    Args:
        titles: of figures.

    Example:
        >>> file_names(["val/loss", "val_loss", "Loss", "loss", "µ/$^2$", "?"])
        ['val_loss', 'val_loss_2', 'loss', 'loss_2', 'μ_2', 'figure']
    """
    names: list[str] = []
    for title in titles:
        letters = unicodedata.normalize("NFKC", title).casefold()
        name = re.sub(r"[\W_]+", "_", letters).strip("_")[:LONGEST_FILE].strip("_") or "figure"
        free = (f"{name}_{count}" if count > 1 else name for count in itertools.count(1))
        names.append(next(one for one in free if one not in names))
    return names


def draw_lines(axes: Axes, panel: Panel) -> None:
    """Draw a figure of lines with their names at their ends.

    Args:
        axes: to draw into.
        panel: one of :func:`~lightning_sparse.tools.report.figures.parts_of`.
    """
    names = []
    for curve in panel.curves:
        if curve.behind:
            axes.plot(curve.x, curve.y, color=PALE, linewidth=5, zorder=1)
            continue
        every = (0.02 * (curve.look % 5), 0.12)  # markers of lines on top of each other do not overlap
        [line] = axes.plot(curve.x, curve.y, markevery=every, **look(curve.look).line)
        names.append((line, curve.name))
    if panel.ideal is not None:
        axes.axhline(panel.ideal, color=INK, linewidth=0.8)
    axes.set_xscale("log" if panel.x_log else "linear")
    axes.set_yscale("log" if panel.y_log else "linear")
    axes.set_xlim(panel.x_range.low, panel.x_range.high)
    axes.set_ylim(panel.y_range.low, panel.y_range.high)
    axes.set_xlabel(panel.x_title)
    plain_numbers(axes.yaxis)
    plain_numbers(axes.xaxis)
    label_ends(axes, names=names)


def _bars(axes: Axes, bars: Bars, runs: Sequence[Run]) -> None:
    places = range(len(bars.rows))
    axes.set_yticks(places, [runs[row[0]].name for row in bars.rows])
    axes.barh(places, [row[1] for row in bars.rows], color=COLOURS[0], label="select")
    left, widths = zip(*[row[1:3] for row in bars.rows], strict=True)
    axes.barh(places, widths, left=left, color=COLOURS[4], hatch="//", edgecolor=INK, linewidth=0, label="exchange")
    known = [(row[3], place) for row, place in zip(bars.rows, places, strict=True) if row[3] is not None]
    if known:
        style = {"linestyle": "none", "marker": "D", "color": "black", "markeredgecolor": "white"}
        axes.plot(*zip(*known, strict=True), label="exposed", **style)  # type: ignore[arg-type]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms")
