"""Draw docs/how-it-works.svg: the second step of two ranks, with the numbers that the package computes.

python docs/site/picture.py docs/how-it-works.svg
"""

from __future__ import annotations

import sys
from collections.abc import Set
from pathlib import Path

import torch
from torch import Tensor

import lightning_sparse as ls

SENT, WAITS, TEXT, LINE, PAPER = "#26408b", "#b4bcc9", "#1c2430", "#68717f", "#ffffff"
BAR, GAP, UNIT = 13, 4, 15  # widths, and the height of 1, in pixels
NUMEL, RANKS, DENSITY = 12, 2, 1 / 3
PANEL = NUMEL * (BAR + GAP)
COLUMNS = (40, 322, 604)
ROWS = (150, 290)


def gradients() -> Tensor:
    """(2, RANKS, NUMEL): small positive numbers, so that bars need no sign."""
    return torch.tensor(
        [
            [[3, 1, 0.5, 2, 0.5, 1, 1, 0.5, 2, 0.5, 1, 0.5], [1, 0.5, 2, 1, 0.5, 3, 0.5, 1, 0.5, 2, 0.5, 1]],
            [[1, 1.5, 0.5, 1, 2.5, 0.5, 1, 0.5, 1, 0.5, 1.5, 0.5], [0.5, 1, 1, 0.5, 1.5, 1, 0.5, 1, 0.5, 1, 2.5, 1]],
        ]
    )


def text(x: float, y: float, words: str, size: int = 14, anchor: str = "start", colour: str = TEXT) -> str:
    """Words at a place."""
    weight = ' font-weight="600"' if size > 14 else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>{words}</text>'


def bars(x: float, base: float, values: Tensor, dark: set[int], hollow: Set[int] = frozenset()) -> list[str]:
    """Bars on a line; dark ones are sent, hollow ones were selected by the other rank and are sent, too."""
    drawn = [f'<line x1="{x - 3}" y1="{base}" x2="{x + PANEL}" y2="{base}" stroke="{LINE}"/>']
    for place, value in enumerate(values.tolist()):
        if value <= 0:
            continue
        left, height = x + place * (BAR + GAP), value * UNIT
        fill = SENT if place in dark else PAPER if place in hollow else WAITS
        edge = SENT if place in dark | hollow else LINE
        thick = 2 if place in hollow else 1
        drawn.append(
            f'<rect x="{left}" y="{base - height:g}" width="{BAR}" height="{height:g}" fill="{fill}" stroke="{edge}" '
            f'stroke-width="{thick}"/>'
        )
    return drawn


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a tip at its end."""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="2" marker-end="url(#tip)"/>'


def picture() -> str:
    """The drawing as SVG."""
    steps = list(ls.simulate(gradients(), sparsifier="shared_top_k", exchange="reduce_union", density=DENSITY))
    first, step = gradients()
    waiting = first.clone()
    waiting[:, steps[0].indices] = 0  # every rank sent its values at the union of the first step
    acc = waiting + step
    union = set(steps[1].indices.tolist())
    picks = [set(acc[rank].topk(int(DENSITY * NUMEL) // RANKS).indices.tolist()) for rank in range(RANKS)]
    assert union == picks[0] | picks[1]
    left = acc.clone()
    left[:, list(union)] = 0
    width, height = 860, 432
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        'role="img" aria-labelledby="title">',
        "<title id='title'>One step of two ranks: accumulate and select, exchange the average at the union, keep the "
        "rest as the residual</title>",
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
    ]
    heads = (
        ("1  accumulate, select", "residual + gradient; each rank", "picks its largest (dark)"),
        ("2  exchange", "values of both ranks at the union", "of all picks; their mean"),
        ("3  keep the rest", "what was not sent waits", "for the next step"),
    )
    for x, (head, *lines) in zip(COLUMNS, heads, strict=True):
        parts.append(text(x, 32, head, 16))
        parts += [text(x, 52 + 17 * number, line, 13, colour=LINE) for number, line in enumerate(lines)]
    for rank, base in enumerate(ROWS):
        parts.append(text(COLUMNS[0], base + 19, f"rank {rank}", 13))
        parts += bars(COLUMNS[0], base, acc[rank], picks[rank], union - picks[rank])
        parts.append(text(COLUMNS[2], base + 19, f"rank {rank}: residual", 13))
        parts += bars(COLUMNS[2], base, left[rank], set())
    middle = sum(ROWS) / 2
    parts += bars(COLUMNS[1], middle, step.new_tensor(steps[1].update.tolist()), union)
    parts.append(text(COLUMNS[1], middle + 19, "the same update on all ranks", 13))
    for base, end in zip(ROWS, (middle - 38, middle - 8), strict=True):
        parts.append(arrow(COLUMNS[0] + PANEL + 12, base - 20, COLUMNS[1] - 16, end))
        parts.append(arrow(COLUMNS[1] + PANEL + 12, end, COLUMNS[2] - 16, base - 20))
    # Back to the next step.
    low = ROWS[1] + 52
    parts.append(
        f'<path d="M{COLUMNS[2] + PANEL / 2:g} {ROWS[1] + 28} V{low} H{COLUMNS[0] + PANEL / 2:g} V{ROWS[1] + 28}" '
        f'fill="none" stroke="{LINE}" stroke-width="2" marker-end="url(#tip)"/>'
    )
    parts.append(text(COLUMNS[1] + PANEL / 2, low + 18, "residual of the next step: nothing is lost", 13, "middle"))
    x, y = COLUMNS[0], height - 20
    for fill, edge, words, room in (
        (SENT, SENT, "picked by this rank, sent", 215),
        (PAPER, SENT, "picked by the other rank, sent, too", 280),
        (WAITS, LINE, "waits", 0),
    ):
        square = f'x="{x}" y="{y - 11}" width="{BAR}" height="{BAR}"'
        parts.append(f'<rect {square} fill="{fill}" stroke="{edge}" stroke-width="1.5"/>')
        parts.append(text(x + 20, y, words, 13))
        x += room
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
