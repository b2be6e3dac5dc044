"""Draw the README's figure: step times over limited links, from a table that `shaped_links.py --csv` wrote.

docs/step_time.csv holds what is drawn there. To measure again, and draw (parts hooks or messages):

sudo python benchmarks/shaped_links.py --parts hooks --models lstm vgg gpt --mbit 100 1000 --csv docs/step_time.csv
python benchmarks/step_time_figure.py docs/step_time.csv docs/step_time.svg
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from lightning_sparse.style import COLOURS, INK, PALE, panels, save

SPARSE = ("sparse_ddp (UnionTopK, density 0.01)", COLOURS[0], "//")
VARIANTS = {
    "dense": ("plain DDP", INK, ""),
    "fp16": ("DDP's fp16 hook", COLOURS[5], "\\\\"),
    "powersgd 1": ("PowerSGD of rank 1", COLOURS[2], ".."),
    "sparse 0.01": SPARSE,
    "bucket step": SPARSE,
    "compute": ("no exchange at all", PALE, ""),
}
"""Label, colour and hatch by variant; hatches tell bars apart in grey."""


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """A group of bars for each model, link and number of ranks.

    Args:
        rows: with `model`, `mbit`, `ranks`, `parameters`, `variant` and `step_ms`; other variants are left out.
        path: of an SVG or PNG file.
    """
    groups = sorted({(int(r["ranks"]), int(r["mbit"]), r["model"], int(r["parameters"])) for r in rows})
    times = {(int(r["ranks"]), int(r["mbit"]), r["model"], r["variant"]): float(r["step_ms"]) for r in rows}
    drawn = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    figure, [axes] = panels(1, 1, max(8.0, 0.42 * len(drawn) * len(groups)), 3.6)
    axes.grid(axis="x", visible=False)
    axes.set_axisbelow(True)
    width = 0.85 / len(drawn)
    for place, variant in enumerate(drawn):
        label, colour, hatch = VARIANTS[variant]
        known = [
            (i, times[n, mbit, model, variant])
            for i, (n, mbit, model, _) in enumerate(groups)
            if (n, mbit, model, variant) in times
        ]
        left = [i + (place - (len(drawn) - 1) / 2) * width for i, _ in known]
        heights = [ms for _, ms in known]
        bars = axes.bar(left, heights, width, label=label, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        axes.bar_label(bars, [f"{ms / 1e3:.2g} s" for ms in heights], fontsize=8)
    axes.set(yscale="log", ylabel="step time, ms (log scale)")
    axes.margins(y=0.25)
    names = [f"{model.upper()}, {numel / 1e6:.0f} M\n{mbit:,} Mbit/s" for _, mbit, model, numel in groups]
    ranks = sorted({n for n, *_ in groups})
    if len(ranks) > 1:
        names = [f"{name}\n{group[0]} ranks" for name, group in zip(names, groups, strict=True)]
    axes.set_xticks(range(len(groups)), names)
    cores = {row["cores"] for row in rows if row.get("cores")}
    where = f"on the {cores.pop()} cores of one machine" if len(cores) == 1 else "on one machine"
    axes.set_title(f"{', '.join(map(str, ranks))} ranks {where}, gloo: medians", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(figure, path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="that shaped_links.py --csv wrote")
    parser.add_argument("figure", type=Path, help="SVG or PNG")
    arguments = parser.parse_args(words)
    with arguments.table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] in ("hooks", "messages")]
    if not any(row["variant"] in VARIANTS for row in rows):
        parser.error(f"{arguments.table} holds nothing of the parts hooks and messages: {', '.join(VARIANTS)}")
    draw(rows, arguments.figure)


if __name__ == "__main__":
    main()
