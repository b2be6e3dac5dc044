"""Public names, arguments and defaults are those that a file keeps; what changes there is a decision."""

from __future__ import annotations

import argparse
import ast
import re
from types import ModuleType

import pytest

import lightning_sparse as ls
from lightning_sparse.core.registry import Registry
from tests.api.surface import (
    ADVICE,
    FILE,
    REWRITE,
    Describer,
    definition,
    difference,
    from_source,
    on_the_page,
    options,
    public_modules,
    surface,
)
from tests.test_imports import DOORS

SOURCE = """
from argparse import Action
from dataclasses import dataclass, field

__all__ = ["LIMIT", "Base", "Settings", "Part", "train"]

LIMIT = 25

class Base:
    def select(self, values, count=1): ...

@dataclass(frozen=True)
class Settings:
    density: float = 0.01
    names: list = field(default_factory=list)
    @classmethod
    def of(cls, given): ...

class Part(Base, Action):
    def __init__(self, size, /, *, seed=0): ...
    def select(self, values, count=1): ...
    def format_usage(self, width=80): ...
    @property
    def name(self): ...
    @staticmethod
    def check(value): ...
    def _hidden(self, value): ...

def train(model, *, rate=0.1, steps=100): ...
"""


def described(source: str) -> list[str]:
    """The surface of a package of one module."""
    module = ModuleType("made_up")
    exec(compile(source, "<made up>", "exec", dont_inherit=True), vars(module))  # annotations are types there
    return sorted(Describer("made_up").modules({"": module}))


def test_the_public_surface_is_that_of_the_file() -> None:
    if message := difference(FILE.read_text(), surface()):
        pytest.fail(message, pytrace=False)


def test_a_line_is_a_name_with_arguments_and_defaults() -> None:
    assert described(SOURCE) == [
        "Base",
        "Base.select(values, count=1)",
        "LIMIT = 25",
        "Part(size, /, *, seed=0)",
        "Part.check(value)",
        "Part.name",
        "Settings(density=0.01, names=[])",
        "Settings.of(given), of the class",
        "train(model, *, rate=0.1, steps=100)",
    ]


TRAIN, PART, SETTINGS = (
    "train(model, *, rate=0.1, steps=100)",
    "Part(size, /, *, seed=0)",
    "Settings(density=0.01, names=[])",
)
BREAKS = {
    "a name is removed": (', "train"', "", TRAIN),
    "a constant changes": ("LIMIT = 25", "LIMIT = 26", "LIMIT = 25"),
    "an argument is renamed": ("train(model,", "train(module,", TRAIN),
    "a default changes": ("rate=0.1", "rate=0.2", TRAIN),
    "a default is removed": ("rate=0.1", "rate", TRAIN),
    "an argument changes its kind": ("size, /,", "size,", PART),
    "a keyword may be given by position": ("model, *, rate", "model, rate", TRAIN),
    "a field is renamed": ("density: float", "share: float", SETTINGS),
    "a default of a field changes": ("float = 0.01", "float = 0.1", SETTINGS),
    "a factory of defaults changes": ("default_factory=list", "default_factory=tuple", SETTINGS),
    "a method is renamed": ("def of(", "def made_of(", "Settings.of(given), of the class"),
    "a method is no longer one of the class": ("    @classmethod\n", "", "Settings.of(given), of the class"),
    "an argument of a method is renamed": ("check(value)", "check(given)", "Part.check(value)"),
    "a property becomes a method": ("    @property\n", "", "Part.name"),
    "a method of a base changes": (
        ":\n    def select(self, values",
        ":\n    def select(self, x",
        "Base.select(values, count=1)",
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_what_breaks_a_program_is_a_difference(what: str) -> None:
    old, new, gone = BREAKS[what]
    assert SOURCE.count(old) == 1
    message = difference("\n".join(described(SOURCE)), "\n".join(described(SOURCE.replace(old, new))))
    assert f"\n-{gone}\n" in message
    assert message.endswith(ADVICE)


def test_an_override_with_other_arguments_than_its_public_base_has_a_line() -> None:
    other = "select(self, values, count=2): ...\n    def format_usage"
    changed = described(SOURCE.replace("select(self, values, count=1): ...\n    def format_usage", other))
    assert set(changed) - set(described(SOURCE)) == {"Part.select(values, count=2)"}


def test_annotations_private_names_and_methods_of_other_packages_are_left_out() -> None:
    for old, new in (
        ("density: float", "density: int"),
        ("values, count=1): ...\n\n@", "values: list, count: int = 1) -> list: ...\n\n@"),
        ("_hidden(self, value)", "_hidden(self)"),
        ("format_usage(self, width=80)", "format_usage(self, width=100)"),  # of a base from elsewhere
    ):
        assert SOURCE.count(old) == 1
        assert described(SOURCE.replace(old, new)) == described(SOURCE)


def test_a_long_call_has_a_line_for_each_keyword() -> None:
    names = [f"an_argument_with_a_long_name_{number}" for number in range(4)]
    source = f"__all__ = ['f']\ndef f(x, y=None, *, {', '.join(f'{name}=0' for name in names)}): ..."
    before = described(source)
    assert before == [*(f"f(..., {name}=0)" for name in names), "f(x, y=None)"]
    after = described(source.replace(f"{names[2]}=0", f"{names[2]}=1"))
    assert difference("\n".join(before), "\n".join(after)).splitlines()[1:-1] == [
        f"-f(..., {names[2]}=0)",
        f"+f(..., {names[2]}=1)",
    ]


def test_a_class_below_another_one_names_only_the_arguments_that_it_adds() -> None:
    source = """
from dataclasses import dataclass
__all__ = ["Base", "More"]
@dataclass(kw_only=True)
class Base:
    density: float = 0.01
    dense: tuple = ()
@dataclass(kw_only=True)
class More(Base):
    dense: tuple = ("bias",)
    resize: str = "merge"
"""
    assert described(source) == [
        "Base(*, density=0.01, dense=())",
        "More(**Base)",
        "More(..., dense=('bias',))",
        "More(..., resize='merge')",
    ]


def test_a_second_name_says_of_what_it_is_one() -> None:
    assert described("__all__ = ['one', 'two']\ndef one(x): ...\ntwo = one") == ["one(x)", "two is one"]


def test_addresses_and_modules_are_not_shown() -> None:
    source = "import pathlib\n__all__ = ['X', 'Y']\nX = [object(), pathlib.Path]\nY = list[pathlib.Path]"
    assert described(source) == ["X = [<object object>, <class 'Path'>]", "Y = list[Path]"]


def test_a_registry_lists_what_the_package_registers() -> None:
    registry = Registry("thing", object)
    ours = type("OurThing", (), {"__module__": "made_up.things"})
    for cls in (ours, type("TheirThing", (), {"__module__": "elsewhere"})):
        registry.register(cls)
    module = ModuleType("made_up")
    vars(module).update(__all__=["THINGS"], THINGS=registry)
    assert Describer("made_up").modules({"": module}) == ["THINGS['our_thing'] is OurThing"]


def test_arguments_of_modules_for_other_frameworks_are_read_from_their_source() -> None:
    tree = ast.parse(
        "@keywords_of(Config)\ndef attach(model: Any, /, top: int = 3, **keywords: Any) -> None: ...\n"
        "class Strategy:\n    @with_keywords_of(Arguments)\n    def __init__(self, *given, **keywords): ..."
    )
    assert from_source(definition(tree, "attach")) == "model, /, top=3, **Config"
    assert from_source(definition(tree, "Strategy")) == "**Arguments"


def test_an_option_has_a_line_with_its_default() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="*", default=[])
    parser.add_argument("--steps", default=10)
    parser.add_argument("--seed", default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--config", nargs="+", required=True)
    assert list(options({"tool": parser})) == [
        "tool runs ...",
        "tool --steps = 10",
        "tool --seed = 0",
        "tool --json",
        "tool --config ..., required",
    ]


def test_a_message_is_short_and_names_the_command() -> None:
    assert difference("a\nb", "a\nb") == ""
    message = difference("\n".join(map(str, range(100))), "")
    assert len(message.splitlines()) < 25 and "and 80 more lines" in message
    assert f"`{REWRITE}`" in message and "CHANGELOG.md" in message


def test_the_file_has_every_public_name_of_the_package_and_of_the_api_page() -> None:
    kept = FILE.read_text()
    modules = public_modules()
    named = {f"{prefix}{name}" for prefix, module in modules.items() for name in module.__all__}
    named |= {path[-1] for path in on_the_page()}
    # The page has mixins under the names of the strategies.
    missing = {name for name in named if not re.search(rf"(^|\.){re.escape(name)}\b", kept, re.MULTILINE)}
    assert all(name.endswith("Mixin") for name in missing), missing
    assert set(ls.__all__) <= named
    assert all(f"``{prefix[:-1]}``" in (ls.__doc__ or "") for prefix in modules if prefix)
    assert len(modules) == 1 + 7
    assert all(re.search(rf"^{door}\.\w+\(", kept, re.MULTILINE) for door in DOORS)
    assert len(kept.splitlines()) <= 600
