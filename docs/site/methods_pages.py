"""Pages of methods, from the registries."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from docstrings import Docstring, fill, settings, table
from report_pages import Report
from step_figure import figure

from lightning_sparse.density import Constant, Warmup
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.exchanges import EXCHANGES
from lightning_sparse.grouping import GROUPINGS, Rules
from lightning_sparse.memories import MEMORIES, SecondMoment
from lightning_sparse.sparsifiers import SPARSIFIERS, Sparsifier
from lightning_sparse.tools.traffic import count_bytes
from lightning_sparse.tuning import HiddenDensity

NUMEL, DENSITY, RANKS = 1_000_000, 0.01, (4, 8, 64)
TOGETHER = {"sidco_e": "sidco", "sidco_gp": "sidco", "sidco_p": "sidco"}
"""Names that share a page."""
TITLES = {"sidco": "SIDCo"}
KINDS = {
    "exchanges": ("Exchanges", "An exchange turns the selections of all ranks into one update.", EXCHANGES),
    "memories": ("Memories", "A memory is the rule of error feedback: what becomes of values that wait.", MEMORIES),
    "groupings": ("Groupings", "A grouping cuts the parameters into the vectors that are selected from.", GROUPINGS),
}


def exchange_with_adam(name: str) -> str | None:
    """Name of the exchange that the engine takes with AdamW; None if the sparsifier is refused there."""
    if dict(SPARSIFIERS.items())[name].is_its_exchange:
        return None
    return EXCHANGES.name_of(SparsificationConfig(sparsifier=name, memory=SecondMoment()).exchange_in_use)


def kilobytes(name: str, ranks: int, *, adam: bool = False) -> float:
    """KB that a rank sends in a step of a group of a million coordinates, on CUDA."""
    given: dict[str, Any] = {"memory": SecondMoment(), "exchange": exchange_with_adam(name)} if adam else {}
    return count_bytes(name, NUMEL, ranks, DENSITY, **given).bytes_sent / 1000


def page_of(name: str) -> str:
    """Name of a sparsifier's page, without its folder and ending."""
    return TOGETHER.get(name, name)


def link(exchange: str) -> str:
    """To the section of an exchange."""
    return f"[`{exchange}`](exchanges.md#{exchange.replace('_', '')})"


def _bytes(name: str) -> str:
    adam = exchange_with_adam(name)
    rows = [["SGD", *(f"{kilobytes(name, n):,.1f}" for n in RANKS)]]
    if adam:
        rows.append(["Adam, AdamW", *(f"{kilobytes(name, n, adam=True):,.1f}" for n in RANKS)])
    rows.append(["plain DDP", *(f"{kilobytes('everything', n):,.1f}" for n in RANKS)])
    return table(("kB a step", *(f"n = {n}" for n in RANKS)), rows, len(RANKS))


def _with_adam(name: str, cls: type[Sparsifier]) -> str:
    adam = exchange_with_adam(name)
    if adam is None:
        return "refused: the exchange is the method, and cannot carry second moments"
    return "yes" if adam == cls.exchange else f"yes, exchanged by {link(adam)} in place of {link(cls.exchange)}"


def _averaged(name: str, cls: type[Sparsifier]) -> str:
    adam = exchange_with_adam(name)
    rest = {None: "AdamW is refused", cls.exchange: "with AdamW, too"}.get(adam, f"with AdamW by {link(adam or '')}")
    return f"Values are averaged by {link(cls.exchange)}; {rest}."


def _member(name: str, cls: type[Sparsifier]) -> dict[str, Any]:
    return {
        "name": name,
        "cls": cls.__name__,
        "doc": Docstring.of(cls),
        "exchange": link(cls.exchange),
        "adam": _with_adam(name, cls),
        "averaged": _averaged(name, cls),
        "settings": settings(cls),
        "bytes": _bytes(name),
        "agreement": cls.agreement.value,
    }


def _glance(members: list[dict[str, Any]]) -> str:
    lines = {"selections of different ranks": "agreement", "exchange": "exchange", "Adam, AdamW": "adam"}
    rows = [("name", *(f'`"{one["name"]}"`' for one in members))]
    rows += [(line, *(one[key] for one in members)) for line, key in lines.items()]
    return table(("", *(f"`{one['cls']}`" for one in members)), rows)


def _entry(name: str, cls: type) -> dict[str, Any]:
    return {"name": name, "cls": cls.__name__, "doc": Docstring.of(cls), "settings": settings(cls)}


def papers() -> list[dict[str, str]]:
    """Systems of the papers that the library began with."""
    return tomllib.loads((Path(__file__).parent / "papers.toml").read_text(encoding="utf-8"))["paper"]


def bibtex(one: Mapping[str, Any]) -> str:
    """Entry of the project or of a paper, by what CITATION.cff says of it."""
    who = [author.get("name") or f"{author['family-names']}, {author['given-names']}" for author in one["authors"]]
    lines = {"title": f"{{{one['title']}}}", "author": " and ".join(f"{{{x}}}" if "," not in x else x for x in who)}
    kind = {"conference-paper": "inproceedings", "article": "article"}.get(one["type"], "software")
    if "conference" in one:
        lines["booktitle"] = one["conference"]["name"]
    lines |= {name: one[name] for name in ("journal", "volume", "version", "year", "url") if name in one}
    name = re.sub(r"\W", "", one.get("abbreviation", one["title"])).lower() + str(one.get("year", ""))
    return "\n".join([f"@{kind}{{{name},", *(f"  {key} = {{{value}}}," for key, value in lines.items()), "}"])


def pages(reports: Mapping[str, Report]) -> dict[str, str]:
    """All pages and figures of methods by path."""
    every = dict(SPARSIFIERS.items())
    found: dict[str, str] = {}
    for page in dict.fromkeys(page_of(name) for name in every):
        members = [_member(name, every[name]) for name in every if page_of(name) == page]
        names = {one[key] for one in members for key in ("name", "cls")}
        results = [line for report in reports.values() for line in report.rows_of(names)]
        title = TITLES.get(page, members[0]["cls"])
        values = {"title": title, "page": page, "members": members, "results": results, "glance": _glance(members)}
        found[f"methods/{page}.md"] = fill("method.md.j2", **values, numel=NUMEL, density=DENSITY)
        found[f"methods/{page}.svg"] = figure(title, every[members[0]["name"]]())
    for page, (title, lead, registry) in KINDS.items():
        classes = dict(registry.items()) | ({"Rules": Rules} if page == "groupings" else {})
        entries = [_entry(name, cls) for name, cls in classes.items()]
        found[f"methods/{page}.md"] = fill("kind.md.j2", title=title, lead=lead, entries=entries)
    entries = [_entry("", cls) for cls in (Constant, Warmup, HiddenDensity)]
    lead = "A density is a number in (0, 1], or a schedule: a function of the step."
    found["methods/densities.md"] = fill("kind.md.j2", title="Densities", lead=lead, entries=entries)
    overview = [
        (
            f"[`{cls.__name__}`]({page_of(name)}.md)",
            Docstring.of(cls).summary,
            link(cls.exchange),
            "no" if exchange_with_adam(name) is None else "yes",
            *(f"{kilobytes(name, n):,.0f}" for n in RANKS),
        )
        for name, cls in every.items()
    ]
    heads = ("sparsifier", "what it does", "exchange", "AdamW", *(f"kB, n = {n}" for n in RANKS))
    rows = [[one[key] for key in ("paper", "here", "published", "corrected", "test")] for one in papers()]
    systems = table(("paper", "name here", "published", "corrected", "test against the authors' code"), rows)
    about = yaml.safe_load((Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8"))
    cited = {"project": bibtex(about), "cited": "\n\n".join(map(bibtex, about["references"]))}
    values = {"overview": table(heads, overview, len(RANKS)), "systems": systems, **cited}
    found["methods/index.md"] = fill("methods.md.j2", **values, numel=NUMEL, density=DENSITY)
    return found
