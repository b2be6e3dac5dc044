"""Code in the documentation runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/design.md", "docs/adam.md", "docs/checkpoints.md", "docs/fabric.md", "docs/grouping.md"]


def programs(page: str) -> list[str]:
    """Complete ones: with their imports."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return [block for block in blocks if "import " in block]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str) -> None:
    found = programs(page)
    assert found
    for program in found:
        # A process of its own: an example may register a sparsifier.
        command = [sys.executable, "-W", "error::SyntaxWarning", "-c", program]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert result.returncode == 0, result.stderr


def test_links_lead_somewhere() -> None:
    others = ["advise", "comparison", "metrics", "watchdogs"]
    for page in [*PAGES, *(f"docs/{name}.md" for name in others), "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#][^)]*)\)", (ROOT / page).read_text()):
            file = (ROOT / page).parent / target.partition("#")[0]
            assert target.startswith("https://") or file.exists(), (page, target)


def test_every_logged_quantity_is_documented() -> None:
    from lightning_sparse.statistics import QUANTITIES

    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/metrics.md").read_text(), flags=re.MULTILINE))
    assert documented == set(QUANTITIES)
