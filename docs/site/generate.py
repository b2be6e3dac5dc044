"""Write the generated pages: python docs/site/generate.py, or some: python docs/site/generate.py reports/speed.

Methods and reference come from the library's registries, docstrings and dataclasses; reports from files in
`benchmarks/results`. The pages are committed, and a test compares them with what this writes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import methods_pages as methods  # noqa: E402
import reference_pages as reference  # noqa: E402
import report_pages as reports  # noqa: E402

DOCS = Path(__file__).parents[1]
FOLDERS = ("methods", "reference", "reports")
BEHIND = "---\nsearch: {boost: 0.5}\n---\n\n"
"""Lets the site's search find guides first."""
MADE = (".md", ".csv")
"""Endings of files that nothing else puts into these folders."""


def pages(folders: Sequence[str] = FOLDERS) -> dict[str, str]:
    """Text of every generated file of some folders by its path below docs/."""
    known = reports.read()
    makers = {
        "methods": lambda: methods.pages(known),
        "reference": reference.pages,
        "reports": lambda: reports.pages(known),
    }
    made = {path: text for folder in folders for path, text in makers[folder]().items()}
    return {path: BEHIND + text if path.endswith(".md") else text for path, text in made.items()}


def write(files: Mapping[str, str], only: Sequence[str] = ()) -> None:
    """Write what has changed, where a path begins with one of these; if none are given, remove what is not made."""
    for path, text in files.items():
        if only and not path.startswith(tuple(only)):
            continue
        file = DOCS / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
    for folder in () if only else FOLDERS:
        for file in (DOCS / folder).rglob("*"):
            if file.suffix in MADE and file.relative_to(DOCS).as_posix() not in files:
                file.unlink()


if __name__ == "__main__":
    write(pages(), sys.argv[1:])
