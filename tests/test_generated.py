"""Generated pages: methods, reference and reports are what docs/site/generate.py writes, and complete."""

from __future__ import annotations

import csv
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import lightning_sparse as ls
from lightning_sparse.integrations.base import StrategyArguments
from lightning_sparse.integrations.hsdp import HSDPArguments
from lightning_sparse.memories import SecondMoment
from lightning_sparse.tools.traffic import count_bytes
from tests.covering import by_default

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SPARSIFIERS = dict(ls.sparsifiers.SPARSIFIERS.items())
REPORTS = sorted(path.stem for path in (ROOT / "benchmarks/results/reports").glob("*.toml"))


@pytest.fixture(scope="module")
def site() -> Iterator[ModuleType]:
    """The generator, whose modules lie beside it."""
    pytest.importorskip("griffe")
    known, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(DOCS / "site"))
    import generate  # type: ignore[import-not-found]

    yield generate
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == DOCS / "site":
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("folder", by_default(["reports", "reference", "methods"], 2))  # bytes of methods take seconds
def test_pages_are_those_that_the_generator_writes(site: ModuleType, folder: str) -> None:
    made = site.pages([folder])
    for path, text in made.items():
        file = DOCS / path
        assert file.is_file() and file.read_text() == text, f"run python docs/site/generate.py: {path}"
    kept = {path.relative_to(DOCS).as_posix() for path in (DOCS / folder).rglob("*")}
    assert {path for path in kept if Path(path).suffix in site.MADE} <= made.keys()


def test_every_name_of_a_registry_has_a_page() -> None:
    for name, cls in SPARSIFIERS.items():
        page = (DOCS / "methods" / ("sidco.md" if name.startswith("sidco") else f"{name}.md")).read_text()
        assert f'`"{name}"`' in page and f"`{cls.__name__}`" in page
        for part in ("## At a glance", "## Bytes", ".svg)", "update"):
            assert part in page, (name, part)
        own = ls.sparsifiers.SPARSIFIERS.resolve(name)
        for setting in fields(own):  # type: ignore[arg-type]
            assert f"| `{setting.name}` |" in page, (name, setting.name)
    for kind, registry in (
        ("exchanges", ls.exchanges.EXCHANGES),
        ("memories", ls.memories.MEMORIES),
        ("groupings", ls.grouping.GROUPINGS),
    ):
        for name, cls in registry.items():
            assert f'## {cls.__name__}\n\nName: `"{name}"`.' in (DOCS / "methods" / f"{kind}.md").read_text()


@pytest.mark.parametrize("name", [name for name in SPARSIFIERS if name not in ("sidco_gp", "sidco_p")])
def test_methods_of_papers_say_what_differs_and_whom_to_cite(name: str) -> None:
    page = (DOCS / "methods" / f"{name.removesuffix('_e') if name.startswith('sidco') else name}.md").read_text()
    ours = {"union_top_k", "mean_top_k", "shared_top_k", "striped_top_k", "everything"}
    assert ("## Differs from the paper" in page) == (name not in ours)
    assert "## Citation" in page or name == "everything"


@pytest.mark.parametrize("name", ["union_top_k", "top_k", "clt_k", "gtop_k", "everything"])
def test_bytes_are_those_that_are_counted(name: str) -> None:
    page = (DOCS / "methods" / f"{name}.md").read_text()
    rows = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in page.splitlines() if " | " in line)}
    assert rows["kB a step"] == ["n = 4", "n = 8", "n = 64"]
    for n, shown in zip((4, 8, 64), rows["SGD"], strict=True):
        assert shown == f"{count_bytes(name, 1_000_000, n, 0.01).bytes_sent / 1000:,.1f}"
    if SPARSIFIERS[name].is_its_exchange:
        assert "Adam, AdamW" in rows and rows["Adam, AdamW"][0].startswith("refused")
        return
    config = ls.engine.config.SparsificationConfig(sparsifier=name, memory=SecondMoment())
    sent = count_bytes(name, 1_000_000, 8, 0.01, memory=SecondMoment(), exchange=config.exchange_in_use).bytes_sent
    assert f"{sent / 1000:,.1f}" in rows["Adam, AdamW"]


def test_no_page_of_the_reference_lists_a_private_member() -> None:
    directives = re.findall(r"^::: ([\w.]+)", (DOCS / "reference/api.md").read_text(), flags=re.MULTILINE)
    assert len(directives) > 60
    assert not [path for path in directives if any(part.startswith("_") for part in path.split("."))]
    for page in [*(DOCS / "reference").glob("*.md"), *(DOCS / "methods").glob("*.md")]:
        text = page.read_text()
        listed = re.findall(r"^\| `([\w/<>.-]+)`", text, flags=re.MULTILINE)
        listed += re.findall(r"^#+ `?([\w.]+)", text, flags=re.MULTILINE)
        assert not [name for name in listed if name.startswith("_")], page
        assert not re.findall(r"`[A-Z]\w+\._\w+", text), page


def test_settings_have_all_keywords_of_the_strategies() -> None:
    page = (DOCS / "reference/settings.md").read_text()
    headings = set(re.findall(r"^### (\w+)$", page, flags=re.MULTILINE))
    for cls in (StrategyArguments, HSDPArguments, ls.Rules, ls.Watch):
        assert {field.name for field in fields(cls)} <= headings
    known = inspect.signature(ls.attach).parameters.values()
    assert {one.name for one in known if one.kind is one.KEYWORD_ONLY} <= headings


def test_options_are_those_of_the_command() -> None:
    from lightning_sparse_cli import COMMANDS
    from lightning_sparse_cli.options import OPTIONS

    page = (DOCS / "reference/command-line.md").read_text()
    assert re.findall(r"^## lightning-sparse (\w+)$", page, flags=re.MULTILINE) == list(COMMANDS)
    named = set(re.findall(r"^\| `(?:--)?(\w+)` \|", page, flags=re.MULTILINE))
    assert named == set(OPTIONS)


@pytest.mark.parametrize("name", REPORTS)
def test_the_box_of_a_report_is_complete(name: str) -> None:
    page = (DOCS / "reports" / f"{name}.md").read_text()
    head = page.split("\n\n")[2]
    rows = dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", head, flags=re.MULTILINE))
    assert list(rows) == ["Question", "Answer", "Measured", "Machine", "Valid for the present code", "Command"]
    assert rows["Question"].endswith("?")
    assert re.match(r"2026-\d\d-\d\d", rows["Measured"])
    assert re.search(r"commit \w{7}", rows["Measured"])
    assert rows["Valid for the present code"] == "yes" or rows["Valid for the present code"].startswith("no: ")


def test_every_kept_table_is_in_a_report() -> None:
    folder = ROOT / "benchmarks/results/reports"
    named = re.findall(r'^file = "(.+)"$', "\n".join(path.read_text() for path in folder.glob("*.toml")), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in folder.glob("*.csv"))
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            lengths = {len(row) for row in csv.reader(file)}
        assert len(lengths) == 1, path


def test_papers_are_cited_where_the_citation_of_the_software_is() -> None:
    listed = tomllib.loads((DOCS / "site/papers.toml").read_text())["paper"]
    references = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    page = (DOCS / "methods/index.md").read_text()
    assert page.count("\n@") == 1 + len(listed) == 1 + len(references)
    for one, cited in zip(listed, references, strict=True):
        name, *_ = one["paper"].split(", ")
        assert name.startswith(cited["abbreviation"])
        assert re.findall(r"arXiv (\S+)", one["paper"]) == re.findall(r"arxiv.org/abs/(\S+)", cited.get("url", ""))
        assert str(cited["year"]) in one["paper"] or cited["abbreviation"] in ("LAGS-SGD", "GaussianK-SGD")
        for author in cited["authors"]:
            assert f"{author['family-names']}, {author['given-names']}" in page
    for name in SPARSIFIERS:
        text = (DOCS / "methods" / ("sidco.md" if name.startswith("sidco") else f"{name}.md")).read_text()
        for number in re.findall(r"arXiv ([\d.]+\d)", text.partition("## Citation")[2]):
            assert f"arxiv.org/abs/{number}" in page, (name, number)


def test_systems_of_papers_name_what_exists(site: ModuleType) -> None:
    from methods_pages import papers  # type: ignore[import-not-found]

    every: list[dict[str, Any]] = papers()
    assert len(every) > 10
    for one in every:
        [test] = re.findall(r"^`(tests/[\w/]+\.py)`", one["test"])
        assert (ROOT / test).is_file(), test
        for key in ("published", "corrected"):
            for call, given in re.findall(r"(\w+)\(([^)]*)\)", one[key]):
                families = (ls.sparsifiers, ls.grouping, ls.tuning)
                cls = next(getattr(family, call) for family in families if hasattr(family, call))
                for setting in re.findall(r'(\w+)="published"', given):
                    assert setting in cls.__dataclass_fields__, one
