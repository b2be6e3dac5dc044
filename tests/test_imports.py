"""Who may import whom: the rooms of the package, from the ground up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_sparse
from tests.covering import in_one_test

PACKAGE = Path(lightning_sparse.__file__).parent
FLOORS = [
    {"candidates"},
    {"checks", "clock", "core", "fields", "messages", "registry", "console", "interrupts", "layout", "optim", "style"},
    {"adam", "gradients", "laws"},
    {"kernels"},
    {"density", "collective", "momentum"},
    {"memory", "sparsifiers", "exchanges", "plan", "metrics"},
    {"averages", "fused"},
    {"pipeline"},
    {"simulation", "traffic"},
    {"config"},
    {"reducer"},
    {"performance"},
    {"controllers", "side_files", "shadow"},
    {"attach"},
    {"checkpoint", "flush"},
    {"integrations"},
    {"advisor", "compare", "report"},
    {"cli"},
    {"__init__"},
]
"""A room imports from itself and from lower floors only."""
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
CLI = PACKAGE.parent / "lightning_sparse_cli"
FILES = sorted([*PACKAGE.rglob("*.py"), *CLI.rglob("*.py")])


def room_of(path: Path) -> str:
    return "cli" if CLI in path.parents else path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path, typing: bool = True) -> Iterator[str]:
    """Full names of everything a file imports, also inside functions, and of what it takes from torch by attribute.

    With ``typing=False`` without what only type checkers import.
    """
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


def rooms_imported(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported(path) if name.split(".")[0] == "lightning_sparse"]
    return {part[1] for part in parts if len(part) > 1}


def test_the_parser_sees_what_files_import() -> None:
    assert {"density", "kernels", "core"} <= rooms_imported(PACKAGE / "sparsifiers" / "topk.py")
    assert "torch.distributed" in set(imported(PACKAGE / "collective" / "process_group.py"))
    assert "pytorch_lightning.Callback" in set(imported(PACKAGE / "integrations" / "pytorch_lightning.py"))


@in_one_test("path", ((path,) for path in FILES), apart=0)
def test_rooms_import_only_downwards(path: Path) -> None:
    room = room_of(path)
    assert room in FLOOR, f"{room} has no floor yet: decide in FLOORS what it may import"
    for other in rooms_imported(path) - {room}:
        assert other in FLOOR, f"{path.name} imports {other}, which has no floor"
        assert FLOOR[other] < FLOOR[room], f"{path.name} imports {other} from a floor that is not below"


def test_the_table_of_rooms_names_all_of_them_from_the_ground_up() -> None:
    page = (PACKAGE.parent / "docs" / "design.md").read_text()
    rows = re.findall(
        r"^\| .*? \| (`.*?`) \| (.*) \|$", page.split("## Rooms")[1].split("\n## ")[0], flags=re.MULTILINE
    )
    place: dict[str, int] = {}
    for number, (where, answers) in enumerate(rows):
        for name in re.findall(r"`([\w./]+)`", where):
            path = CLI if name == f"{CLI.name}/" else PACKAGE / name
            assert path.exists(), name
            place[room_of(path / "file" if path.is_dir() else path)] = number
            for file in re.findall(r"`(\w+\.py)`", answers) if path.is_dir() else ():
                assert (path / file).exists(), (name, file)
    assert place.keys() == FLOOR.keys() - {"__init__"}
    for path in FILES:
        if path != PACKAGE / "__init__.py":
            for other in rooms_imported(path):
                assert place[other] <= place[room_of(path)], f"{path.name} imports {other}, which stands below it"


@in_one_test("path", ((path,) for path in FILES), apart=0)
def test_the_network_and_the_framework_are_touched_in_their_rooms_only(path: Path) -> None:
    names = set(imported(path))
    if room_of(path) not in {"collective", "reducer", "attach"}:
        assert not any(name.startswith(("torch.distributed", "torch.nn.parallel")) for name in names)
    if room_of(path) not in {"integrations", "cli"}:
        packages = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_pytorch"}
        assert not any(name.split(".")[0] in packages for name in names)


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
    extras = {"docstring_parser", "jsonargparse", "matplotlib", "plotly", "rich", "scipy", "sklearn", "tensorboard"}
    extras |= {"wandb", "wandb_workspaces", "yaml"}
    extras |= {"cattrs"}  # no extra, but a fifth of the import, and most programs write nothing down
    assert not extras & set(imported_at_once(ast.parse(path.read_text()).body))


def test_extras_are_used_and_would_be_seen() -> None:
    assert "jsonargparse.ArgumentParser" in set(imported(CLI / "__init__.py"))
    assert {"rich.progress.Progress", "lightning_sparse.advisor.config.advise_config"} <= set(
        imported(CLI / "commands.py")
    )
    assert "sklearn.datasets.load_digits" in set(imported(PACKAGE / "compare" / "tasks.py"))
    nested = (
        "try:\n    import rich.box\nexcept ImportError:\n    from sklearn import x\nif TYPE_CHECKING:\n    import wandb"
    )
    assert set(imported_at_once(ast.parse(nested).body)) == {"rich", "sklearn"}


def test_the_package_does_not_bring_the_comparisons_with_it() -> None:
    assert "compare" not in rooms_imported(PACKAGE / "__init__.py")
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
