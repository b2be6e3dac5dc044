"""The documentation site: its navigation, links, API page, quoted messages, and its build."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_sparse as ls

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))
"""All pages of the site."""
SETTINGS = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())
GENERATED = ("methods", "reference", "reports")
"""Folders of generated pages; links to one that is not there at all are not followed."""
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, as MkDocs and GitHub make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower()))
    return found


def navigated(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in navigated(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.safe_load(SETTINGS)
    assert sorted(f"docs/{page}" for page in navigated(settings["nav"])) == PAGES


@pytest.mark.parametrize("page", [*PAGES, "README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", file.read_text())):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        aim = file if not path else file.parent / path
        if any(aim.resolve().is_relative_to(DOCS / place) and not (DOCS / place).exists() for place in GENERATED):
            continue
        assert aim.exists(), (page, target)
        assert page.startswith("docs/") <= aim.resolve().is_relative_to(DOCS), (page, target, "is not on the site")
        if anchor and aim.suffix == ".md":
            assert anchor in anchors(aim), (page, target)


def test_pages_that_moved_lead_to_their_new_places() -> None:
    redirects = runpy.run_path(str(DOCS / "site" / "hooks.py"))["REDIRECTS"]
    for old, new in redirects.items():
        place = new.partition("/")[0]
        assert (DOCS / f"{new}.md").exists() or (place in GENERATED and not (DOCS / place).exists()), (old, new)
    gone = {old for old in redirects if not (DOCS / f"{old}.md").exists()}
    assert {"install", "quickstart", "checkpoints", "training", "works-with"} <= gone


def test_guides_are_short_and_answer_first() -> None:
    guides = [*DOCS.glob("guide/*.md"), DOCS / "index.md"]
    assert len(guides) == 12
    for guide in guides:
        text = FENCE.sub("", guide.read_text())
        words = re.sub(r"<!--.*?-->|^\|.*$", "", text, flags=re.MULTILINE | re.DOTALL).split()
        assert len(words) <= 900, (guide.name, len(words))
        first = text.partition("\n\n")[2].partition("\n\n")[0]  # below the title
        assert first[0].isalpha() or first[0] == "`", guide.name
        assert guide.name == "index.md" or "\n## Exceptions\n" in text or "## Where it loses" in text, guide.name
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_the_api_page_has_every_public_name_once() -> None:
    page = (DOCS / "reference" / "api.md").read_text()
    named = [
        heading or path.rpartition(".")[2]
        for path, heading in re.findall(r"^::: ([\w.]+)(?:\n +options: \{heading: (\w+))?", page, flags=re.MULTILINE)
    ]
    assert len(named) == len(set(named))
    assert set(ls.__all__) <= set(named)


def fixed_parts(node: ast.expr) -> str:
    """The text of a string in code, with what is filled in as ``…``."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def messages() -> list[str]:
    """All strings of the package's code that could be sentences."""
    found = []
    for file in [*ROOT.glob("lightning_sparse/**/*.py"), *ROOT.glob("lightning_sparse_cli/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                text = fixed_parts(node)
                if " " in text:
                    found.append(text)
    return found


def test_quoted_messages_are_those_of_the_code() -> None:
    quoted = re.findall(r"```text\n(.*?)\n```", (DOCS / "reference" / "errors.md").read_text(), flags=re.DOTALL)
    assert len(quoted) > 20
    code = "\n".join(messages())
    lightning, *ours = quoted
    for message in ours:
        # Where several strings make a message, each of them has to be there.
        for part in re.split(r"…|(?<=[.:]) ", message):
            assert part in code, (message, part)
    with pytest.raises(ValueError, match="invalid strategy name") as raised:
        __import__("pytorch_lightning").Trainer(strategy="unheard_of", logger=False)
    assert str(raised.value).startswith(lightning.replace("sparse_ddp", "unheard_of").rstrip("…"))


def test_the_picture_of_a_step_is_what_the_package_computes() -> None:
    drawn = runpy.run_path(str(DOCS / "site" / "picture.py"))["picture"]()
    assert drawn == (DOCS / "how-it-works.svg").read_text()


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == ls.__version__
    assert citation["title"] == "lightning-sparse"
    assert {"cff-version", "message", "authors", "license"} <= set(citation)


class Loaded(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.found.append(given.get("src") or "")
        elif tag == "link" and given.get("rel") not in ("prev", "next", "canonical"):
            self.found.append(given.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip()
    return folder


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 390])  # of a screen and of a phone
def test_the_search_finds_guides_first_and_pages_fit_the_screen(site: Path, chromium: Any, width: int) -> None:
    chromium.set_viewport_size({"width": width, "height": 800})
    for words in ("clipping", "checkpoint", "AdamW", "10 Gbit", "FSDP", "density"):
        chromium.goto((site / "index.html").as_uri())
        if width < 900:
            chromium.locator('label[for="__search"]').first.click()
        chromium.locator("input.md-search__input").press_sequentially(words)
        chromium.locator(".md-search-result__link", has_text=words).first.wait_for()
        first = chromium.locator(".md-search-result__link").first.get_attribute("href")
        assert f"{site.as_uri()}/guide/" in first, (words, first)
    for page in [*site.glob("guide/*.html"), site / "index.html", site / "methods" / "index.html"]:
        chromium.goto(page.as_uri())
        assert chromium.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), page
    assert not [said for said in chromium.noted if said.startswith(("error", "request: http"))]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_site_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    moved = (site / "quickstart.html").read_text()
    assert 'url=guide/quick-start.html"' in moved and (site / "guide" / "quick-start.html").exists()
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert all(place.get("boost") == 4 for place in found if place["location"].startswith("guide/"))
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert not [target for target in loaded.found if target.startswith(("http:", "https:", "//"))], page
    api = (site / "reference" / "api.html").read_text()
    assert ":class:" not in api
    headings = [re.sub(r"<[^>]+>", "", found) for found in re.findall(r"<h3 .*?</h3>", api, flags=re.DOTALL)]
    assert set(ls.__all__) <= {word for heading in headings for word in heading.split()}


def test_the_word_of_a_readers_traceback_is_in_a_heading_of_the_errors() -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    headings = re.findall(r"^### (.*)$", page, flags=re.MULTILINE)
    assert any(all(word in heading for word in ("KeyError", "'exp_avg_sq'", "'exp_avg'")) for heading in headings)


def test_the_table_of_sparsifiers_with_adamw_is_that_of_the_registry() -> None:
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| (refused \| |yes \| .+)\|$",
            (DOCS / "developers" / "optimizer-steps.md").read_text(),
            re.MULTILINE,
        )
    )
    known = dict(ls.sparsifiers.SPARSIFIERS.items())
    assert len(rows) >= 18
    for name, row in rows.items():
        cls = known[name]
        if cls.is_its_exchange:
            assert row == "refused | "
            continue
        config = ls.engine.config.SparsificationConfig(sparsifier=name, memory=ls.memories.SecondMoment())
        exchange = ls.exchanges.EXCHANGES.name_of(config.exchange_in_use)
        replaced = "" if exchange == cls.exchange else f", in place of `{cls.exchange}`"
        assert row == f"yes | `{exchange}`{replaced} "
