"""Hooks of MkDocs: the project's addresses, redirects of pages that moved, and guides before reports in the search."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

REDIRECTS = {
    "adam": "guide/optimizers",
    "advise": "guide/should-i-use-it",
    "api": "reference/api",
    "checkpoints": "guide/checkpoints",
    "choosing": "methods/index",
    "comparison": "reports/equal-bytes",
    "comparison/compare": "reports/equal-bytes",
    "comparison/replay": "reports/recorded-gradients",
    "examples": "guide/quick-start",
    "fabric": "guide/other-frameworks",
    "faq": "reference/errors",
    "glossary": "reference/glossary",
    "gpu": "reports/gpu",
    "grouping": "guide/settings",
    "hsdp": "guide/fsdp2",
    "huggingface": "guide/other-frameworks",
    "install": "guide/install",
    "metrics": "reference/metrics",
    "migrate": "guide/other-frameworks",
    "momentum": "guide/optimizers",
    "multinode": "guide/networks",
    "nodes": "guide/networks",
    "own-loop": "guide/other-frameworks",
    "pays": "guide/should-i-use-it",
    "performance": "reports/speed",
    "quickstart": "guide/quick-start",
    "race": "reports/race",
    "ray": "guide/other-frameworks",
    "reliability": "developers/guarantees",
    "report": "guide/watch",
    "training": "guide/optimizers",
    "watchdogs": "guide/watch",
    "works-with": "guide/works-with",
}
"""Pages that moved, without their endings. One that is there again stays as it is."""

ANCHORS = {
    "reports/race": {
        "long-trainings-lstm": "race-long.html#lstm",
        "long-trainings-gpt": "race-long.html#gpt",
        "density": "race-long.html#density",
        "time": "race-time.html#seconds-of-a-step",
        "selection-from-parts": "race-parts.html",
        "characters-of-shakespeare": "race-characters.html",
        "fine-tuning": "race-fine-tuning.html",
        "bytes-for-other-numbers-of-ranks": "race-time.html#bytes-for-other-numbers-of-ranks",
        "the-grid": "race.html#short-trainings-lstm",
    }
}
"""Headings that moved to another page, by the page where they were: its new place, from there."""

BOOST = {"guide": 4.0, "reports": 0.5}
"""Weights in the search, by folder; others have 1."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>This page has moved</title>
<link rel="canonical" href="{target}">
<meta name="robots" content="noindex">
<meta http-equiv="refresh" content="0; url={target}">
</head>
<body>This page has moved: <a href="{target}">{target}</a></body>
</html>
"""

SCRIPT = "<script>{{const to = {moved}[location.hash.slice(1)]; if (to) location.replace(to)}}</script>"


@event_priority(100)  # before mike, which adds the version to the site's address
def on_config(config: Any) -> None:
    """Take addresses from pyproject.toml, as far as it has them."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text(encoding="utf-8"))
    addresses = project["project"].get("urls", {})
    if site := addresses.get("Documentation"):
        config.site_url = site
    if repository := addresses.get("Repository"):
        config.repo_url = repository
        config.repo_name = "Repository"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Give a page its weight in the search, where it names none."""
    folder = page.file.src_uri.partition("/")[0]
    if folder in BOOST:
        page.meta.setdefault("search", {}).setdefault("boost", BOOST[folder])
    return markdown


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Lead from headings that moved to where they are."""
    moved = ANCHORS.get(page.file.src_uri.removesuffix(".md"))
    if moved is None:
        return html
    return html + SCRIPT.format(moved=json.dumps(moved))


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write a page for each redirect."""
    site = Path(config["site_dir"])
    for old, new in REDIRECTS.items():
        page = site / f"{old}.html"
        if not page.exists():
            page.parent.mkdir(exist_ok=True)
            target = Path(os.path.relpath(site / f"{new}.html", page.parent)).as_posix()
            page.write_text(PAGE.format(target=target), encoding="utf-8")
