"""Pages that messages name can be read where they say, in a clone and where the package is installed."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sparse.core import console

ROOT = Path(__file__).parents[2]
FILES = [*ROOT.glob("lightning_sparse/**/*.py"), *ROOT.glob("lightning_sparse_cli/*.py")]


@functools.cache
def everything() -> list[ast.AST]:
    return [node for file in FILES for node in ast.walk(ast.parse(file.read_text()))]


def nodes(kind: type) -> list[Any]:
    return [node for node in everything() if isinstance(node, kind)]


def named() -> list[str]:
    """The pages that messages name."""
    calls = (call for call in nodes(ast.Call) if isinstance(call.func, ast.Name) and call.func.id == "page")
    return sorted({ast.literal_eval(call.args[0]) for call in calls})


def test_messages_name_pages_by_where_they_are() -> None:
    assert "guide/optimizers" in named()
    for name in named():
        assert Path(console.page(name)).is_file()
        assert console.page(name) == str(ROOT / "docs" / f"{name}.md")
    told = {id(node.value) for node in nodes(ast.Expr)}  # docstrings
    texts = [node.value for node in nodes(ast.Constant) if isinstance(node.value, str) and id(node) not in told]
    assert not [text for text in texts if re.search(r"docs/[\w-]+\.md|README", text)]


def test_a_wheel_has_these_pages_and_messages_name_them_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())  # type: ignore[arg-type]  # it builds in a place apart
    interface = SimpleNamespace(BuildHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)  # type: ignore[arg-type]
    added = run_path(str(ROOT / "hatch_build.py"))["pages"](ROOT)
    assert {f"lightning_sparse/docs/{name}.md" for name in named()} <= set(added.values())
    for source, target in added.items():
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / target)
    (tmp_path / "lightning_sparse" / "core").mkdir()
    shutil.copy(str(console.__file__), tmp_path / "lightning_sparse" / "core")
    installed = run_path(str(tmp_path / "lightning_sparse/core/console.py"))
    for name in named():
        assert Path(installed["page"](name)).is_relative_to(tmp_path)
        assert Path(installed["page"](name)).read_text() == (ROOT / "docs" / f"{name}.md").read_text()


def test_tables_break_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    header, row = [f"quantity_{i}" for i in range(12)], ["hard_threshold", *[f"{i}.000_000_000" for i in range(11)]]
    console.Table("Many columns", header, [row]).show()
    said = capsys.readouterr().out
    assert all(word in said for word in (*header, *row))
