"""Draw the README's figure: step times over limited links, from a table that `shaped_links.py --csv` wrote.

docs/step_time.csv holds what is drawn there. To measure again, and draw:

sudo python benchmarks/shaped_links.py --parts hooks --models lstm vgg gpt --mbit 100 1000 --csv docs/step_time.csv
python benchmarks/step_time_figure.py --table docs/step_time.csv --figure docs/step_time.svg
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import CLI

from lightning_sparse.tools.style import COLOURS, INK, PALE, panels, save

SPARSE = ("sparse_ddp, density 0.01", COLOURS[0], "")
OTHERS = "#8C8C8C"
VARIANTS = {
    "dense": ("plain DDP", INK, ""),
    "fp16": ("DDP's fp16 hook", OTHERS, ""),
    "powersgd 1": ("PowerSGD, rank 1", OTHERS, ""),
    "sparse 0.01": SPARSE,
    "compute": ("no exchange at all", PALE, "//"),
}
"""Name, colour and hatch by variant; names at the bars tell them apart."""


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """A panel for each number of ranks, model and link, with a bar for each variant, from 0 seconds on.

    Args:
        rows: with `model`, `mbit`, `ranks`, `parameters`, `variant` and `step_ms`; other variants are left out.
        path: of an SVG or PNG file.
    """
    times: dict[tuple[int, int, str, int], dict[str, float]] = {}
    for r in rows:
        room = times.setdefault((int(r["ranks"]), int(r["mbit"]), r["model"], int(r["parameters"])), {})
        room[r["variant"]] = float(r["step_ms"]) / 1e3
    columns = 5 if len(times) <= 5 else 3
    figure, places = panels(len(times), columns, 2.6, 2.1)
    cores = {row["cores"] for row in rows if row.get("cores")}
    where = f"{cores.pop()} cores of one machine" if len(cores) == 1 else "one machine"
    figure.suptitle(f"Seconds a step: medians, gloo, limited links between ranks on the {where}", fontsize=10)
    for place, (panel, room) in enumerate(zip(places, sorted(times), strict=True)):
        ranks, mbit, model, numel = room
        shown = [name for name in VARIANTS if name in times[room]]
        for height, name in enumerate(shown):
            label, colour, hatch = VARIANTS[name]
            bars = panel.barh(height, times[room][name], color=colour, hatch=hatch, edgecolor="white", linewidth=0)
            bold = "bold" if label == SPARSE[0] else "normal"
            panel.bar_label(bars, [f"{times[room][name]:.2g}"], padding=3, fontsize=9, fontweight=bold)
        names = [VARIANTS[name][0] for name in shown]
        panel.set_yticks(range(len(shown)), names if place % columns == 0 else [""] * len(shown), fontsize=9)
        for tick in panel.get_yticklabels():
            tick.set_fontweight("bold" if tick.get_text() == SPARSE[0] else "normal")
        panel.invert_yaxis()
        panel.margins(x=0.25)
        panel.grid(visible=False)
        panel.spines["bottom"].set_visible(False)
        panel.tick_params(length=0)
        panel.set_xticks([])
        link = f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"
        panel.set_title(f"{link}, {ranks} ranks\n{model.upper()}, {numel / 1e6:.0f} million", fontsize=9, loc="left")
    save(figure, path)


def main(table: Path, figure: Path) -> None:
    """Draw the figure.

    Args:
        table: that shaped_links.py --csv wrote.
        figure: SVG or PNG.
    """
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "hooks"]
    if not any(row["variant"] in VARIANTS for row in rows):
        raise SystemExit(f"{table} holds nothing of the part hooks: {', '.join(VARIANTS)}")
    draw(rows, figure)


if __name__ == "__main__":
    CLI(main, as_positional=False)
