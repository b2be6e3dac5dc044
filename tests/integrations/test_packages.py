"""Which Lightning package the exported classes are made for."""

from __future__ import annotations

import os
import subprocess

import pytest

from lightning_sparse.integrations import packages
from tests.warm import forgetting, warm_python

FEW = [
    # What a program does first, and the package whose classes it gets.
    ("import lightning.pytorch", "lightning"),
    ("import pytorch_lightning, lightning.pytorch", "pytorch_lightning"),
]
OTHERS = [
    ("", "pytorch_lightning"),
    # Where the other one is not installed, see also below:
    ("import sys; sys.modules['pytorch_lightning'] = sys.modules['lightning_fabric'] = None", "lightning"),
    ("import sys; sys.modules['lightning'] = None", "pytorch_lightning"),
]
PROGRAM = """
import os
for number, first in enumerate({firsts}):
    child = os.fork()
    if not child:
        exec(first)
        import lightning_sparse as ls
        classes = [ls.SparseDDPStrategy, ls.FabricSparseDDPStrategy]
        bases = [base for base in ls.FlushResidual.__mro__ if base.__name__ == "Callback"]
        tops = [base.__module__.partition(".")[0] for base in bases]
        print(number, *[made.__module__ for made in classes], *sorted(tops), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("cases", [FEW, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=len)
def test_the_package_that_was_imported_first_is_meant(cases: list[tuple[str, str]]) -> None:
    lightning = "lightning", "pytorch_lightning", "lightning_fabric", "lightning_sparse"
    program = forgetting(*lightning) + PROGRAM.format(firsts=[first for first, _ in cases])
    result = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, check=True, timeout=100)
    found = [line.split()[1:] for line in sorted(result.stdout.splitlines())]
    for (first, package), modules in zip(cases, found, strict=True):
        fabric = {"lightning": "lightning", "pytorch_lightning": "lightning_fabric"}[package]
        assert modules[:2] == [f"lightning_sparse.integrations.{name}" for name in (package, fabric)], first
        one_is_missing = first.endswith("None")
        served = [package] if one_is_missing else ["lightning", "pytorch_lightning"]
        assert modules[2:] == sorted(["lightning_sparse", *served]), first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "present"), [("lightning", "pytorch_lightning"), ("pytorch_lightning", "lightning")]
)
def test_one_package_is_enough(absent: str, present: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = packages.importlib.util.find_spec
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None if name == absent else find(name))
    monkeypatch.setattr(packages, "_loaded_before", [])
    assert packages.installed() == [{"lightning": "lightning.pytorch"}.get(present, present)]
    assert packages.preferred() == packages.installed()[0]


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install pytorch-lightning"):
        packages.preferred()
