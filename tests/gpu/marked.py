"""The tests marked ``gpu``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import torch

from tests.gpu.checks import Check, Clock, Numbers, SkipError, require
from tests.gpu.parts import ROOT


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    yield Check("pytest -m gpu", partial(run_tests, clock))


def run_tests(clock: Clock) -> Numbers:
    import pytest  # noqa: F401  # says what is missing

    # Collecting all tests would take longer than running these.
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Warnings of other versions of torch than the tested ones are no errors here.
        options = ["-v", "-rs", "--tb=short", "-m", "gpu", "-W", "default", f"--junit-xml={report}"]
        command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *files]
        with (Path(folder) / "output").open("w+") as output:
            try:
                done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=clock.left)
                ended = ""
            except subprocess.TimeoutExpired as error:
                ended = f"no end within {error.timeout:.0f} s"
            output.seek(0)
            said = output.read()
        require(not ended, f"{ended}:\n{said[-8000:]}")
        require(report.exists(), f"pytest ended with exit code {done.returncode}:\n{said[-4000:]}")
        [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    require(done.returncode in (0, 5), f"{counts}:\n{said[-8000:]}")
    if counts["tests"] == counts["skipped"]:
        raise SkipError(f"all {counts['tests']} tests skip")
    return counts
