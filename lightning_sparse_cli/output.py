"""The output of commands: tables or JSON, and progress."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sparse.core.console import Table


def tell(what: str, done: float) -> None:
    """Progress of profiling; a plain function, so that launchers can send it to other processes."""
    if not sys.stderr.isatty():
        return print(f"[{done:4.0%}] {what}", file=sys.stderr, flush=True)
    bar = "━" * round(40 * done)
    print(f"\x1b[2K{bar:<40} {done:4.0%} {what}", end="\r", file=sys.stderr, flush=True)


@contextmanager
def progress(total: int, done: int) -> Iterator[Callable[[], None]]:
    """Show a bar on the standard error while the block runs, if that is a terminal; gives what moves it one on."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    # Rows go above the bar on a terminal, and otherwise where the standard output goes.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda: bar.advance(task)


class Rows:
    """Prints rows as they come, below a title and a header whenever the title is another one.

    Args:
        header: of the columns; the first one is left-aligned.
        cells: makes a title and the cells of a result.
    """

    def __init__(self, header: Sequence[str], cells: Callable[[Any], tuple[str, Sequence[str]]]) -> None:
        self._header, self._cells, self._title = header, cells, ""
        self._widths = [20, *(max(len(name), 8) for name in header[1:])]

    def add(self, result: Any) -> None:
        """Print the row of a result now."""
        title, cells = self._cells(result)
        if title != self._title:
            self._title = title
            print("", title, self._line(self._header), sep="\n")
        print(self._line(cells), flush=True)

    def _line(self, cells: Sequence[str]) -> str:
        first, *others = zip(cells, self._widths, strict=True)
        return " ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def write(path: Path, tables: Sequence[Table], notes: str = "") -> None:
    """Write tables in markdown, with notes below."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*(table.markdown() for table in tables), *([notes] if notes else [])]), encoding="utf-8")


def show(folder: Path, tables: Sequence[Table]) -> None:
    """Print tables, and where they were written."""
    for table in tables:
        table.show()
    print(f"Tables and numbers are in {folder}.")


def print_json(value: Any) -> None:
    """Named tuples become objects, and numbers that are not finite, which JSON does not have, null."""
    print(json.dumps(_plain(value), indent=1))


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
