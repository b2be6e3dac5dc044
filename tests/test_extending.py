"""What docs/extending.md says is enough: each part is added to a copy of the repository as the page says, and used."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.extending import changes, copy
from tests.warm import forgetting, warm_python

TOUCHED = {
    "A sparsifier": {
        "lightning_sparse/methods/sparsifiers/__init__.py",
        "lightning_sparse/methods/sparsifiers/leader_blocks.py",
        "tests/contract/cases.py",
    },
    "An exchange": {
        "lightning_sparse/methods/exchanges/__init__.py",
        "lightning_sparse/methods/exchanges/gather_shared.py",
        "tests/reference/releases.py",
    },
    "A memory": {
        "lightning_sparse/methods/memory/__init__.py",
        "lightning_sparse/methods/memory/bounded.py",
        "tests/contract/cases.py",
    },
    "A setting": {"lightning_sparse/engine/config.py"},
    "A logged quantity": {
        "docs/reference/metrics.md",
        "lightning_sparse/engine/metrics.py",
        "tests/engine/test_metrics.py",
    },
}
"""More must not be needed."""
TESTS = {
    "tests/extended.py": "test",
    "tests/contract/test_contract.py": "leader_blocks or random_k or test_every",
    # All memories with the new sparsifier: with all others they take a minute.
    "tests/contract/test_memories.py": "leader_blocks and nothing_is_lost or has_a_law",
    "tests/contract/test_cuda_tensors.py": "leader_blocks or gather_shared or Bounded",
    "tests/ops/test_no_host_sync.py": "leader_blocks or random_k or Bounded",
    "tests/tools/test_cli.py": "builds_its_sparsifier and leader_blocks or little_else",
    "tests/test_docs.py": "table",
    "tests/test_imports.py": "rooms_import or tools_import",
    "tests/methods/memory/test_memory.py": "every_memory_has_a_name",
    "tests/engine/test_metrics.py": "test",
    "tests/tools/compare/test_methods.py": "names_are_unique",
    "tests/engine/network/test_drivers.py": "leader_blocks or random_k",
}
"""What must pass then: files, and which of their tests. The picks of random_k are such as the new exchange accepts."""
MORE = {**TESTS, "tests/contract/test_memories.py": "leader_blocks or has_a_law"}
"""With all that is said of memories."""


def test_the_page_touches_what_it_promises() -> None:
    assert {part: {change.path for change in those} for part, those in changes().items() if those} == TOUCHED


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("not_launched")
@pytest.mark.parametrize("tests", [pytest.param(TESTS, id="some"), pytest.param(MORE, id="all")])
def test_nothing_else_has_to_be_touched(tmp_path: Path, tests: dict[str, str]) -> None:
    root = copy(tmp_path / "copy")
    for those in changes().values():
        for change in those:
            change.make(root)
    chosen = " or ".join(f"{Path(file).stem} and ({words})" for file, words in tests.items())
    environment = os.environ | {"PYTHONPATH": str(root), "JSONARGPARSE_DEPRECATION_WARNINGS": "off"}
    environment.pop("WARM_PYTHON", None)  # which knows nothing of the copy
    program = forgetting("lightning_sparse", "lightning_sparse_cli", "tests")
    program += "import runpy; runpy.run_path('configs/generate.py')['main']([]); "
    program += "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    command = [warm_python(), "-c", program, "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}"]
    command += ["-k", chosen, *tests]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
