"""Pages of reports, from the files of benchmarks/results/reports: a box, and tables as they were measured."""

from __future__ import annotations

import csv
import io
import re
import tomllib
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from docstrings import fill, table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LONGEST = 30
"""Rows of a table that a page shows; longer ones are CSV."""
BOX = ("question", "answer", "date", "commit", "machine", "valid", "command")
"""What the box at the head of a report says."""
ALIASES = {"ours": "UnionTopK", "Top-k": "TopK", "AdamW, dense": "Everything", "dense": "Everything"}
"""Names of methods in reports that are no names of the library."""


class Table(NamedTuple):
    """A table of a report."""

    title: str
    rows: list[list[str]]
    """The first one has the heads."""
    about: dict[str, Any]

    @property
    def anchor(self) -> str:
        """Of its heading."""
        return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", self.title).strip().lower())

    @property
    def right(self) -> int:
        """Number of its columns with numbers."""
        return len(self.rows[0]) - self.about.get("words", 1)


class Report(NamedTuple):
    """A report: what its box says, and its tables."""

    name: str
    about: dict[str, Any]
    tables: list[Table]

    @property
    def box(self) -> str:
        """Table at the head of the page."""
        about = {key: self.about[key] for key in BOX}
        valid = "yes" if about["valid"] else f"no: {self.about['why']}"
        return table(
            ("", ""),
            [
                ("**Question**", about["question"]),
                ("**Answer**", about["answer"]),
                ("**Measured**", f"{about['date']}, commit {about['commit']}"),
                ("**Machine**", about["machine"]),
                ("**Valid for the present code**", valid),
                ("**Command**", f"`{about['command']}`"),
            ],
        )

    def rows_of(self, names: Collection[str]) -> list[str]:
        """The rows of a method, as tables below a link to where they stand."""
        found = []
        for one in self.tables:
            if not one.about.get("methods"):
                continue
            rows = [row for row in one.rows[1:] if _method(row[0]) in names]
            if rows:
                where = f"**[{self.about['title']}: {one.title}](../reports/{self.name}.md#{one.anchor})**"
                stale = "" if self.about["valid"] else " (an earlier version)"
                found.append(f"{where}{stale}\n\n{table(one.rows[0], rows, one.right)}")
        return found


def _method(first: str) -> str:
    name = re.sub(r",? [\d.]+(, residual)?$", "", re.split(r"[+(]", first.replace("*", "").replace("`", ""))[0].strip())
    return ALIASES.get(name, name)


def read() -> dict[str, Report]:
    """All reports by name."""
    found = {}
    for file in sorted((RESULTS / "reports").glob("*.toml")):
        about = tomllib.loads(file.read_text(encoding="utf-8"))
        tables = [Table(one["title"], _rows(one), one) for one in about.pop("table", [])]
        if "program" in about:  # which makes the page, and tables by name
            program = import_module(about["program"])
            results = program.Results()
            about |= {"page": program.page(results, file.stem), "tables": program.tables(results, file.stem)}
            tables = [
                Table(title, parsed(about["tables"][name]), {"methods": True})
                for name, title in program.ENDS.items()
                if name in about["tables"]
            ]
        found[file.stem] = Report(file.stem, about, tables)
    return found


def parsed(markdown: str) -> list[list[str]]:
    """Cells of a table in Markdown."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in markdown.splitlines()]
    return [[one.strip() for one in line] for line in [lines[0], *lines[2:]]]


def _rows(one: Mapping[str, Any]) -> list[list[str]]:
    if "file" not in one:  # a figure
        return [["", ""]]
    with (RESULTS / "reports" / one["file"]).open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def _shown(report: Report, one: Table) -> dict[str, Any]:
    values: dict[str, Any] = {"title": one.title, "table": "", "csv": "", "text": "", "after": "", "figure": ""}
    values |= {key: one.about[key].strip() for key in ("text", "after", "figure") if key in one.about}
    if "file" in one.about:
        rows = one.rows[1:]
        if "show" in one.about or len(rows) > LONGEST:
            values["csv"] = one.about["file"]
            rows = rows[: one.about.get("show", 10)]
        values["table"] = table(one.rows[0], rows, one.right)
        values["length"] = len(one.rows) - 1
    return values


def pages(reports: Mapping[str, Report]) -> dict[str, str]:
    """All pages of reports, and the tables that are too long for them, by path."""
    found = {}
    for name, report in reports.items():
        if "page" in report.about:
            text = report.about["page"].replace("<!-- box -->", report.box)
            for one in re.findall(r"<!-- csv (.+?) -->", text):
                file = f"{name}-{one.replace(' ', '-')}.csv"
                text = text.replace(f"<!-- csv {one} -->", f"[{one}]({file})")
                found[f"reports/{file}"] = as_csv(parsed(report.about["tables"][one]))
            found[f"reports/{name}.md"] = text
            continue
        shown = [_shown(report, one) for one in report.tables]
        values = {"about": {"text": "", **report.about}, "box": report.box, "tables": shown}
        found[f"reports/{name}.md"] = fill("report.md.j2", **values)
        for one, values in zip(report.tables, shown, strict=True):
            if values["csv"]:
                found[f"reports/{values['csv']}"] = as_csv(one.rows)
    rows = [
        (
            f"[{one.about['title']}]({name}.md)",
            one.about["question"],
            one.about["answer"],
            "yes" if one.about["valid"] else "no",
        )
        for name, one in sorted(reports.items(), key=lambda item: (not item[1].about["valid"], item[0]))
    ]
    found["reports/index.md"] = fill("reports.md.j2", listed=table(("report", "question", "answer", "valid"), rows))
    return found


def as_csv(rows: list[list[str]]) -> str:
    """Text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
