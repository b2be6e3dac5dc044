"""Hooks of MkDocs: redirects of pages that moved, and guides before reports in the search."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

REDIRECTS = {
    "adam": "guide/optimizers",
    "checkpoints": "guide/checkpoints",
    "choosing": "methods/index",
    "fabric": "guide/other-frameworks",
    "huggingface": "guide/other-frameworks",
    "install": "guide/install",
    "migrate": "guide/other-frameworks",
    "momentum": "guide/optimizers",
    "multinode": "guide/networks",
    "own-loop": "guide/other-frameworks",
    "pays": "guide/should-i-use-it",
    "quickstart": "guide/quick-start",
    "ray": "guide/other-frameworks",
    "reliability": "developers/guarantees",
    "report": "guide/watch",
    "training": "guide/optimizers",
    "watchdogs": "guide/watch",
    "works-with": "guide/works-with",
}
"""Pages that moved, without their endings. One that is there again stays as it is."""

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


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Give a page its weight in the search, where it names none."""
    folder = page.file.src_uri.partition("/")[0]
    if folder in BOOST:
        page.meta.setdefault("search", {}).setdefault("boost", BOOST[folder])
    return markdown


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write a page for each redirect."""
    site = Path(config["site_dir"])
    for old, new in REDIRECTS.items():
        page = site / f"{old}.html"
        if not page.exists():
            target = Path(os.path.relpath(site / f"{new}.html", page.parent)).as_posix()
            page.write_text(PAGE.format(target=target), encoding="utf-8")
