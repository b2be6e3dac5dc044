"""Code in the documentation runs."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest

from tests.forked import forked

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{name}.md" for name in ("extending", "adam", "checkpoints", "fabric", "grouping"))]


def programs(page: str) -> list[str]:
    """Complete ones: with their imports."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return [block for block in blocks if "import " in block]


def run(program: str, log: str) -> None:
    """In a process that has just begun."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(ROOT)
    warnings.simplefilter("error", SyntaxWarning)
    exec(compile(program, "<example>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str, tmp_path: Path) -> None:
    found = programs(page)
    assert found
    for program in found:
        # A process of its own: an example may register a sparsifier.
        log = tmp_path / "log"
        process = forked().Process(target=run, args=(program, str(log)), daemon=False)
        process.start()
        process.join(100)
        assert process.exitcode == 0, log.read_text()


def test_links_lead_somewhere() -> None:
    others = ["advise", "comparison", "design", "gpu", "metrics", "watchdogs"]
    for page in [*PAGES, *(f"docs/{name}.md" for name in others), "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#][^)]*)\)", (ROOT / page).read_text()):
            file = (ROOT / page).parent / target.partition("#")[0]
            assert target.startswith("https://") or file.exists(), (page, target)


def test_the_table_of_logged_quantities_is_that_of_the_code() -> None:
    from lightning_sparse.metrics import QUANTITIES

    def cells(name: str, meaning: str, good: str) -> list[str]:
        return [f"`{name}`", meaning, good]

    lines = re.findall(r"^\| (`\w+` .*) \|$", (ROOT / "docs/metrics.md").read_text(), flags=re.MULTILINE)
    documented = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    assert documented == [cells(name, one.meaning, one.good) for name, one in QUANTITIES.items()]


def test_methods_without_a_threshold_are_named() -> None:
    import torch

    import lightning_sparse as ls

    page = (ROOT / "docs/metrics.md").read_text()
    [sentence] = re.findall(r"^No threshold is logged.*?\.$", page, flags=re.MULTILINE | re.DOTALL)
    stream = torch.randn(1, 2, 2000, generator=torch.Generator().manual_seed(0))
    without = {
        name
        for name, _ in ls.SPARSIFIERS.items()
        if next(ls.simulate(stream, sparsifier=name, density=0.01)).threshold is None
    }
    named = set(re.findall(r"`(\w+)`", sentence))
    assert named
    assert named <= without
