"""Which cells of a product of test cases run by default: enough of them for each two values to meet.

The others are marked thorough, so that both runs together are the whole product.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

S, T = TypeVar("S"), TypeVar("T")

everything = True
"""Whether cells that do not run by default are made, too."""


def covering(
    cells: Iterable[tuple[Hashable, ...]],
    *,
    together: int = 2,
    trivial: Collection[Hashable] = (),
    thorough: Collection[Hashable] = (),
) -> list[Any]:
    """The cells as values for ``pytest.mark.parametrize``, some of them marked thorough.

    Any two values of different axes that are in one cell, such as a sparsifier and a number of ranks, are in one that
    runs by default, too. The choice depends on the cells and on their order alone.

    Args:
        cells: one value of each axis. The first ones are preferred.
        together: how many values have to meet; with 1, each value alone is in a cell that runs by default.
        trivial: values with which the others show little, such as one rank: two others meet in a cell without them.
        thorough: values whose cells are all left to thorough runs.

    Example:
        >>> ["".join(p.values) for p in covering((a, b, c) for a in "xy" for b in "xy" for c in "xy") if not p.marks]
        ['xxx', 'xyy', 'yxy', 'yyx']
    """
    cells = list(cells)
    meetings = [set(combinations(enumerate(cell), together)) for cell in cells]
    chosen: set[int] = set()
    met: set[Any] = set()
    offered = [number for number, cell in enumerate(cells) if not set(cell) & set(thorough)]
    for is_trivial in (False, True):
        turn = [number for number in offered if bool(set(cells[number]) & set(trivial)) == is_trivial]
        for new in range(max(map(len, meetings)), 0, -1):  # first the cells in which most meet that have not met yet
            for number in turn:
                if len(meetings[number] - met) >= new:
                    chosen.add(number)
                    met |= meetings[number]
    return [
        pytest.param(*cell, id="-".join(map(label, cell)), marks=[pytest.mark.thorough] * (number not in chosen))
        for number, cell in enumerate(cells)
        if everything or number in chosen
    ]


def in_turns(some: Sequence[T], others: Sequence[S]) -> list[tuple[T, S]]:
    """All pairs; where the first one of each of `some` is preferred, they take turns with `others`."""
    return [
        (one, others[(number + turn) % len(others)]) for number, one in enumerate(some) for turn in range(len(others))
    ]


def label(value: Any) -> str:
    return str(getattr(value, "__name__", getattr(value, "name", value)))
