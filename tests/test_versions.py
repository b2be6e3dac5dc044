"""Which versions can be installed, and which are said to be tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_newer_pythons_are_not_refused(project: dict[str, Any]) -> None:
    allowed = SpecifierSet(project["requires-python"])
    assert [version for version in ("3.10", "3.11", "3.12.1", "3.13.0", "3.14") if version in allowed] == [
        "3.11",
        "3.12.1",
        "3.13.0",
        "3.14",
    ]


def test_newer_versions_of_dependencies_are_not_refused(project: dict[str, Any]) -> None:
    required = [*project["dependencies"], *project["optional-dependencies"]["lightning"]]
    allowed = {one.name: one.specifier for one in map(Requirement, required)}
    assert "2.14.0" in allowed["torch"] and "2.10.0" not in allowed["torch"]
    for name in ("pytorch-lightning", "lightning"):
        assert "2.7.0" in allowed[name] and "3.0.0" not in allowed[name]


def test_the_tested_versions_are_named(project: dict[str, Any]) -> None:
    said = (ROOT / "docs/guide/works-with.md").read_text().partition("## Software")[2].partition("\n## ")[0]
    [torch] = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert re.search(rf"^\| PyTorch \|.* {re.escape(torch)}\b", said, flags=re.MULTILINE)
    named = re.findall(r"Python :: (\d\.\d+)", " ".join(project["classifiers"]))
    assert all(version in said for version in named)
