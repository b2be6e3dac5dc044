"""Which cells of a product of test cases run by default: enough of them for each two values to meet.

The others are marked thorough, so that both runs together are the whole product. Where a cell takes less time than
pytest needs for a test, :func:`in_one_test` runs many of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import PurePath
from types import MappingProxyType
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
    seen_as: Callable[..., tuple[Hashable, ...]] = lambda *cell: cell,
) -> list[Any]:
    """The cells as values for ``pytest.mark.parametrize``, some of them marked thorough.

    Any two values of different axes that are in one cell, such as a sparsifier and a number of ranks, are in one that
    runs by default, too. The choice depends on the cells and on their order alone.

    Args:
        cells: one value of each axis. The first ones are preferred.
        together: how many values have to meet; with 1, each value alone is in a cell that runs by default.
        trivial: values with which the others show little, such as one rank: two others meet in a cell without them.
        thorough: values whose cells are all left to thorough runs.
        seen_as: from the values of a cell those that have to meet instead of them.

    Example:
        >>> ["".join(p.values) for p in covering((a, b, c) for a in "xy" for b in "xy" for c in "xy") if not p.marks]
        ['xxx', 'xyy', 'yxy', 'yyx']
    """
    cells = list(cells)
    meetings = [set(combinations(enumerate(seen_as(*cell)), together)) for cell in cells]
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


def by_default(values: Iterable[Any], count: int = 1) -> list[Any]:
    """So many of the values of one axis by default, the others marked thorough: where each shows much the same.

    Values that are marked thorough already, as those of :func:`covering`, do not count.

    Example:
        >>> [p.values for p in by_default([True, False]) if not p.marks]
        [(True,)]
        >>> len([p for p in by_default(covering((a, b) for a in "xy" for b in "xyz"), 2) if not p.marks])
        2
    """
    found = []
    for value in values:
        given = hasattr(value, "marks")
        late = given and any(mark.name == "thorough" for mark in value.marks)
        late, count = late or count <= 0, count - (not late)
        marks = [*(value.marks if given else ()), *[pytest.mark.thorough] * late]
        parts = value.values if given else value if type(value) is tuple else (value,)
        if everything or not late:
            found.append(pytest.param(*parts, marks=marks, id=value.id if given else None))
    return found


def in_one_test(
    names: str,
    cells: Iterable[Any],
    *,
    apart: int = 1,
    scope: Any = "function",
    made: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Callable[[Callable[..., None]], Any]:
    """Like ``pytest.mark.parametrize``, but cells with the same first values are one test.

    It ends with the first cell that fails, and names it. Fixtures are the same for all its cells. Each cell that is
    marked thorough is a test.

    Args:
        names: the parameters, separated by commas; a test need not take all of them.
        cells: one value of each, or what :func:`covering` gives.
        apart: by how many of the first parameters tests differ; with 0, all cells are one test.
        scope: what is wider keeps tests of the same cells together.
        made: further parameters that a test may take, and the functions that make them of all values of a cell.
    """
    parameters = [name.strip() for name in names.split(",")]
    tests: dict[str, tuple[list[Any], Any]] = {}
    for cell in cells:
        values, marks = (cell.values, cell.marks) if hasattr(cell, "marks") else (cell, ())
        name = str(cell.id) if marks and cell.id else "-".join(map(label, values[:apart])) or "all"
        tests.setdefault(name, ([], marks))[0].append(values)

    def decorate(test: Callable[..., None]) -> Any:
        signature = inspect.signature(test)
        taken = signature.parameters

        @functools.wraps(test)
        def each(cells: list[tuple[Any, ...]], **fixtures: Any) -> None:
            for cell in cells:
                values = {name: value for name, value in zip(parameters, cell, strict=True) if name in taken}
                try:
                    values |= {name: make(*cell) for name, make in made.items() if name in taken}
                    test(**values, **fixtures)
                except BaseException as error:
                    error.add_note(f"This was the cell {'-'.join(map(label, cell))}.")
                    raise

        fixtures = [parameter for name, parameter in taken.items() if name not in (*parameters, *made)]
        positional = inspect.Parameter("cells", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        each.__signature__ = signature.replace(parameters=[positional, *fixtures])  # type: ignore[attr-defined]
        params = [pytest.param(cells, id=name, marks=marks) for name, (cells, marks) in tests.items()]
        return pytest.mark.parametrize("cells", params, scope=scope)(each)

    return decorate


def in_turns(some: Sequence[T], others: Sequence[S]) -> list[tuple[T, S]]:
    """All pairs; where the first one of each of `some` is preferred, they take turns with `others`."""
    return [
        (one, others[(number + turn) % len(others)]) for number, one in enumerate(some) for turn in range(len(others))
    ]


def label(value: Any) -> str:
    if isinstance(value, PurePath):
        return str(value)
    return str(getattr(value, "__name__", getattr(value, "name", value)))
