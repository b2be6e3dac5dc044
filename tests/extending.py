"""The changes that docs/extending.md describes, made in a copy of the repository."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ["lightning_sparse", "lightning_sparse_cli", "tests", "configs", "docs", "examples"]
FILES = ["pyproject.toml", "conftest.py", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
BLOCK = re.compile(r"^(New file|In) `([^`\n]+)`(?:[^\n]+\n)*?[^\n]*:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Change(NamedTuple):
    """What the page says of one file."""

    path: str
    new: bool
    text: str
    """Of a new file all; of another one its hunks, with unchanged lines before what is added."""

    def make(self, root: Path) -> None:
        file = root / self.path
        assert file.exists() != self.new, self.path
        if self.new:
            file.write_text(self.text)
            return
        found = file.read_text()
        for hunk in self.text.split("@@\n"):
            lines = hunk.splitlines()
            assert all(line[:1] in ("", " ", "+") for line in lines), hunk
            before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
            assert found.count(before) == 1, f"{self.path} does not have once:\n{before}"
            found = found.replace(before, "".join(f"{line[1:]}\n" for line in lines))
        file.write_text(found)


def changes() -> dict[str, list[Change]]:
    """By the page's headings."""
    page = (ROOT / "docs" / "extending.md").read_text()
    sections = [section.partition("\n") for section in page.split("\n## ")[1:]]
    return {
        heading: [Change(path, how == "New file", text) for how, path, text in BLOCK.findall(body)]
        for heading, _, body in sections
    }


def copy(root: Path) -> Path:
    """What is needed to use and to test the package."""
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name)  # compiled files, too: they stay valid
    for name in FILES:
        shutil.copy2(ROOT / name, root / name)
    return root
