"""The build hook: compiles the kernels of the CPU into the wheel, where there is a compiler, and adds the pages.

Where the environment variable LIGHTNING_SPARSE_PLATFORM names the platform of a wheel, such as manylinux_2_17_aarch64,
$CC compiles for it, and a wheel without kernels is an error; ``any`` asks for one of Python alone. Without it, the
wheel is for this machine.
"""

import os
from pathlib import Path
from runpy import run_path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

KERNELS = "lightning_sparse/ops/c"
PLATFORM = "LIGHTNING_SPARSE_PLATFORM"
MACHINES = ("x86_64", "aarch64", "arm64")


def pages(root: Path) -> dict[str, str]:
    """Where the pages of the documentation go in the wheel, for messages that name them."""
    docs = root / "docs"
    return {str(page): f"lightning_sparse/docs/{page.relative_to(docs).as_posix()}" for page in docs.rglob("*.md")}


class KernelsBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # whatever the builder's settings are
    """Compiles the sources in C; without a compiler, the wheel is one of Python alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel, or an editable install, which then finds library and pages beside the source."""
        if version != "editable":
            build_data["force_include"].update(pages(Path(self.root)))
        if (wanted := os.environ.get(PLATFORM, "")) == "any":
            return
        machine = next((known for known in MACHINES if wanted.endswith(f"_{known}")), "")
        if wanted and not machine:
            raise ValueError(f"Expected {PLATFORM} to be any, or to end with one of {MACHINES}, but got {wanted!r}.")
        library = run_path(str(Path(self.root) / KERNELS / "library.py"))
        trouble = library["build"](machine=machine)
        if trouble and wanted:
            raise RuntimeError(f"Expected kernels for {wanted}, but they were not compiled: {trouble}")
        if trouble:
            self.app.display_warning(
                f"Without compiled kernels, torch does their work, several times slower: {trouble}"
            )
            return
        build_data["artifacts"] += [f"/{KERNELS}/{file.name}" for file in library["files"](machine=machine)]
        build_data["pure_python"] = False
        # The most specific tag that pip takes here, of those of this system alone.
        tags = (tag.platform for tag in sys_tags())
        here = next(tag for tag in tags if not tag.startswith(("manylinux", "musllinux")))
        build_data["tag"] = f"py3-none-{wanted or here}"
