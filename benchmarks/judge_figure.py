"""Draw where the trainings of docs/comparison.md end, from the table that `lightning-sparse judge` leaves.

Dots are seeds, lines reach from the least to the largest one, and a vertical line is the mean of dense training. The
command itself also draws curves on the way there, which its judge_curves.csv holds.

python benchmarks/judge_figure.py --table docs/comparison/judge.csv --folder docs/comparison
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from jsonargparse import CLI

from lightning_sparse.tools.compare.figures import looks, ours
from lightning_sparse.tools.compare.methods import DENSE
from lightning_sparse.tools.compare.sheets import Sheet
from lightning_sparse.tools.compare.tables import by_method, contests, title
from lightning_sparse.tools.compare.training import Result
from lightning_sparse.tools.style import INK, panels, plain_numbers, robust_range, save


def draw(results: Sequence[Result], measure: str, path: Path) -> None:
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


def main(table: Path, folder: Path) -> None:
    """Draw both figures.

    Args:
        table: judge.csv.
        folder: for judge_end_loss.svg and judge_end_quality.svg.
    """
    results = Sheet(table, Result).read()
    for measure in ("loss", "quality"):
        draw(results, measure, folder / f"judge_end_{measure}.svg")


if __name__ == "__main__":
    CLI(main, as_positional=False)
