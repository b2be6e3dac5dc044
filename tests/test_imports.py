"""Who may import whom: the rooms of the package, from the ground up."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import lightning_sparse
from tests.covering import in_one_test
from tests.warm import forgetting, warm_python

PACKAGE = Path(lightning_sparse.__file__).parent
DOORS = ["accelerate", "huggingface", "ray"]
ALONE = "minimal"
"""Imports nothing of the package, and is imported by nothing of it."""
EXCHANGE = ["core", "ops", "methods", "engine"]
ROOMS = [ALONE, *EXCHANGE, "tuning", "nodes", "api", "hsdp", "integrations", *DOORS, "tools", "__init__"]
"""From the ground up: each imports from itself and from those before it."""
CLI = PACKAGE.parent / "lightning_sparse_cli"
FILES = sorted([*PACKAGE.rglob("*.py"), *CLI.rglob("*.py")])


def room_of(path: Path) -> str:
    return "cli" if CLI in path.parents else path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imported(path: Path, typing: bool = True) -> frozenset[str]:
    """Full names of everything a file imports, also inside functions, and of what it takes from torch by attribute.

    With ``typing=False`` without what only type checkers import.
    """
    return frozenset(_imported(path, typing))


def _imported(path: Path, typing: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not typing and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def modules_imported(path: Path) -> set[str]:
    """Files of the package that a file imports, for types alone, too; not the package itself, where all meet."""
    found = {name if name in MODULES else name.rpartition(".")[0] for name in imported(path)}
    return {name for name in found if name in MODULES} - {module_of(path), PACKAGE.name}


def test_the_parser_sees_what_files_import() -> None:
    top_k = modules_imported(PACKAGE / "methods" / "sparsifiers" / "top_k.py")
    assert {"lightning_sparse.core.step", "lightning_sparse.methods.density", "lightning_sparse.ops"} <= top_k
    assert "torch.distributed" in imported(PACKAGE / "engine" / "network.py")
    assert "pytorch_lightning.strategies.DDPStrategy" in imported(PACKAGE / "integrations" / "pytorch_lightning.py")


def test_rooms_import_only_what_stands_below_them_and_files_do_not_import_each_other() -> None:
    assert {room_of(path) for path in MODULES.values()} == set(ROOMS)
    wanted = {name: modules_imported(path) for name, path in MODULES.items()}
    for name, others in wanted.items():
        room = ROOMS.index(room_of(MODULES[name]))
        above = {other for other in others if ROOMS.index(room_of(MODULES[other])) > room}
        assert not above, f"{name} imports {above}"
        assert f"lightning_sparse.{ALONE}" not in others, f"{name} imports it"
    TopologicalSorter(wanted).prepare()  # raises a CycleError, which names the files


@in_one_test("path", ((path,) for path in FILES), apart=0)
def test_the_network_and_the_framework_are_touched_in_their_rooms_only(path: Path) -> None:
    names = imported(path)
    if room_of(path) not in {"engine", "nodes", "api", "hsdp", ALONE}:
        assert not any(name.startswith(("torch.distributed", "torch.nn.parallel")) for name in names)
    if room_of(path) not in {"integrations", "cli"}:
        packages = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_pytorch"}
        assert not any(name.split(".")[0] in packages for name in names)


NOT_ITS_BUSINESS = re.compile(r"\b(?!node_size\b)\w*(?:node|shard|replica|[hf]sdp)\w*", re.IGNORECASE)


def words_of_neighbours(text: str) -> list[str]:
    """Words for what stands on the engine; a setting may be called ``node_size``."""
    return NOT_ITS_BUSINESS.findall(text)


def test_words_of_neighbours_are_found() -> None:
    text = "node_size of a Node, engine.shards, FSDP2's and lightning_sparse.hsdp; replicated, snodes, anode_size"
    assert len(words_of_neighbours(text)) == 7


@in_one_test("path", ((path,) for path in FILES if room_of(path) == "engine"), apart=0)
def test_the_engine_knows_neither_nodes_nor_shards_nor_replicas(path: Path) -> None:
    """What a rank exchanges is its share, and who has the rest is near: packages that stand on it know more."""
    assert {room_of(MODULES[name]) for name in modules_imported(path)} <= set(EXCHANGE)
    if path.name != "config.py":  # of the setting
        assert not words_of_neighbours(path.read_text())


def imported_at_once(nodes: list[Any]) -> Iterator[str]:
    """Top names of what is imported when a file is: not inside functions, not for type checkers only."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imported_at_once(node.orelse)
        elif not isinstance(node, ast.FunctionDef):
            below = (getattr(node, part, []) for part in ("body", "orelse", "finalbody", "handlers"))
            yield from imported_at_once([child for part in below for child in part])


@in_one_test("path", ((path,) for path in FILES), apart=0)
def test_extras_are_imported_where_they_are_used(path: Path) -> None:
    extras = {"jsonargparse", "matplotlib", "plotly", "rich", "scipy", "sklearn", "tensorboard"}
    extras |= {"wandb", "wandb_workspaces", "yaml"}
    extras |= {"cattrs"}  # no extra, but a fifth of the import, and most programs write nothing down
    assert not extras & set(imported_at_once(ast.parse(path.read_text()).body))


def test_what_is_imported_at_once_is_seen_inside_blocks() -> None:
    nested = (
        "try:\n    import rich.box\nexcept ImportError:\n    from sklearn import x\nif TYPE_CHECKING:\n    import wandb"
    )
    assert set(imported_at_once(ast.parse(nested).body)) == {"rich", "sklearn"}


PUBLIC = {"api.simulation", "core.checks", "core.console", "core.messages", "core.registry", "core.step", "ops"}
PUBLIC |= {
    "engine.config",
    "engine.drivers",
    "engine.gradient_hooks",
    "engine.metrics",
    "engine.network",
    "ops.momentum",
    "engine.pipeline",
}
PUBLIC |= {"integrations.packages", "tuning.unsuited"}
PUBLIC |= {
    f"tuning.{room}.{path.stem}"
    for room in ("measuring", "performance")
    for path in PACKAGE.glob(f"tuning/{room}/*.py")
}
"""Modules that tools may import from, next to the package itself; as docs/design.md names them."""


@in_one_test("path", ((path,) for path in FILES), apart=0)
def test_tools_import_what_is_public(path: Path) -> None:
    if room_of(path) in {"tools", "cli"}:
        inside = {name.removeprefix("lightning_sparse.") for name in modules_imported(path)}
        assert {name for name in inside if name.partition(".")[0] != "tools"} <= PUBLIC


def test_training_does_not_import_the_tools() -> None:
    program = forgetting("lightning_sparse")
    program += "import lightning_sparse; print([name for name in sys.modules if '_sparse.tools' in name])"
    done = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert not any("lightning_sparse_cli" in name for path in PACKAGE.rglob("*.py") for name in imported(path))


def test_the_command_imports_the_library_when_it_needs_it() -> None:
    for path in CLI.glob("*.py"):
        assert "lightning_sparse" not in set(imported_at_once(ast.parse(path.read_text()).body))


@in_one_test("path", ((path,) for path in FILES), apart=0)
def test_no_room_is_bound_to_one_lightning_package_but_the_files_named_after_it(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path, typing=False)}
    if "pytorch_lightning" in tops:
        assert path.stem == "pytorch_lightning"
    if "lightning_fabric" in tops:
        assert path.stem == "lightning_fabric"
    if "lightning" in tops:
        assert path.stem == "lightning"
