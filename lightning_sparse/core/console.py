"""Terminal output: lines on rank zero, paths of documentation pages, and tables, which files get as markdown."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info

LOGGER = logging.getLogger("lightning_sparse")
"""Lines appear up to level INFO of this logger; Lightning's own logger writes them, in its format."""

PAGES = next((folder / "docs" for folder in Path(__file__).parents[1:3] if (folder / "docs").is_dir()), Path("docs"))
"""Folder of the documentation on this machine: within the installed package, or beside it in a clone."""

WIDTH = 100
"""Least number of columns that a table may use; narrower terminals break its lines."""


def say(sentence: str) -> None:
    """Log a line on rank zero, unless the level of :data:`LOGGER`, or of Lightning's logger, is above INFO.

    Processes that Lightning has not started all count as rank zero: there, only one of them may call this.
    """
    if LOGGER.level <= logging.INFO:
        rank_zero_info(sentence)


def page(name: str) -> str:
    """Return the path of a documentation page, for a message. The message must be complete without the page."""
    return str(PAGES / f"{name}.md")


def plain(x: float, digits: int = 3) -> str:
    """Format a number with a few significant digits and all digits before the point.

    Args:
        x: the number.
        digits: least number of significant digits.

    Example:
        >>> plain(1350.4), plain(0.04321), plain(999.7), plain(9999.6, 4)
        ('1,350', '0.0432', '1,000', '10,000')
    """
    return f"{x:,.0f}" if 10**digits - 0.5 <= abs(x) < 1e9 else f"{x:.{digits}g}"


def amount(nbytes: float) -> str:
    """Return bytes in words.

    Example:
        >>> amount(1.5e6), amount(2.25e12)
        ('1.5 MB', '2,250 GB')
        >>> amount(999.7e6), amount(36.0)
        ('1 GB', '36 bytes')
    """
    mb = nbytes / 1e6
    if nbytes < 100:
        return f"{nbytes:.0f} bytes"
    return f"{mb:.3g} MB" if mb < 999.5 else f"{plain(mb / 1000)} GB"


class Table(NamedTuple):
    """Table of a title, a header and rows of text; columns are right-aligned unless listed in ``left``."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)

    def markdown(self) -> str:
        """Return the table as markdown, under a heading."""
        rule = ["---" if column in self.left else "---:" for column in range(len(self.header))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, ""])

    def show(self) -> None:
        """Print the table with rich, which knows the width of the terminal; as plain text if rich is missing."""
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.measure import Measurement
            from rich.table import Table as RichTable
        except ModuleNotFoundError:
            widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
            lines = ["  ".join(map(str.ljust, row, widths)) for row in (self.header, *self.rows)]
            print(self.title, *lines, sep="\n", flush=True)
            return
        console = Console()
        table = RichTable(title=self.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column, name in enumerate(self.header):
            table.add_column(name, justify="left" if column in self.left else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        whole_words = Measurement.get(console, console.options.update(width=sys.maxsize), table).minimum
        console.width = max(console.width, WIDTH, whole_words)
        console.print(table)
