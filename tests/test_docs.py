"""Code in the documentation runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

from tests.forked import forked

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
]
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)
"""A block of code, and why it does not run here, if it does not: said in the line above it."""


def blocks(page: str, *kinds: str) -> list[str]:
    """Those of these languages that say nothing against running."""
    found = BLOCK.finditer((ROOT / page).read_text())
    return [block["text"] for block in found if block["kind"] in kinds and block["reason"] is None]


def run(program: str, log: str) -> None:
    """In a process that has just begun."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(ROOT)
    warnings.simplefilter("error", SyntaxWarning)
    exec(compile(program, "<example>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_programs_run(page: str, tmp_path: Path) -> None:
    for program in blocks(page, "python"):
        if "__main__" in program:
            continue
        # A process of its own: an example may register a sparsifier.
        log = tmp_path / "log"
        process = forked().Process(target=run, args=(program, str(log)), daemon=False)
        process.start()
        process.join(100)
        assert process.exitcode == 0, log.read_text()


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["docs/quickstart.md", "README.md"])
def test_first_programs_train_on_two_processes_or_say_that_they_do_not(page: str, tmp_path: Path) -> None:
    whole = [program for program in blocks(page, "python") if "trains nothing" not in program.split("\n")[0].lower()]
    assert whole
    script, environment = tmp_path / "train.py", {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for program in whole:  # their launchers start the file again
        script.write_text(program)
        done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [said] = re.findall(r"^sparse_ddp: in (\d+) steps each rank sent", done.stdout + done.stderr, re.MULTILINE)
        assert int(said) > 100 and "processes" in done.stderr, done.stderr


def test_commands_name_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_sparse_cli import main

    known: dict[str, str] = {}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        for line in re.sub(r"\\\n", " ", "".join(blocks(page, "bash"))).splitlines():
            words = shlex.split(line, comments=True)
            for word in words:
                if re.fullmatch(r"(configs|examples|benchmarks|tests)/\S+", word):
                    assert (ROOT / word).exists(), (page, line)
            if words[:1] == ["make"]:
                assert set(words[1:]) <= targets, (page, line)
            if words[:1] == ["lightning-sparse"] and words[1:2] != ["--version"]:
                if words[1] not in known:
                    with pytest.raises(SystemExit, match="0"):
                        main([words[1], "--help"])
                    known[words[1]] = capsys.readouterr().out
                for option in words[2:]:
                    assert not option.startswith("--") or f"{option} " in known[words[1]], (page, line)
    assert "advise" in known


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/extending.md"])  # which names files to add
def test_files_and_quantities_that_are_named_exist(page: str) -> None:
    from lightning_sparse.engine.metrics import QUANTITIES

    text = (ROOT / page).read_text()
    for path in re.findall(r"`((?:benchmarks|configs|docs|examples|tests|lightning_sparse)/[\w/.-]*)", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"(?<!\.)\bsparse/([\w/]+)", text):
        # sparse/group/<group> has no end; the other two are tables and files
        assert name.endswith("/") or name in {*QUANTITIES, "plan", "warnings"}, name


@pytest.mark.parametrize("page", PAGES)
def test_places_in_the_code_that_are_named_exist(page: str) -> None:
    for file, place in re.findall(r"`([\w/]+\.py): ([\w.]+)`", (ROOT / page).read_text()):
        source = (ROOT / "lightning_sparse" / file).read_text()
        for name in place.split("."):
            assert re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE), f"There is no {place} in {file}."


def test_configurations_are_those_of_the_strategy() -> None:
    import lightning_sparse as ls

    found = 0
    for page in PAGES:
        for text in blocks(page, "yaml"):
            given = (yaml.safe_load(text).get("trainer") or {}).get("strategy", {})
            if "class_path" in given:
                package, _, name = given["class_path"].partition(".")
                assert package == "lightning_sparse"
                getattr(ls, name)(**given["init_args"])
                found += 1
    assert found


def test_every_logged_quantity_is_in_a_table() -> None:
    from lightning_sparse.engine.metrics import QUANTITIES

    assert set(QUANTITIES) <= set(
        re.findall(r"^\| `([\w/]+)` \|", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    )
