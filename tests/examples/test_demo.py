"""What the demo shows of its runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.tools.report.runs import read_runs
from tests.tools.report.made_up import rows, write_csv

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    for needed in ("matplotlib", "plotly", "rich", "sklearn", "jsonargparse"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("demo")


def test_dense_stands_beside_sparse_against_megabytes(demo: Any, tmp_path: Path) -> None:
    folders = []
    for name in ("dense", "top_k"):
        logged = [row | {"step_ms": 5.0} for row in rows(sparsifier=name)]
        folders.append(write_csv(tmp_path / name, logged))
    runs = read_runs(folders, ["dense DDP", "Top-k"])
    table = demo.table(runs)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["dense DDP", "Top-k"]
    assert cells[2:] == [["96.8%"] * 2, ["75.00", "1.72"], ["1", "43"], ["-", cells[5][1]], ["5.0", "5.0"]]
    demo.plot(runs, tmp_path / "demo.svg")
    picture = (tmp_path / "demo.svg").read_text()
    for text in ("train/loss against MB", "val/accuracy against MB", ">dense DDP<", ">Top-k<"):
        assert text in picture
