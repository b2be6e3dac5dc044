"""The build hook: which kernels a wheel brings, and what it is called."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ["hatchling", "builders", "hooks", "plugin", "interface"]

Build = Callable[[str], dict[str, Any]]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Runs the hook on a copy of the sources, with a compiler that writes nothing of use, for a platform."""
    for count in range(1, len(PARTS) + 1):  # need not be installed
        module: Any = ModuleType(".".join(PARTS[:count]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.BuildHookInterface = object
    monkeypatch.delenv("LIGHTNING_SPARSE_KERNELS", raising=False)
    copy = tmp_path / "lightning_sparse" / "ops"
    copy.mkdir(parents=True)
    shutil.copytree(ROOT / "lightning_sparse/ops/c", copy / "c", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "lightning_sparse/ops/form.py", copy)
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho compiled > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))

    def built(platform: str) -> dict[str, Any]:
        monkeypatch.setenv("LIGHTNING_SPARSE_PLATFORM", platform)
        hook = run_path(str(ROOT / "hatch_build.py"))["KernelsBuildHook"]()
        hook.root, said = str(tmp_path), []
        hook.app = SimpleNamespace(display_warning=said.append)
        data: dict[str, Any] = {"force_include": {}, "artifacts": [], "pure_python": True}
        hook.initialize("standard", data)
        missing = [file for file in data["artifacts"] if not (tmp_path / file.lstrip("/")).is_file()]
        assert not missing
        return {**data, "said": said}

    return built


@pytest.mark.parametrize(
    ("platform", "levels"),
    [("manylinux_2_17_x86_64", 3), ("manylinux_2_17_aarch64", 1), ("macosx_11_0_arm64", 1)],
)
def test_a_wheel_for_a_platform_brings_the_kernels_of_its_processors(build: Build, platform: str, levels: int) -> None:
    data = build(platform)
    assert len(data["artifacts"]) == levels
    assert (data["tag"], data["pure_python"]) == (f"py3-none-{platform}", False)


def test_a_wheel_for_any_platform_brings_none(build: Build) -> None:
    data = build("any")
    assert (data["artifacts"], data["pure_python"], data["said"]) == ([], True, [])
    assert "tag" not in data


def test_a_wheel_for_this_machine_is_not_said_to_run_on_others(build: Build) -> None:
    data = build("")
    assert data["artifacts"]
    assert data["tag"].startswith("py3-none-")
    assert "manylinux" not in data["tag"]


def test_unknown_processors_are_refused(build: Build) -> None:
    with pytest.raises(ValueError, match=r"any, or to end with one of .*x86_64.*, but got 'win_amd64'"):
        build("win_amd64")


def test_only_a_wheel_that_was_asked_for_must_have_kernels(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    data = build("")
    assert (data["artifacts"], data["pure_python"]) == ([], True)
    assert "no-such-compiler" in data["said"][0]
    with pytest.raises(RuntimeError, match=r"kernels for macosx_11_0_arm64.*no-such-compiler"):
        build("macosx_11_0_arm64")
