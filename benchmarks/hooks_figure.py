"""Figures of the part hooks of `shaped_links.py`: step times beside no exchange and plain DDP, loss against time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from paired import ALONE, MOST_OVER_COMPUTE, Result, Rounds

from lightning_sparse.tools.style import (
    COLOURS,
    INK,
    MARKERS,
    common_legend,
    label_ends,
    look,
    panels,
    plain_numbers,
    save,
)

WINDOW = 4
"""Steps of which a loss is the mean: as many as there are batches."""


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write hooks_time.svg and hooks_loss.svg into a folder; nothing where there are no results.

    Args:
        results: of one or more models, links and numbers of ranks.
        folder: that exists.
    """
    results = sorted(results, key=lambda r: (r["job"]["model"], r["job"]["ranks"], r["job"]["mbit"]))
    results = [result for result in results if result["records"]]
    return [draw_times(results, folder), draw_losses(results, folder)] if results else []


def draw_times(results: Sequence[Result], folder: Path) -> Path:
    """Dots with quartiles: step time over that of no exchange; a panel for each model and number of ranks."""
    rooms = list(dict.fromkeys((r["job"]["model"], r["job"]["ranks"]) for r in results))
    rates = sorted({r["job"]["mbit"] for r in results})
    names = list(dict.fromkeys(name for r in results for name in Rounds(r).variants if name != "compute"))
    figure, places = panels(len(rooms), 3, 6.0, 1.6 + 0.32 * len(names))
    for panel, (model, ranks) in zip(places, rooms, strict=True):
        panel.set(title=f"{model}, {ranks} ranks", xscale="log")
        panel.set_xlabel(
            "step time / that of no exchange: medians and quartiles of paired rounds\n"
            f"(dashed: {MOST_OVER_COMPUTE:g}; dotted: plain DDP)",
            fontsize=8,
        )
        for result in (r for r in results if (r["job"]["model"], r["job"]["ranks"]) == (model, ranks)):
            rounds, rate = Rounds(result), rates.index(result["job"]["mbit"])
            if "compute" not in rounds.variants:
                continue
            shift = 0.6 * ((rate + 0.5) / len(rates) - 0.5)
            for name in (one for one in rounds.variants if one != "compute"):
                ratio, height = rounds.steps(name, "compute"), names.index(name) + shift
                colour, marker = COLOURS[rate % len(COLOURS)], MARKERS[rate % len(MARKERS)]
                label = f"{rates[rate]:,} Mbit/s"
                panel.plot([ratio.low, ratio.high], [height, height], color=colour, linewidth=1)
                panel.plot(
                    ratio.middle, height, color=colour, marker=marker, linestyle="none", markersize=5, label=label
                )
                if name == "dense":
                    panel.axvline(ratio.middle, color=colour, linewidth=0.8, linestyle=":")
        panel.axvline(1, color=INK, linewidth=0.8)
        panel.axvline(MOST_OVER_COMPUTE, color=INK, linewidth=0.8, linestyle="--")
        panel.set_yticks(range(len(names)), names)
        panel.set_ylim(len(names) - 0.5, -0.5)
        plain_numbers(panel.xaxis)
    common_legend(figure, places)
    return save(figure, folder / "hooks_time.svg")


def draw_losses(results: Sequence[Result], folder: Path) -> Path:
    """Training loss against seconds spent in timed steps; a panel for each model, link and number of ranks.

    A fallback is left out: it has trained on before its first timed step.
    """
    every = dict.fromkeys(name for r in results for name in Rounds(r).variants)
    names = [name for name in every if name not in ALONE and not name.startswith("fallback")]
    columns = len({r["job"]["mbit"] for r in results})
    figure, places = panels(len(results), columns, 6.0, 4.2)
    for panel, result in zip(places, results, strict=True):
        job = result["job"]
        panel.set(title=f"{job['model']}, {job['ranks']} ranks, {job['mbit']:,} Mbit/s", xscale="log")
        panel.set(xlabel="seconds of training", ylabel=f"training loss, mean of {WINDOW} steps")
        for name in names:
            if not (own := [r for r in result["records"] if r["variant"] == name]):
                continue
            seconds = list(accumulate(r["step_ms"] / 1e3 for r in own))
            losses = [fmean(r["loss"] for r in own[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(own))]
            line = look(names.index(name)).line | {"markevery": max(1, len(own) // 8)}
            full = min(WINDOW, len(own)) - 1  # before it, the mean is over some batches only
            panel.plot(seconds[full:], losses[full:], label=name, **line)
        plain_numbers(panel.xaxis)
        label_ends(panel, bold=["sparse 0.01", "sparse 0.001"])
    return save(figure, folder / "hooks_loss.svg")
