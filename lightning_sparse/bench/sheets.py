"""Results in CSV files that grow while a comparison runs, so that nothing finished is done twice."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_type_hints

Row = TypeVar("Row", bound=tuple[Any, ...])


class Sheet(Generic[Row]):
    """A CSV file of named tuples whose fields are text, numbers or None.

    Args:
        path: of the file; made with its folder by the first :meth:`append`.
        row: class of the rows.

    Raises:
        ValueError: if the file exists and has other columns.
    """

    def __init__(self, path: Path, row: type[Row]) -> None:
        self.path, self.row = path, row
        self.columns: tuple[str, ...] = row._fields  # type: ignore[attr-defined]
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                header = next(csv.reader(file), None)
            if header is not None and tuple(header) != self.columns:
                raise ValueError(
                    f"Expected {path} to have the columns {', '.join(self.columns)} but got {', '.join(header)}. "
                    "Choose another folder."
                )

    def read(self) -> list[Row]:
        """Rows written so far; one that was cut off in the middle is left out."""
        if not self.path.exists():
            return []
        convert = {name: _converter(kind) for name, kind in get_type_hints(self.row).items()}
        with self.path.open(encoding="utf-8", newline="") as file:
            cells = [row for row in list(csv.reader(file))[1:] if len(row) == len(self.columns)]
        return [self.row(*(convert[name](cell) for name, cell in zip(self.columns, row, strict=True))) for row in cells]

    def append(self, rows: Iterable[Row]) -> None:
        """Write rows now, all in one piece."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists() or self.path.stat().st_size == 0
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([*([self.columns] if new else []), *rows])
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())


def _converter(kind: Any) -> Any:
    kinds = [one for one in get_args(kind) or (kind,) if one is not type(None)]
    assert len(kinds) == 1
    return lambda cell: None if cell == "" and get_args(kind) else kinds[0](cell)
