"""A report as one HTML page that needs no network: figures by plotly, which is part of the page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from lightning_sparse.core.console import Table
from lightning_sparse.tools.report.figures import Bars, Panel, groups_of, parts_of
from lightning_sparse.tools.report.runs import Run
from lightning_sparse.tools.report.summary import differing, sentences, settings_table, totals_table
from lightning_sparse.tools.style import COLOURS, FEW, INK, PALE, Look, look, place_labels

DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
MARKERS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "<": "triangle-left",
    ">": "triangle-right",
}
"""Dashes and markers in plotly's words."""
STROKES = {"-": "", "--": "6 3", "-.": "7 2 2 2", ":": "2 2"}
"""Dashes of SVG lines in the list of runs."""
HEIGHT = 320
"""Pixels of a figure."""
LONGEST_CELL = 500
"""Letters of a cell of a table."""


def write_page(runs: Sequence[Run], path: Path, title: str | None = None) -> Path:
    """Write a page that compares runs.

    Args:
        runs: in the order of their colours.
        path: of the page; its folder is made.
        title: None: the names of the runs.

    Raises:
        ValueError: if the file cannot be written, in one sentence.
    """
    from plotly.offline import get_plotlyjs

    names = ", ".join(run.name for run in runs[:5]) + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")
    different = differing(runs) if len(runs) > 1 else []
    common = [name for name in dict.fromkeys(n for run in runs for n in run.settings) if name not in different]
    text = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title or f"Sparsified training: {names}"),
        plotly=get_plotlyjs(),
        sentences="".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences(runs)),
        totals=_table(totals_table(runs)),
        runs="".join(_swatch(place, run.name) for place, run in enumerate(runs)),
        parts="".join(_parts(runs)),
        settings=_settings(runs, different, common),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")  # settings may hold halves of letters
    except OSError as error:
        raise ValueError(f"Expected out to be a file to write to, but got {path}: {error.strerror}.") from error
    return path


def _parts(runs: Sequence[Run]) -> Iterator[str]:
    for part in parts_of(runs):
        yield f'<section><h2>{html.escape(part.title)}</h2><div class="figures">'
        for panel in part.panels:
            figure = _bars(panel, runs) if isinstance(panel, Bars) else _panel(panel)
            caption = html.escape(" ".join(panel.remarks))
            yield (
                f'<figure aria-label="{html.escape(panel.title)}">'
                f'<div class="plot" style="height:{figure.layout.height}px"></div>'
                f'<script type="application/json">{_json(figure)}</script>'
                f"<figcaption>{caption}</figcaption></figure>"
            )
        yield "</div></section>"
    for run in runs:
        if run.plan is not None:
            size = f"{len(run.plan.rows)} groups" if len(run.plan.rows) != 1 else "1 group"
            heading = html.escape(f"Plan of {run.name}: {size}")
            yield f'<details><summary>{heading}</summary><div class="wide numbers">{_table(run.plan)}</div></details>'
        if groups := groups_of(run):
            header = list(dict.fromkeys(name for means in groups.values() for name in means))
            rows = [
                [group, *(f"{means[n]:.4g}" if n in means else "" for n in header)] for group, means in groups.items()
            ]
            yield f"<h2>Groups of {html.escape(run.name)}, means over the run</h2>"
            yield f'<div class="wide numbers">{_table(Table("", ["group", *header], rows))}</div>'


def _json(figure: Any) -> str:
    """Return a figure as JSON, without the default template, and with characters escaped that could end a script."""
    figure.update_layout(template="none")
    return str(figure.to_json()).replace("<", "\\u003c")


def _settings(runs: Sequence[Run], different: Sequence[str], common: Sequence[str]) -> str:
    parts = []
    if different:
        parts.append(f'<div class="wide">{_table(settings_table(runs, different))}</div>')
    if common:
        table = _table(settings_table([Run("value", run.path, {}, run.settings) for run in runs[:1]], common))
        summary = f"{len(common)} settings that all runs share" if len(runs) > 1 else f"{len(common)} settings"
        parts.append(f"<details{'' if different else ' open'}><summary>{summary}</summary>{table}</details>")
    return "".join(parts) or "<p>No settings were found beside the logs.</p>"


def _table(table: Table) -> str:
    def shown(cell: str) -> str:
        return cell if len(cell) <= LONGEST_CELL else f"{cell[:LONGEST_CELL]}… ({len(cell):,} letters)"

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(shown(cell))}</{tag}>" for cell in cells) + "</tr>"

    rows = "".join(line(row, "td") for row in table.rows)
    return f"<table><thead>{line(table.header, 'th')}</thead><tbody>{rows}</tbody></table>"


def _swatch(place: int, name: str) -> str:
    """Return a run's entry in the list: its line, and a box that shows and hides it in all figures."""
    drawn = look(place)
    stroke = f'stroke="{drawn.colour}" stroke-width="2.5" stroke-dasharray="{STROKES[drawn.dash]}"'
    line = f'<svg width="32" height="14"><line x1="0" x2="32" y1="7" y2="7" {stroke}/></svg>'
    return f'<label><input type="checkbox" checked> {line} {html.escape(name)}</label>'


def _layout(figure: Any, title: str, height: int, right: int) -> None:
    axis = {
        "gridcolor": "#E8E8E8",
        "zeroline": False,
        "linecolor": "#999999",
        "ticks": "outside",
        "automargin": True,
        "exponentformat": "e",
    }
    figure.update_layout(
        title={"text": html.escape(title), "font": {"size": 14}, "x": 0, "xref": "paper"},
        height=height,
        margin={"l": 50, "r": right, "t": 36, "b": 40},
        plot_bgcolor="white",
        font={"color": INK, "size": 12},
        hovermode="closest",
        showlegend=False,
        meta={"margin": right},
        xaxis=axis,
        yaxis=axis,
    )


def _panel(panel: Panel) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    front = [curve for curve in panel.curves if not curve.behind and len(curve.x)]
    labelled = len(front) if 1 < len(front) <= FEW else 0
    for curve in sorted(panel.curves, key=lambda one: not one.behind):
        drawn, name = look(curve.look), html.escape(curve.name)
        figure.add_scatter(
            x=curve.x,
            y=curve.y,
            mode="lines" if curve.behind else "lines+markers",
            line={"color": PALE, "width": 7} if curve.behind else {"color": drawn.colour, "dash": DASHES[drawn.dash]},
            marker={"symbol": MARKERS[drawn.marker], "size": 6, "maxdisplayed": 12},
            name=f"{name}: target" if curve.behind else name,
            meta={"run": None if curve.behind else curve.run, "label": False},
            hovertemplate="%{y:.4g} at %{x:.6g}<extra>%{fullData.name}</extra>",
        )
    longest = max((len(curve.name) for curve in front), default=0)
    _layout(figure, panel.title, HEIGHT, min(220, 20 + 7 * longest) if labelled else 16)
    for axes, range_, log in (("xaxis", panel.x_range, panel.x_log), ("yaxis", panel.y_range, panel.y_log)):
        low, high = np.log10([range_.low, range_.high]) if log else (range_.low, range_.high)
        low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
        settings = {"dtick": 1} if log and high - low > 1.5 else {}
        figure.update_layout({axes: {"range": [low, high], "type": "log" if log else "linear", **settings}})
    figure.update_xaxes(title=panel.x_title)
    if panel.ideal is not None:
        figure.add_hline(panel.ideal, line={"color": INK, "width": 1})
    if labelled:
        _label_ends(figure, panel)
    return figure


def _label_ends(figure: Any, panel: Panel) -> None:
    """Write names at the ends of lines, as points with a text, so that they move with the lines."""

    def share(value: float, axis: Any) -> float:
        low, high = axis.range
        return float(((np.log10(value) if axis.type == "log" else value) - low) / (high - low))

    def value(share: float, axis: Any) -> float:
        low, high = axis.range
        found = low + share * (high - low)
        return float(10**found if axis.type == "log" else found)

    x_axis, y_axis = figure.layout.xaxis, figure.layout.yaxis
    front = [curve for curve in panel.curves if not curve.behind and len(curve.x)]
    ends = [(share(c.x[-1], x_axis), min(1.0, max(0.0, share(c.y[-1], y_axis)))) for c in front]
    for curve, end, height in zip(front, ends, place_labels(ends, 15 / (HEIGHT - 76)), strict=True):
        figure.add_scatter(
            x=[value(end[0], x_axis)],
            y=[value(height, y_axis)],
            mode="text",
            text=[f" {html.escape(curve.name)}"],
            textposition="middle right",
            textfont={"color": _dark(look(curve.look)), "size": 12, "shadow": "auto"},
            cliponaxis=False,
            hoverinfo="skip",
            meta={"run": curve.run, "label": True},
        )


def _dark(drawn: Look) -> str:
    """Return the line's colour, darkened for text."""
    parts = (int(drawn.colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{int(0.65 * part):02X}" for part in parts)


def _bars(bars: Bars, runs: Sequence[Run]) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    names = [html.escape(runs[row[0]].name) for row in bars.rows]
    kinds = (("select", 1, COLOURS[0], ""), ("exchange", 2, COLOURS[4], "/"))
    for title, place, colour, pattern in kinds:
        figure.add_bar(
            y=names,
            x=[row[place] for row in bars.rows],
            name=title,
            orientation="h",
            marker={"color": colour, "pattern": {"shape": pattern, "fgcolor": INK, "fillmode": "overlay"}},
            meta={"run": None, "label": False},
            hovertemplate="%{x:.3g} ms<extra>%{fullData.name}</extra>",
        )
    figure.add_scatter(
        y=names,
        x=[row[3] for row in bars.rows],
        name="exposed",
        mode="markers",
        marker={"symbol": "diamond", "size": 10, "color": "#000000", "line": {"color": "white", "width": 1}},
        meta={"run": None, "label": False},
        hovertemplate="%{x:.3g} ms<extra>%{fullData.name}</extra>",
    )
    _layout(figure, bars.title, max(HEIGHT, 110 + 24 * len(names)), 16)
    figure.update_layout(
        barmode="stack",
        showlegend=True,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        margin={"t": 60},
        yaxis={"autorange": "reversed"},
        xaxis={"title": "ms", "rangemode": "tozero"},
    )
    return figure
