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


def blocks(page: str, *kinds: str, all_of_them: bool = False) -> list[str]:
    """Those of these languages that say nothing against running, or all."""
    found = BLOCK.finditer((ROOT / page).read_text())
    return [block["text"] for block in found if block["kind"] in kinds and (all_of_them or block["reason"] is None)]


def is_whole(program: str) -> bool:
    """Whether it is to be saved and started, and then trains on two processes."""
    return "__main__" in program or program.startswith("# torchrun")


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
        if is_whole(program):
            continue
        # A process of its own: an example may register a sparsifier.
        log = tmp_path / "log"
        process = forked().Process(target=run, args=(program, str(log)), daemon=False)
        process.start()
        process.join(100)
        assert process.exitcode == 0, log.read_text()


GUIDES = ["README.md", *(page for page in PAGES if page.startswith("docs/guide/"))]


@pytest.mark.parametrize("page", GUIDES)
def test_programs_of_guides_train_on_two_processes_or_say_that_they_do_not(page: str) -> None:
    for program in blocks(page, "python"):
        assert is_whole(program) or "rains nothing" in program.split("\n")[0], (page, program)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in GUIDES if any(map(is_whole, blocks(page, "python")))])
def test_programs_and_commands_of_guides_run_as_they_stand(page: str, tmp_path: Path) -> None:
    """In the order of the page, in one folder: a program is saved as train.py, and commands are given to bash."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    places = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **places, "OMP_NUM_THREADS": "1"}
    ran = 0
    for text in blocks(page, "python", "bash"):
        program = is_whole(text)
        if program:
            (tmp_path / "train.py").write_text(text)
        elif text in blocks(page, "python"):
            continue
        if text.startswith("# torchrun"):
            continue  # a command of the page starts it
        command = [sys.executable, "train.py"] if program else ["bash", "-e", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (text, done.stderr)
        if program or "train.py" in text:
            said = done.stdout + done.stderr
            assert re.search(r"^sparse_ddp: .* selects .* on each of 2 ranks", said, re.MULTILINE), said
            ran += 1
            if page in ("README.md", "docs/guide/quick-start.md"):
                [quoted] = blocks(page, "text")
                assert re.search(rf"^{re.escape(quoted.strip())}", said, re.MULTILINE), said
    assert ran == sum(map(is_whole, blocks(page, "python")))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [page for page in GUIDES if blocks(page, "bash") and not any(map(is_whole, blocks(page, "python")))]
)
def test_commands_of_other_guides_run_as_they_stand(page: str, tmp_path: Path) -> None:
    places = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for text in blocks(page, "bash"):
        command = ["bash", "-e", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **places}, capture_output=True, text=True)
        assert done.returncode == 0, (text, done.stderr)


def test_commands_name_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_sparse_cli import main

    known: dict[str, str] = {}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        for line in re.sub(r"\\\n", " ", "".join(blocks(page, "bash", all_of_them=True))).splitlines():
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
