"""Tables: on a terminal, and in markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 100
"""Columns that a table needs; lines of narrower terminals break."""


class Table(NamedTuple):
    """A title, a header and rows of text; the first column is text, the others are numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The table under a heading."""
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, ""])


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    """Print a table; plain text where rich is missing.

    Args:
        title: a line above it.
        header: names of the columns.
        rows: cells as texts.
        left: columns that are aligned to the left; the others hold numbers.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [header, *rows]]
        print(title, *lines, sep="\n", flush=True)
        return
    console = Console()
    console.width = max(console.width, WIDTH)
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
