"""Workflows call scripts that are there, pin actions, and run the Pythons and versions that pyproject.toml declares."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="the source archive has no workflows")


def jobs(workflow: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(workflow).values():
        yield from job.get("steps", [job])  # one that calls a workflow is its only step


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_steps_are_scripts_or_pinned_actions(workflow: Path) -> None:
    for step in steps(workflow):
        if "run" in step:
            script, *arguments = step["run"].split()
            assert script.startswith(".ci/") and "\n" not in step["run"].strip()
            assert os.access(ROOT / script, os.X_OK), script
            assert not any("${{" in word for word in arguments), "An expression in a command is run as code."
        elif step["uses"].startswith("$/"):
            assert (ROOT / step["uses"].removeprefix("$/")).is_file()
        else:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
    for line in re.findall(r"uses: \w.*", workflow.read_text()):
        assert re.search(r" # v\d+(\.\d+)*$", line), line


def test_scripts_call_scripts_that_are_there() -> None:
    for caller in (ROOT / ".ci").iterdir():
        for script in re.findall(r"(?<![\w/])\.ci/[\w.-]*\w", caller.read_text()):
            assert (ROOT / script).is_file(), (caller.name, script)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_jobs_may_do_little_and_end(workflow: Path) -> None:
    told = yaml.safe_load(workflow.read_text())
    assert told["permissions"] == {} and told["concurrency"]["group"]
    for name, job in told["jobs"].items():
        assert "permissions" in job, name
        assert "uses" in job or job["timeout-minutes"] <= 60, name
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_the_pythons_are_those_of_the_classifiers() -> None:
    named = re.findall(r"Python :: (\d\.\d+)$", "\n".join(PROJECT["classifiers"]), flags=re.MULTILINE)
    matrix = jobs(ROOT / ".github/workflows/tests.yml")["linux"]["strategy"]["matrix"]
    assert matrix["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_cells_of_compatibility_are_in_the_matrix_and_their_tests_are_there() -> None:
    cells = tomllib.loads((ROOT / ".ci/compatibility.toml").read_text())
    matrix = jobs(ROOT / ".github/workflows/tests.yml")["compatibility"]["strategy"]["matrix"]
    assert matrix["cell"] == list(cells)
    for cell in cells.values():
        for test in cell["tests"]:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text(), test


def test_the_oldest_version_is_the_lower_bound() -> None:
    requirement = runpy.run_path(str(ROOT / ".ci/requirement"))["requirement"]
    declared = {one.name: one for one in map(Requirement, PROJECT["dependencies"])}
    for name in ("torch", "pytorch-lightning"):
        [lower] = [bound.version for bound in declared[name].specifier if bound.operator == ">="]
        assert requirement(name, "oldest") == f"{name}=={lower}"
        assert Requirement(requirement(name, "newest")) == declared[name]
    assert requirement("ray", "2.60.0") == "ray==2.60.0"


def test_a_release_waits_for_its_tag_its_date_and_the_addresses(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "check-release"
    script.write_text((ROOT / ".ci/check-release").read_text())

    def check(tag: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(script), tag], capture_output=True, text=True, timeout=60)

    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nversion = "1.2.0"\n')
    package = tmp_path / "lightning_sparse" / "core" / "version.py"
    package.parent.mkdir(parents=True)
    package.write_text('__version__ = "1.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (unreleased)\n\n- New.\n\n## 1.1.0 (2020-01-01)\n")
    refused = check("v1.2.1")
    assert refused.returncode == 1 and not refused.stdout
    assert [line.split()[0] for line in refused.stderr.splitlines()] == [
        "The",
        "lightning_sparse/core/version.py",
        "CHANGELOG.md",
        "[project.urls]",
    ]
    assert "Homepage, Repository, Documentation, Security" in refused.stderr
    names = ("Homepage", "Repository", "Documentation", "Security")
    project.write_text(project.read_text() + "[project.urls]\n" + "".join(f'{n} = "https://{n}"\n' for n in names))
    package.write_text('__version__ = "1.2.0"\n')
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("unreleased", "2021-02-03"))
    taken = check("v1.2.0")
    assert (taken.returncode, taken.stdout, taken.stderr) == (0, "- New.\n", "")
