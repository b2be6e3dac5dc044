"""Which Lightning package the exported classes are made for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_sparse import packages

PROGRAM = """
{first}
import lightning_sparse as ls
print(ls.SparseDDPStrategy.__module__, ls.SparsityMonitor.__module__, ls.FlushResidual.__module__)
print(ls.FabricSparseDDPStrategy.__module__)
"""


def run(first: str) -> str:
    program = PROGRAM.format(first=first)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    return result.stdout.strip()


@pytest.mark.slow
def test_the_package_that_was_imported_first_is_meant() -> None:
    ours = "lightning_sparse.strategy.{0} lightning_sparse.monitor.{0} lightning_sparse.flushing.{0}"
    lightning = ours.format("lightning") + "\nlightning_sparse.strategy.fabric"
    pytorch_lightning = ours.format("pytorch_lightning") + "\nlightning_sparse.strategy.lightning_fabric"
    assert run("import lightning.pytorch") == lightning
    assert run("import pytorch_lightning, lightning.pytorch") == pytorch_lightning
    assert run("") == pytorch_lightning
    # Where the other one is not installed:
    assert run("import sys; sys.modules['pytorch_lightning'] = sys.modules['lightning_fabric'] = None") == lightning
    assert run("import sys; sys.modules['lightning'] = None") == pytorch_lightning


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
