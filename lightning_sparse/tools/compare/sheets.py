"""Results in CSV files that grow while a comparison runs, so that finished jobs are not repeated."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

Row = TypeVar("Row", bound=tuple[Any, ...])
READ: dict[Any, Callable[[str], Any]] = {int | None: lambda cell: int(cell) if cell else None}
"""Readers of cells whose type is no function of the text."""


class Sheet(Generic[Row]):
    """A CSV file of named tuples of text and numbers.

    Args:
        path: of the file; made with its folder by the first :meth:`append`.
        row: class of the rows; its fields are the columns.

    Raises:
        ValueError: if the file exists and has other columns.
    """

    def __init__(self, path: Path, row: type[Row]) -> None:
        self.path, self.row = path, row
        kinds = get_type_hints(row)
        self.header, self.readers = ",".join(kinds), [READ.get(kind, kind) for kind in kinds.values()]
        found, end, _ = self._bytes().decode(errors="replace").partition("\n")
        if found.rstrip("\r") != self.header if end else not self.header.startswith(found):
            raise ValueError(
                f"Expected {path} to have the columns {', '.join(kinds)}, but its first line is {found!r}. "
                "Choose another folder."
            )

    def read(self) -> list[Row]:
        """Read the rows so far, without one that was cut off.

        Raises:
            ValueError: if a cell is not the expected number.
        """
        rows = []
        for cells in list(csv.reader(io.StringIO(self._whole().decode(errors="replace"), newline="")))[1:]:
            try:
                if len(cells) == len(self.readers):
                    rows.append(self.row(*(read(cell) for read, cell in zip(self.readers, cells, strict=True))))
            except ValueError as error:
                raise ValueError(
                    f"Expected numbers in {self.path}, but got the line {','.join(cells)!r}. Remove it, or choose "
                    "another folder."
                ) from error
        return rows

    def append(self, rows: Iterable[Row]) -> None:
        """Write rows now, all in one piece, after the last line that was not cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole, text = self._whole(), io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        with self.path.open("ab") as file:
            file.truncate(len(whole))
            file.write((("" if whole else f"{self.header}\n") + text.getvalue()).encode())

    def _bytes(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _whole(self) -> bytes:
        """Return the content without an unfinished last line of an interrupted run."""
        written = self._bytes()
        return written[: written.rfind(b"\n") + 1]
