"""The tests marked ``gpu``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import torch

from tests.gpu.checks import Check, Clock, Numbers, SkipError, require
from tests.gpu.parts import ROOT


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    yield Check("pytest -m gpu", run_tests)


def run_tests() -> Numbers:
    import pytest  # noqa: F401  # says what is missing

    # Collecting all tests would take longer than running these.
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Warnings of other versions of torch than the tested ones are no errors here.
        options = ["-q", "-rs", "--tb=short", "-m", "gpu", "-W", "default", f"--junit-xml={report}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *files],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        require(report.exists(), f"pytest ended with exit code {done.returncode}:\n{done.stdout[-4000:]}")
        [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    require(done.returncode in (0, 5), f"{counts}:\n{done.stdout[-8000:]}")
    if counts["tests"] == counts["skipped"]:
        raise SkipError(f"all {counts['tests']} tests skip")
    return counts
