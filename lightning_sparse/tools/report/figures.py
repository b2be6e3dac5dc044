"""Figures of a report as data: curves, axes and remarks; without a drawing library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.core.console import plain
from lightning_sparse.tools.report.catalog import (
    DENSE_MB,
    EXCHANGE,
    EXPOSED,
    GROUP,
    SECONDS,
    SECTIONS,
    SELECT,
    SHADOW,
    SHADOWED,
    TOTAL_MB,
    Figure,
    is_result,
)
from lightning_sparse.tools.report.runs import Run, Series
from lightning_sparse.tools.style import FEW, Range, robust_range, wants_log

Array = NDArray[np.float64]
MOST_POINTS = 500
"""Points of a curve; longer ones are drawn by the smallest and the largest value of each part."""
SMOOTHED = 60
"""Points from which on results, and other curves of many runs, are drawn as running medians of a thirtieth of them."""
MOST_RESULTS, MOST_OTHERS = 6, 9
"""Most figures of results, and of other quantities, of a model or of shadow sparsifiers."""


class Curve(NamedTuple):
    """A line of a panel."""

    run: int
    """Place of the run."""
    name: str
    look: int
    """Place of its look."""
    x: Array
    y: Array
    behind: bool = False
    """True if it is the target of another curve."""


class Panel(NamedTuple):
    """A figure."""

    title: str
    x_title: str
    curves: Sequence[Curve]
    x_log: bool
    y_log: bool
    x_range: Range
    y_range: Range
    ideal: float | None
    remarks: Sequence[str]
    """Sentences on its meaning, and on points that it does not show."""


class Bars(NamedTuple):
    """Times of a step of each run."""

    title: str
    rows: Sequence[tuple[int, float, float, float | None]]
    """Place of the run; medians of selection, exchange, and its exposed part, in ms."""
    remarks: Sequence[str]


class Part(NamedTuple):
    """A heading with its figures."""

    title: str
    panels: Sequence[Panel | Bars]


class Axis(NamedTuple):
    """Axis of results."""

    title: str
    at: Callable[[Run, Array], Array | None]
    """Returns the values at a run's steps; None if they are not known."""


STEPS = Axis("steps", lambda run, steps: steps + run.offset)


def parts_of(runs: Sequence[Run]) -> list[Part]:
    """Return all figures that have data.

    Args:
        runs: to compare.
    """
    logged = list(dict.fromkeys(name for run in runs for name in run.series))
    results = sorted(filter(is_result, logged), key=lambda name: ("loss" in name, "val" in name), reverse=True)
    axes = [STEPS, *_traffic(runs), *clock_of(runs)]
    parts = [
        Part(name, [_panel(runs, Figure(f"{name} against {axis.title}", name), axis) for axis in axes])
        for name in results[:MOST_RESULTS]
    ]
    for section in SECTIONS:
        panels: list[Panel | Bars] = [_panel(runs, one, STEPS) for one in section.figures if _worth(runs, one)]
        if any(SELECT in run.series or EXCHANGE in run.series for run in runs) and section.title == "Time":
            panels.insert(0, _bars(runs))
        parts.append(Part(section.title, panels))
    parts.append(Part("Sparsifiers that looked on", _shadows(runs)))
    listed = {name for section in SECTIONS for one in section.figures for name in (one.name, one.reference)}
    listed |= {"epoch", SECONDS, *results[:MOST_RESULTS]}
    others = [name for name in logged if name not in listed and not name.startswith((GROUP, SHADOW))]
    parts.append(
        Part("Other logged numbers", [_panel(runs, Figure(name, name), STEPS) for name in others[:MOST_OTHERS]])
    )
    return [part for part in parts if part.panels]


def _worth(runs: Sequence[Run], figure: Figure) -> bool:
    """Return True if a figure has data; counts that are all zero do not count."""
    found = [run.series[figure.name].values for run in runs if figure.name in run.series]
    return bool(found) and (not figure.name.startswith("sparse/steps/") or any(values.any() for values in found))


def _traffic(runs: Sequence[Run]) -> list[Axis]:
    """Return the axis of megabytes; that of dense runs, which log none, is the dense traffic of the other runs."""
    if not any(TOTAL_MB in run.series for run in runs):
        return []
    return [Axis("MB sent by a rank", partial(megabytes, runs))]


def megabytes(runs: Sequence[Run], run: Run, steps: Array) -> Array | None:
    """Return the MB that a rank of a run has sent up to some steps; None if they are not known.

    Args:
        runs: the run and others of the same model and number of ranks.
        run: one of them.
        steps: of the run.
    """
    if TOTAL_MB in run.series:
        return run.series[TOTAL_MB].at(steps)
    if run.sparse or run.unread:
        return None
    dense = dense_rates(runs)
    return (steps + run.offset) * dense[0] if len(dense) == 1 else None


def dense_rates(runs: Sequence[Run]) -> list[float]:
    """Return the MB of a dense step from logs of sparse runs: one number if models and ranks are the same."""
    found = [(run.series[DENSE_MB], run.offset) for run in runs if DENSE_MB in run.series]
    rates = [float(one.values[-1] / (one.steps[-1] + offset)) for one, offset in found]
    rates = [rate for rate in rates if rate > 0 and math.isfinite(rate)]
    return [] if not rates else rates[:1] if np.ptp(rates) <= 0.01 * max(rates) else rates


def clock_of(runs: Sequence[Run]) -> list[Axis]:
    """Return the axis of seconds, by the clock of most runs, so that all have the same; none without a clock.

    Args:
        runs: to compare.
    """
    own = sum(SECONDS in run.series for run in runs)
    loggers = sum(run.clock is not None for run in runs)
    if not own and not loggers:
        return []
    if own >= loggers:
        return [
            Axis("seconds of training", lambda run, at: run.series[SECONDS].at(at) if SECONDS in run.series else None)
        ]
    return [Axis("seconds since the first logged point", lambda run, at: run.clock.at(at) if run.clock else None)]


def _panel(runs: Sequence[Run], figure: Figure, axis: Axis) -> Panel:
    name = figure.name
    curves, remarks = [], [figure.meaning] if figure.meaning else []
    longest = max((len(run.series[name].steps) for run in runs if name in run.series), default=0)
    many = len(runs) > FEW and not name.endswith(("total_mb", "skipped", "warnings"))
    smoothed = longest >= SMOOTHED and (is_result(name) or many)
    missing = []
    for place, run in enumerate(runs):
        if name not in run.series:
            continue
        series = run.series[name]
        x = axis.at(run, series.steps)
        if x is None:
            missing.append(run.name)
            continue
        if reference := run.series.get(figure.reference or ""):
            curves.append(_curve(place, run.name, place, reference.steps + run.offset, reference.values, behind=True))
        if infinite := int((~np.isfinite(series.values)).sum()):
            remarks.append(f"{run.name}: {infinite} of {len(series.values)} points are not finite.")
        curves.append(_curve(place, run.name, place, x, _smooth(series) if smoothed else series.values))
    if missing:
        remarks.append(f"Not known for {', '.join(missing)}.")
    if smoothed:
        remarks.append("Running medians.")
    return _framed(figure, axis.title, _without_twins(curves), remarks)


def _shadows(runs: Sequence[Run]) -> list[Panel | Bars]:
    """Return the figures of shadow sparsifiers: a line for each of them and each run."""
    places: dict[str, int] = {}
    curves: dict[str, list[Curve]] = {}
    for place, run in enumerate(runs):
        for name, series in run.series.items():
            if name.startswith(SHADOW):
                sparsifier, _, quantity = name.removeprefix(SHADOW).rpartition("/")
                label = sparsifier if len(runs) == 1 else f"{sparsifier} in {run.name}"
                line = _curve(
                    place, label, places.setdefault(label, len(places)), series.steps + run.offset, series.values
                )
                curves.setdefault(quantity, []).append(line)
    titles = {quantity: SHADOWED.get(quantity, quantity) for quantity in [*SHADOWED, *curves]}
    drawn = [one for one in titles if one in curves][:MOST_OTHERS]
    return [_framed(Figure(titles[one], one), "steps", curves[one], []) for one in drawn]


def _framed(figure: Figure, x_title: str, curves: Sequence[Curve], remarks: Sequence[str]) -> Panel:
    """Return a panel of curves, with suitable axes."""
    remarks = list(remarks)
    y, behind = (_all([curve.y for curve in curves if curve.behind is kind]) for kind in (False, True))
    x_all = _all([curve.x for curve in curves])
    ends = [curve.x[-1] for curve in curves if len(curve.x) and curve.x[-1] > 0]
    x_log = x_title.startswith("MB") and len(ends) > 1 and max(ends) > 10 * min(ends) and x_all.min() > 0
    far = len(y) and len(behind) and np.median(behind) > 10 * np.median(y)
    y_log = wants_log(y) or bool(far and y.min() > 0 and behind.min() > 0)
    y_range = robust_range(y, y_log)
    if len(seen := behind[behind > 0] if y_log else behind):
        beyond = (seen.min() < y_range.low, seen.max() > y_range.high)
        low, high = _around(min(y_range.low, seen.min()), max(y_range.high, seen.max()), y_log)
        y_range = y_range._replace(low=low if beyond[0] else y_range.low, high=high if beyond[1] else y_range.high)
    if y_range.outside:
        most = y_range.highest if y_range.highest > y_range.high else y_range.lowest
        points, them = ("1 point", "it") if y_range.outside == 1 else (f"{y_range.outside} points", "them")
        remarks.append(f"The axis leaves out {points}, up to {plain(most)}; a double click shows {them}.")
    shown = robust_range([])
    if len(x_all):
        shown = Range(*_around(float(x_all.min()), float(x_all.max()), bool(x_log)), 0, x_all.min(), x_all.max())
    return Panel(figure.title, x_title, curves, bool(x_log), y_log, shown, y_range, figure.ideal, remarks)


def _around(low: float, high: float, log: bool) -> tuple[float, float]:
    """Widen a range, for the markers of the first and the last points."""
    if log:
        low, high = _around(math.log10(low), math.log10(high), False)
        return 10**low, 10**high
    margin = max(0.03 * (high - low), 1e-6 * abs(high)) or 0.5
    return low - margin, high + margin


def _all(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.zeros(0), *arrays])


def _curve(run: int, name: str, look: int, x: Array, y: Array, behind: bool = False) -> Curve:
    finite = np.isfinite(x) & np.isfinite(y)
    return Curve(run, name, look, *_thinned(x[finite], y[finite]), behind)


def _thinned(x: Array, y: Array) -> tuple[Array, Array]:
    """Keep the smallest and the largest value of each part of a long curve, and its last point."""
    if len(x) <= MOST_POINTS:
        return x, y
    kept = {len(x) - 1}
    for part in np.array_split(np.arange(len(x)), MOST_POINTS // 2):
        kept |= {int(part[np.argmin(y[part])]), int(part[np.argmax(y[part])])}
    places = sorted(kept)
    return x[places], y[places]


def _smooth(series: Series) -> Array:
    """Return running medians over finite points, with shorter windows at the ends."""
    half = max(1, len(series.values) // 60)
    y = np.pad(np.where(np.isfinite(series.values), series.values, np.nan), half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(y, 2 * half + 1)
    found = np.full(len(windows), np.nan)
    some = ~np.isnan(windows).all(axis=1)
    found[some] = np.nanmedian(windows[some], axis=1)
    return found


def _without_twins(curves: Sequence[Curve]) -> list[Curve]:
    """Keep one of several equal references of runs."""
    kept: list[Curve] = []
    for curve in curves:
        same = (one for one in kept if one.behind and curve.behind)
        if not any(np.array_equal(one.x, curve.x) and np.allclose(one.y, curve.y) for one in same):
            kept.append(curve)
    return kept


def typical(run: Run, name: str) -> float | None:
    """Return the median of a quantity's finite values over the run; None without any.

    Args:
        run: with the logs.
        name: of the quantity.
    """
    values = run.series[name].values if name in run.series else np.zeros(0)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _bars(runs: Sequence[Run]) -> Bars:
    rows = []
    for place, run in enumerate(runs):
        select, exchange, exposed = (typical(run, name) for name in (SELECT, EXCHANGE, EXPOSED))
        if select is not None or exchange is not None:
            rows.append((place, select or 0.0, exchange or 0.0, exposed))
    remarks = ["Medians over the run. Exposed is what of it backward waits for; the rest is hidden behind backward."]
    if without := [run.name for place, run in enumerate(runs) if place not in {row[0] for row in rows}]:
        remarks.append(f"Not known for {', '.join(without)}.")
    return Bars("Times of a step / ms", rows, remarks)


def groups_of(run: Run) -> dict[str, dict[str, float]]:
    """Return means of finite values over the run, by group and quantity; empty if groups were not logged."""
    found: dict[str, dict[str, float]] = {}
    for name, series in run.series.items():
        if name.startswith(GROUP):
            group, _, quantity = name.removeprefix(GROUP).partition("/")
            finite = series.values[np.isfinite(series.values)]
            found.setdefault(group, {})[quantity] = float(np.mean(finite)) if len(finite) else math.nan
    return found
