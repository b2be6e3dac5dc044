"""Three figures of the race."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.race.cells import Cell, steps_to
from benchmarks.race.configurations import CONFIGURATIONS
from benchmarks.race.tasks import TASKS
from benchmarks.race.timed import LINKS
from lightning_sparse.tools.style import INK, PALE, look, panels, save


def looks() -> dict[str, dict]:
    """Of methods: ours are filled."""
    found = {}
    for place, name in enumerate(CONFIGURATIONS):
        style = look(place)
        ours = name.startswith(("ours", "root", "turned", "late"))
        found[name] = {"color": style.colour, "marker": style.marker, "mfc": style.colour if ours else "white"}
    return found


def loss_against_bytes(tasks: Mapping[str, Sequence[Cell]], path: Path) -> None:
    """A point for each method: where it ends, and what it sends; the line is where dense training ends."""
    figure, places = panels(len(tasks), 2, 6.0, 4.2)
    for panel, (task, every) in zip(places, tasks.items(), strict=True):
        panel.set_title(f"{task}, n = {TASKS[task].ranks}", fontsize=10)
        panel.set_xscale("log")
        panel.set_xlabel("MB sent by a rank in the whole training")
        panel.set_ylabel("validation perplexity" if TASKS[task].perplexity else "validation loss")
        for cell in every:
            if not cell.lines or not all(map(math.isfinite, cell.losses.values())):
                continue
            assert cell.megabytes is not None
            ends = [math.exp(x) if TASKS[task].perplexity else x for x in cell.losses.values()]
            style, size = looks()[cell.entry.method], sum(cell.megabytes)
            panel.plot([size, size], [min(ends), max(ends)], color=style["color"], linewidth=1)
            panel.plot([size], [fmean(ends)], linestyle="", **style)
            title = CONFIGURATIONS[cell.entry.method].title
            panel.annotate(title, (size, fmean(ends)), (4, 4), textcoords="offset points", fontsize=7, color=INK)
            if cell.entry.method == "dense":
                panel.axhline(fmean(ends), color=PALE, linewidth=1, zorder=0)
    save(figure, path)


def seconds_to(cell: Cell, target: float, compute: float, mbit: float) -> float | None:
    """Computed, not measured: steps to a loss, times computing and sending one after the other; None: never there."""
    steps = steps_to(list(cell.lines.values()), target)
    if steps is None or cell.megabytes is None:
        return None
    megabytes = sum(cell.megabytes) / TASKS[cell.entry.task].steps
    return steps * (compute + megabytes * 8 / mbit)


def time_to_loss(task: str, every: Sequence[Cell], target: float, compute: float, path: Path) -> None:
    """Bars for three links; a method without a bar does not come there."""
    figure, places = panels(len(LINKS), 3, 4.2, 0.6 + 0.28 * len(every))
    names = [CONFIGURATIONS[cell.entry.method].title for cell in every]
    for panel, mbit in zip(places, LINKS, strict=True):
        times = [seconds_to(cell, target, compute, mbit) for cell in every]
        panel.set_title(f"{task}: {mbit} Mbit/s", fontsize=10)
        panel.set_xlabel("seconds to dense's loss + 2 %, computed")
        colours = [looks()[cell.entry.method]["color"] for cell in every]
        panel.barh(range(len(every)), [time or 0.0 for time in times], color=colours, height=0.6)
        for height, time in enumerate(times):
            words = "not reached" if time is None else f"{time:.0f}"
            panel.annotate(words, (time or 0.0, height), (3, -3), textcoords="offset points", fontsize=7, color=INK)
        panel.set_yticks(range(len(every)), names, fontsize=7)
        panel.invert_yaxis()
    save(figure, path)


def asked(rows: Sequence[Sequence[str]], heads: Sequence[str], path: Path) -> None:
    """A table as a picture."""
    figure, [panel] = panels(1, 1, 9.0, 0.5 + 0.3 * len(rows))
    panel.axis("off")
    table = panel.table(cellText=[list(row) for row in rows], colLabels=list(heads), loc="center", cellLoc="left")
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.auto_set_column_width(list(range(len(heads))))
    for (row, _), cell in table.get_celld().items():
        cell.set_linewidth(0.3)
        cell.set_edgecolor(PALE)
        cell.set_text_props(color=INK, weight="bold" if row == 0 else "normal")
    save(figure, path)
