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
        wanted, (found, end, _) = ",".join(self.columns), self._bytes().decode(errors="replace").partition("\n")
        if found.rstrip("\r") != wanted if end else not wanted.startswith(found):
            raise ValueError(
                f"Expected {path} to have the columns {', '.join(self.columns)} but its first line is {found!r}. "
                "Choose another folder."
            )

    def read(self) -> list[Row]:
        """Rows written so far; one that was cut off is left out.

        Raises:
            ValueError: if something is no number where one should be.
        """
        convert = {name: _converter(kind) for name, kind in get_type_hints(self.row).items()}
        rows = []
        for cells in list(csv.reader(io.StringIO(self._whole().decode(errors="replace"), newline="")))[1:]:
            if len(cells) != len(self.columns):
                continue
            try:
                rows.append(self.row(*(convert[name](cell) for name, cell in zip(self.columns, cells, strict=True))))
            except ValueError as error:
                raise ValueError(
                    f"Expected numbers in {self.path} but got the line {','.join(cells)!r}. Remove it, or choose "
                    "another folder."
                ) from error
        return rows

    def append(self, rows: Iterable[Row]) -> None:
        """Write rows now, all in one piece, after the last line that was not cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._whole()
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*([] if whole else [self.columns]), *rows])
        with self.path.open("ab") as file:
            file.truncate(len(whole))
            file.write(text.getvalue().encode())

    def _bytes(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _whole(self) -> bytes:
        """What was written without a last line that an interrupted run did not finish."""
        written = self._bytes()
        return written[: written.rfind(b"\n") + 1]


def _converter(kind: Any) -> Any:
    kinds = [one for one in get_args(kind) or (kind,) if one is not type(None)]
    assert len(kinds) == 1
    return lambda cell: None if cell == "" and get_args(kind) else kinds[0](cell)
