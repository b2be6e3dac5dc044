"""Draw the README's figure: step times over limited links, from results of `shaped_links.py --parts messages`.

sudo python benchmarks/shaped_links.py --parts messages --models lstm vgg --mbit 100 1000
python benchmarks/step_time_figure.py shaped_links docs/step_time.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from lightning_sparse.style import COLOURS, INK, PALE, panels, save

VARIANTS = {
    "dense": ("plain DDP", INK, ""),
    "bucket step": ("sparse_ddp (UnionTopK, density 0.01)", COLOURS[0], "//"),
    "compute": ("no exchange at all", PALE, ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the folder --out of shaped_links.py")
    parser.add_argument("figure", type=Path)
    arguments = parser.parse_args()
    results = [json.loads(path.read_text()) for path in arguments.results.glob("messages-*.json")]
    results.sort(key=lambda result: (result["job"]["mbit"], result["job"]["model"]))
    figure, [axes] = panels(1, 1, 8.0, 3.2)
    axes.grid(axis="x", visible=False)
    width = 0.27
    for place, (variant, (label, colour, hatch)) in enumerate(VARIANTS.items()):
        times = [median(r["step_ms"] for r in result["records"] if r["variant"] == variant) for result in results]
        left = [index + (place - 1) * width for index in range(len(results))]
        bars = axes.bar(left, times, width, label=label, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        axes.bar_label(bars, [f"{time / 1e3:.2g} s" for time in times], fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("step time, ms (log scale)")
    axes.margins(y=0.15)
    names = [
        f"{r['job']['model'].upper()}, {r['parameters'] / 1e6:.0f} M parameters\n{r['job']['mbit']:,} Mbit/s"
        for r in results
    ]
    axes.set_xticks(range(len(results)), names)
    axes.set_title(f"{results[0]['job']['ranks']} ranks on the 2 cores of one machine, gloo: medians", fontsize=10)
    axes.legend(fontsize=8)
    save(figure, arguments.figure)


if __name__ == "__main__":
    main()
