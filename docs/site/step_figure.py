"""A step of a sparsifier with four ranks as SVG, with the numbers that the library computes."""

from __future__ import annotations

import inspect
from collections.abc import Set
from typing import Any

import torch
from picture import LINE, PAPER, SENT, WAITS, text
from torch import Tensor

from lightning_sparse.core.step import Agreement, Context
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.engine.pipeline import exchange_group, init_group, settle_group
from lightning_sparse.exchanges import EXCHANGES
from lightning_sparse.memories import Residual
from lightning_sparse.sparsifiers import Sparsifier

RANKS, NUMEL, DENSITY = 4, 16, 0.25
BAR, PITCH, UNIT, ROW, LEFT, RIGHT = 14, 18, 16, 74, 60, 420


def gradients() -> Tensor:
    """(RANKS, NUMEL): positive, so that bars need no sign; ranks agree in part."""
    own = [[(37 * j + 61 * r + 5 * j * j + 13 * r * j) % 29 / 28 for j in range(NUMEL)] for r in range(RANKS)]
    common = torch.tensor([(11 * j + 3 * j * j) % 17 / 16 for j in range(NUMEL)])
    return 2.4 * torch.tensor(own) ** 3 + 0.8 * common**2 + 0.08


def run(sparsifier: Sparsifier) -> tuple[Tensor, list[set[int]], list[set[int]], Tensor]:
    """First step: gradients, what each rank selects, what it sends, and the update."""
    memory, exchange = Residual(), EXCHANGES.resolve(sparsifier.exchange)
    places = [Context(0, DENSITY, rank, RANKS) for rank in range(RANKS)]
    grads, parts = gradients(), {"memory": memory, "sparsifier": sparsifier}

    def begin() -> list[Any]:
        return [init_group(NUMEL, torch.float32, torch.device("cpu"), ctx, **parts) for ctx in places]

    def select(rank: int, state: Any) -> Any:
        found = sparsifier.select(grads[rank].clone(), state.selector, places[rank])
        return (yield from found) if inspect.isgenerator(found) else found

    def step(rank: int, row: Tensor, state: Any) -> Any:
        proposed = yield from exchange_group(row, state, places[rank], exchange=exchange, **parts)
        return memory.residual(settle_group(state, proposed, bool(proposed.skipped), memory).memory)

    selections = [one for one, _ in drive_ranks([select(rank, state) for rank, state in enumerate(begin())])]
    picked = [{j for j in one.indices[: int(one.count)].tolist() if j < NUMEL} for one in selections]
    if sparsifier.agreement is Agreement.EVERYTHING:  # its indices are left out
        picked = [set(range(NUMEL))] * RANKS
    averages = grads.clone()
    left = drive_ranks([step(rank, averages[rank], state) for rank, state in enumerate(begin())])
    gone = [rest.abs() < row.abs() / 2 for rest, row in zip(left, grads, strict=True)]
    sent = [set(row.nonzero().flatten().tolist()) for row in gone]
    return grads, picked, sent, averages[0]


def bars(x: int, base: int, values: Tensor, dark: Set[int], hollow: Set[int], crossed: Set[int]) -> list[str]:
    """Bars on a line."""
    drawn = [f'<line x1="{x - 3}" y1="{base}" x2="{x + NUMEL * PITCH}" y2="{base}" stroke="{LINE}"/>']
    for place, value in enumerate(values.tolist()):
        if value:
            fill = SENT if place in dark else PAPER if place in hollow else WAITS
            edge = SENT if place in dark | hollow | crossed else LINE
            shape = f'x="{x + place * PITCH}" y="{base - value * UNIT:.1f}" width="{BAR}" height="{value * UNIT:.1f}"'
            drawn.append(f'<rect {shape} fill="{fill}" stroke="{edge}" stroke-width="{1 + (edge == SENT)}"/>')
    return drawn


def figure(name: str, sparsifier: Sparsifier) -> str:
    """The drawing."""
    grads, picked, sent, update = run(sparsifier)
    height = RANKS * ROW + 66
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 730 {height}" font-family="system-ui, sans-serif" '
        'role="img" aria-labelledby="title">',
        f"<title id='title'>The first step of {name} with {RANKS} ranks, density {DENSITY:g}</title>",
        f'<rect width="730" height="{height}" rx="10" fill="{PAPER}"/>',
        text(LEFT, 24, "each rank's gradient", 15),
        text(RIGHT, 24, "update, equal on all ranks", 15),
    ]
    for rank in range(RANKS):
        base = (rank + 1) * ROW + 18
        own, gone = picked[rank], sent[rank]
        parts.append(text(8, base - 4, f"rank {rank}", 12))
        parts += bars(LEFT, base, grads[rank], own & gone, gone - own, own - gone)
    parts += bars(RIGHT, RANKS * ROW // 2 + 50, update, set(range(NUMEL)), set(), set())
    kinds = [(SENT, SENT, "selected by this rank, sent"), (WAITS, LINE, "waits in the residual")]
    if any(gone - own for own, gone in zip(picked, sent, strict=True)):
        kinds.insert(1, (PAPER, SENT, "selected by another rank, sent"))
    if any(own - gone for own, gone in zip(picked, sent, strict=True)):
        kinds.append((WAITS, SENT, "selected, not sent"))
    for place, (fill, edge, words) in enumerate(kinds):
        x, y = 8 + 182 * place, height - 16
        parts.append(
            f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{fill}" stroke="{edge}" stroke-width="1.5"/>'
        )
        parts.append(text(x + 17, y, words, 11))
    return "\n".join([*parts, "</svg>", ""])
