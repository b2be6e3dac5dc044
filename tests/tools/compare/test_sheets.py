"""CSV files of results: what goes in comes out, whatever an interruption left behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_sparse.tools.compare.sheets import Sheet


class Line(NamedTuple):
    name: str
    ranks: int
    loss: float
    step: int | None


LINES = [Line("top_k", 4, 0.1 + 0.2, 3), Line('a, "b"', 8, 1e-300, None), Line("ünion", 16, float("inf"), 0)]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    sheet = Sheet(tmp_path / "new" / "folder" / "x.csv", Line)
    assert sheet.read() == []
    sheet.append(LINES[:1])
    sheet.append(LINES[1:])
    assert sheet.read() == Sheet(sheet.path, Line).read() == LINES
    assert sheet.path.read_text(encoding="utf-8").splitlines()[:2] == [
        "name,ranks,loss,step",
        "top_k,4,0.30000000000000004,3",
    ]


def test_a_loss_that_is_no_number_comes_back_as_such(tmp_path: Path) -> None:
    sheet = Sheet(tmp_path / "x.csv", Line)
    sheet.append([Line("top_k", 4, float("nan"), None)])
    assert math.isnan(sheet.read()[0].loss)


def test_a_file_that_was_cut_off_anywhere_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    Sheet(path, Line).append(LINES)
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        sheet = Sheet(path, Line)
        left = max(0, whole[:end].count(b"\n") - 1)
        assert sheet.read() == LINES[:left], whole[:end]
        sheet.append(LINES[left:])
        assert path.read_bytes() == whole, whole[:end]


def test_nothing_to_append_still_says_which_columns_there_are(tmp_path: Path) -> None:
    sheet = Sheet(tmp_path / "x.csv", Line)
    sheet.append([])
    assert sheet.path.read_text() == "name,ranks,loss,step\n"
    assert sheet.read() == []


def test_files_from_editors_with_other_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"name,ranks,loss,step\r\ntop_k,4,0.5,\r\n")
    assert Sheet(path, Line).read() == [Line("top_k", 4, 0.5, None)]


@pytest.mark.parametrize("content", ["name,ranks\nx,1\n", "my shopping list", "\n", "name,ranks,loss,steps"])
def test_other_files_are_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"x\.csv to have the columns name, ranks, loss, step, but its first line is"):
        Sheet(path, Line)
    assert path.read_text() == content


def test_what_is_no_number_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("name,ranks,loss,step\ntop_k,four,0.5,1\n")
    with pytest.raises(ValueError, match=r"Expected numbers in .*x\.csv, but got the line 'top_k,four,0\.5,1'\."):
        Sheet(path, Line).read()
