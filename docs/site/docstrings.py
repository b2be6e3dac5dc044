"""Docstrings in parts: summary, paragraphs, sections, arguments; and templates that are filled with them."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from roles import plain

SECTIONS = ("Formula", "Differs from the paper", "Args", "Returns", "Yields", "Raises", "Examples", "References")


class Docstring(NamedTuple):
    """What a docstring says."""

    summary: str
    body: str
    """Paragraphs between the summary and the sections."""
    sections: dict[str, str]
    """Text of each section."""

    @classmethod
    def of(cls, thing: Any) -> Docstring:
        """Read the docstring of a class or function."""
        parts = re.split(rf"^({'|'.join(SECTIONS)}):$\n", plain(inspect.getdoc(thing) or ""), flags=re.MULTILINE)
        summary, _, body = parts[0].partition("\n\n")
        sections = {name: textwrap.dedent(text).strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}
        return cls(" ".join(summary.split()), flowing(body), sections)

    def section(self, name: str) -> str:
        """Text of a section as flowing paragraphs; empty if there is none."""
        return flowing(self.sections.get(name, ""))

    @property
    def arguments(self) -> dict[str, str]:
        """What each argument means."""
        found = re.split(r"^(\w+): ", self.sections.get("Args", ""), flags=re.MULTILINE)
        return {name: " ".join(text.split()) for name, text in zip(found[1::2], found[2::2], strict=True)}


def flowing(text: str) -> str:
    """Paragraphs and items of lists, each on one line."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. ))", text.strip())
    lines = [" ".join(block.split()) for block in blocks if block.strip()]
    listed = [re.match(r"- |\d+\. ", line) is not None for line in lines]
    gaps = ["\n" if one and other else "\n\n" for one, other in pairwise(listed)]
    return "".join(line + gap for line, gap in zip(lines, [*gaps, ""], strict=False))


def cell(text: object) -> str:
    """Text in a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], right: int = 0) -> str:
    """A table in Markdown; its last ``right`` columns are numbers."""
    rule = ["---"] * (len(heads) - right) + ["---:"] * right
    return "\n".join(f"| {' | '.join(map(cell, row))} |" for row in [heads, rule, *rows])


def settings(thing: Any) -> str:
    """Table of a constructor's arguments with their defaults; empty if it has none."""
    told = Docstring.of(thing).arguments
    known = [one for one in inspect.signature(thing).parameters.values() if one.name in told]
    rows = [
        (f"`{one.name}`", "" if one.default is one.empty else f"`{one.default!r}`", told[one.name]) for one in known
    ]
    return table(("setting", "default", "meaning"), rows) if rows else ""


def fill(template: str, **values: Any) -> str:
    """Fill a template of this folder."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    text = environment.get_template(template).render(**values)
    text = re.sub(r"`docs/(reports|reference)/([\w-]+)\.md`", r"[\2](../\1/\2.md)", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
