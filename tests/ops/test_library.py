"""Building the compiled kernels, and choosing whether they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sparse.ops.c import library

ROOT = Path(library.__file__).parents[3]


def test_without_a_compiler_there_is_a_reason_instead_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "libhost.so"
    old.write_text("of another version")
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    assert "no-compiler" in (library.build(old) or "")
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert library.build(tmp_path / "libhost.so") == "out of order"


def test_a_library_of_another_source_is_not_used(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / library.SOURCES[0].name
    changed.write_text(library.SOURCES[0].read_text() + "// another one\n")
    monkeypatch.setattr(library, "SOURCES", (changed, *library.SOURCES[1:]))
    monkeypatch.setattr(library, "LIBRARY", built)
    with pytest.raises(OSError, match=r"built from other sources"):
        library.load(built)
    monkeypatch.delenv(library.SETTING, raising=False)
    monkeypatch.setattr(library, "load", lambda: (_ for _ in ()).throw(OSError("too old")))
    command = f"python {library.__file__}"
    instead = f"numpy, which takes several times as long: too old. To compile it again: {command}"
    assert library.choose() == (None, instead)


def test_the_setting_decides(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: ("the library", "AVX2"))
    for setting, expected in {
        "numpy,triton": None,
        "compiled": "the library",
        "": "the library",
        "torch": "the library",
    }.items():
        monkeypatch.setenv(library.SETTING, setting)
        assert library.choose()[0] == expected
    for wrong in ("c", "numpy,compiled"):
        monkeypatch.setenv(library.SETTING, wrong)
        expected = f"'numpy' or 'compiled', for CUDA 'torch' or 'triton', or not to be set, but got '{wrong}'"
        with pytest.raises(ValueError, match=expected):
            library.choose()
        with pytest.raises(ValueError, match=expected):
            library.choose_on_cuda()


def test_the_setting_decides_on_cuda_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SETTING, "compiled,torch")
    assert library.choose_on_cuda() == f"as {library.SETTING} says"
    for setting in ("triton", ""):
        monkeypatch.setenv(library.SETTING, setting)
        monkeypatch.setattr(library, "find_spec", lambda name: name)
        assert library.choose_on_cuda() is None
        monkeypatch.setattr(library, "find_spec", lambda name: None)
        if setting:
            with pytest.raises(ImportError, match="asks for the kernels in Triton"):
                library.choose_on_cuda()
        else:
            assert library.choose_on_cuda() == "as triton is not installed"


@pytest.mark.parametrize("setting", ["numpy", "compiled"])
def test_the_command_says_what_is_used(setting: str, tmp_path: Path) -> None:
    environment = os.environ | {library.SETTING: setting, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "import lightning_sparse_cli as cli; cli.main(['--version'])"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    expected = "numpy, as LIGHTNING_SPARSE_KERNELS says" if setting == "numpy" else "compiled"
    assert f"kernels on CPUs: {expected}" in shown or (setting == "compiled" and "asks for the compiled" in shown)
