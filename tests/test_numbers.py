"""Figures of README and guides: each stands in docs/numbers.yaml, with its page or its place in the code."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_sparse as ls

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = ["README.md", "docs/index.md", *sorted(p.relative_to(ROOT).as_posix() for p in DOCS.glob("guide/*.md"))]
NUMBERS: dict[str, list[dict[str, Any]]] = yaml.safe_load((DOCS / "numbers.yaml").read_text())
FIGURE = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?!\.x)(?![\w-]*[A-Za-z])")
"""Not those in names, such as float32, 16-bit and ResNet-18."""
PLACES = {"methods", "reference", "reports"}
"""Folders of generated pages."""


def prose(page: str) -> str:
    """A page without code, comments, targets of links and the numbers of lists."""
    text = (ROOT / page).read_text()
    for kind in (r"```.*?^```", r"<!--.*?-->", r"`[^`\n]*`", r"(?<=\])\([^)\s]*\)", r"^\d+\. "):
        text = re.sub(kind, " ", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"[*\s]+", " ", text)


def phrase(entry: dict[str, Any]) -> str:
    """How guides write it."""
    return f"{entry['value']} {entry.get('unit', '')}".strip()


def pattern(entry: dict[str, Any]) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.-]){re.escape(phrase(entry))}(?!\w)")


KINDS = ("measured", "conditions", "calculated", "constants", "versions")
ENTRIES = [entry for kind in KINDS for entry in NUMBERS[kind]]


@pytest.mark.parametrize("page", GUIDES)
def test_every_figure_stands_in_the_list(page: str) -> None:
    text = prose(page)
    for entry in sorted(ENTRIES, key=lambda entry: -len(phrase(entry))):
        text = pattern(entry).sub(" ", text)
    left = [text[max(0, found.start() - 40) : found.end() + 40] for found in FIGURE.finditer(text)]
    assert not left, "These are not in docs/numbers.yaml."


def test_no_entry_is_left_over() -> None:
    pages = " ".join(map(prose, GUIDES))
    assert len({phrase(entry) for entry in ENTRIES}) == len(ENTRIES)
    assert not [phrase(entry) for entry in ENTRIES if not pattern(entry).search(pages)]


@pytest.mark.parametrize("entry", NUMBERS["measured"], ids=phrase)
def test_measured_figures_come_from_a_report_of_the_present_code(entry: dict[str, Any]) -> None:
    assert entry["what"]
    source = DOCS / entry["source"]
    if source.parent.name in PLACES and not source.parent.exists():
        pytest.skip("the generated pages are not there")
    assert source.is_file()
    valid = re.search(r"valid for the present code\W+(\w+)", source.read_text(), flags=re.IGNORECASE)
    if valid:  # the box of a report
        assert valid[1].lower() == "yes" or entry.get("said") == "earlier", entry["source"]


def test_figures_of_earlier_versions_are_said_to_be_so() -> None:
    """Where a report's box says no, the guide that quotes it says so, too."""
    for page in GUIDES:
        text = prose(page)
        if any(entry.get("said") == "earlier" and pattern(entry).search(text) for entry in NUMBERS["measured"]):
            assert "earlier version" in text, page


@pytest.mark.parametrize("entry", NUMBERS["calculated"], ids=phrase)
def test_calculated_figures_are_what_the_formula_gives(entry: dict[str, Any]) -> None:
    given = eval(entry["formula"], {"__builtins__": {}})
    digits = len(str(entry["value"]).partition(".")[2])
    assert f"{given:.{digits}f}" == str(entry["value"])


@pytest.mark.parametrize("entry", NUMBERS["constants"], ids=phrase)
def test_constants_are_those_of_the_code(entry: dict[str, Any]) -> None:
    given = eval(str(entry["code"]), {"ls": ls, "of": importlib.import_module, "inspect": inspect})
    assert float(given) == pytest.approx(float(entry["value"]))


@pytest.mark.parametrize("entry", NUMBERS["versions"], ids=phrase)
def test_versions_are_those_of_a_file(entry: dict[str, Any]) -> None:
    assert entry.get("tested") or entry["line"] in (ROOT / entry["file"]).read_text()
