"""The public surface of the package as lines of text, which ``surface.txt`` keeps; rewrite it by::

    python -m tests.api.surface

Names are those in ``__all__``: of the package, of the modules below it that ``docs/reference/api.md`` takes names from,
and of the modules for other frameworks. Annotations are left out: their text depends on the version of Python.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning_sparse as ls
import lightning_sparse_cli as cli
from lightning_sparse.api.checkpoint import FORMAT
from lightning_sparse.core.registry import Registry
from lightning_sparse.engine.metrics import QUANTITIES
from lightning_sparse.engine.state.schema import STATE_FORMAT
from lightning_sparse.integrations.packages import PYTORCH_LIGHTNING, preferred
from lightning_sparse.ops.c.library import CHOICES, SETTING

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_sparse"
FILE = Path(__file__).with_name("surface.txt")
PAGE = ROOT / "docs" / "reference" / "api.md"
REWRITE = "python -m tests.api.surface"
HEAD = f"Public names, written by `{REWRITE}`; docs/developers/versions.md says what is promised of them."
ADVICE = f"If this is intended, run `{REWRITE}` and write a line in CHANGELOG.md (docs/developers/versions.md)."
WIDTH = 110
"""Characters of a call on one line; a longer one has a line for each keyword."""
SPECIAL = ("__call__", "__enter__")
"""Special methods that users call without their names."""
SHOWN = 20
"""Lines of a difference in a message."""


class Text(str):
    """Shown as it is, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def shown(value: object) -> Text:
    """A default or a constant, without addresses in memory and modules."""
    if isinstance(value, Path):
        return Text(repr(value.as_posix()))
    if inspect.isclass(value) or inspect.isroutine(value):
        return Text(value.__qualname__)
    return Text(re.sub(r" at 0x[0-9a-fA-F]+|\b[a-z_]\w*(\.[a-z_]\w*)*\.(?=[A-Z])", "", repr(value)))


def bare(p: inspect.Parameter) -> inspect.Parameter:
    """A parameter without its annotation."""
    return p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else shown(p.default))


def call(path: str, parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Lines of a call: one, or if that is long, one for all that can be given by position, and one for each keyword."""
    every = list(map(bare, parameters))
    named = [p for p in every if p.kind is p.KEYWORD_ONLY]
    if len(whole := f"{path}{inspect.Signature(every)}") <= WIDTH or not named:
        return [whole]
    rest = inspect.Signature([p for p in every if p.kind is not p.KEYWORD_ONLY])
    return [f"{path}{rest}", *(f"{path}(..., {p})" for p in named)]


def order(line: str) -> str:
    """Return what lines are sorted by: keywords come after what can be given by position."""
    return line.replace("(..., ", "(~")


class Describer:
    """Describes what belongs to a package.

    Args:
        package: its name. What comes from others is left out.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.paths: dict[int, str] = {}
        """Where a thing was described first, by its id."""
        self.classes: list[type] = []

    def is_ours(self, thing: Any) -> bool:
        return f"{getattr(thing, '__module__', '')}.".startswith(f"{self.package}.")

    def modules(self, modules: Mapping[str, ModuleType]) -> list[str]:
        """Lines of all public names of modules, by the prefix of their paths."""
        every = [(f"{prefix}{name}", getattr(m, name)) for prefix, m in modules.items() for name in m.__all__]
        self.classes += [thing for _, thing in every if inspect.isclass(thing)]
        return [line for path, thing in every for line in self.lines(path, thing)]

    def lines(self, path: str, thing: Any) -> Iterator[str]:
        """Lines of one name."""
        if inspect.isclass(thing) or inspect.isroutine(thing):
            first = self.paths.setdefault(id(thing), path)
            if first != path:
                yield f"{path} is {first}"
            elif inspect.isclass(thing):
                yield from self.constructor(path, thing)
                yield from self.members(path, thing)
            else:
                yield from call(path, inspect.signature(thing).parameters.values())
        elif isinstance(thing, Registry):
            own = [(name, cls) for name, cls in thing.items() if self.is_ours(cls)]  # tests register theirs
            yield from (f"{path}[{name!r}] is {cls.__name__}" for name, cls in own)
        else:
            yield f"{path} = {shown(thing)}"

    def constructor(self, path: str, cls: type) -> list[str]:
        """Arguments of a class, or what it is where others define them; those of a public base stand there."""
        owner = next(base for base in cls.__mro__ if {"__init__", "__new__"} & vars(base).keys())
        if not self.is_ours(owner):
            return [path if owner is object else f"{path}: {owner.__name__}"]
        theirs = getattr(cls, "unused", {})  # arguments of Lightning and torch that strategies accept without an effect
        made = {one.name: one.default_factory for one in fields(cls)} if is_dataclass(cls) else {}
        known = {
            name: p.replace(default=made[name]()) if repr(p.default) == "<factory>" else p
            for name, p in inspect.signature(cls).parameters.items()
            if name not in theirs
        }
        for base in cls.__mro__[1:]:
            inherited = inspect.signature(base).parameters if base in self.classes and is_dataclass(base) else {}
            if inherited and all(p.kind is p.KEYWORD_ONLY for p in inherited.values()):
                own = [p for p in map(bare, known.values()) if p not in map(bare, inherited.values())]
                return [f"{path}(**{base.__name__})", *(f"{path}(..., {p})" for p in own)]
        return call(path, known.values())

    def members(self, path: str, cls: type) -> Iterator[str]:
        """Methods, properties, and fields beside the constructor's, but for those that a public base has already."""
        ours = [base for base in cls.__mro__ if self.is_ours(base)]
        theirs = {name for base in cls.__mro__ if base not in ours and base is not object for name in vars(base)}
        if is_dataclass(cls):
            yield from (f"{path}.{one.name}" for one in fields(cls) if not one.init and not one.name.startswith("_"))
        for name in {name for base in ours for name in vars(base)} - theirs:
            if name.startswith("_") and name not in SPECIAL:
                continue
            above = next((base for base in cls.__mro__[1:] if base in self.classes and hasattr(base, name)), None)
            lines = list(member(cls, name))
            # A property in place of a method returns one that is called in the same way.
            if above is None or lines not in ([name], list(member(above, name))):
                yield from (f"{path}.{line}" for line in lines)


def member(cls: type, name: str) -> Iterator[str]:
    """Lines of a method or property; none of data, which constructors describe."""
    found = inspect.getattr_static(cls, name)
    if isinstance(found, (property, cached_property)):
        yield name
    elif isinstance(found, staticmethod):
        yield from call(name, inspect.signature(found.__func__).parameters.values())
    elif isinstance(found, classmethod) or inspect.isfunction(found):
        function = found.__func__ if isinstance(found, classmethod) else found
        _, *parameters = inspect.signature(function).parameters.values()
        yield from (f"{line}, of the class" if function is not found else line for line in call(name, parameters))


def on_the_page() -> list[list[str]]:
    """Parts of the paths of all names on the API page, below the package."""
    return [path.split(".")[1:] for path in re.findall(r"^::: ([\w.]+)", PAGE.read_text(), flags=re.MULTILINE)]


def public_modules() -> dict[str, ModuleType]:
    """The package, and the modules of which the API page lists a name of their ``__all__``."""
    pairs = [parts for parts in on_the_page() if len(parts) == 2]
    found = {first: getattr(ls, first) for first, name in pairs if name in getattr(getattr(ls, first), "__all__", ())}
    return {"": ls} | {f"{name}.": module for name, module in found.items()}


def types_of_the_page(describer: Describer) -> Iterator[str]:
    """Lines of the classes on the API page that have no public path: functions take or return them."""
    for *where, name in on_the_page():
        thing = getattr(importlib.import_module(".".join([PACKAGE.name, *where])), name)
        known = any(thing in one.__mro__ for one in describer.classes)
        if inspect.isclass(thing) and not known:
            describer.classes.append(thing)
            yield from describer.lines(name, thing)


def doors() -> Iterator[str]:
    """Lines of the modules for other frameworks, from their source: these frameworks need not be installed."""
    for file in sorted(PACKAGE.glob("*.py")):
        tree = ast.parse(file.read_text())
        listed = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
        if file.stem == "__init__" or not listed:
            continue
        origins = {a.name: n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
        for name in ast.literal_eval(listed[0]):
            source = (ROOT / origins[name].replace(".", "/")).with_suffix(".py")
            yield f"{file.stem}.{name}({from_source(definition(ast.parse(source.read_text()), name))})"


def definition(tree: ast.Module | ast.ClassDef, name: str) -> Any:
    """What defines a function or class."""
    return next(node for node in tree.body if getattr(node, "name", "") == name)


def from_source(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Arguments of a function or class, with the dataclass whose fields are its keywords."""
    function: ast.FunctionDef = definition(node, "__init__") if isinstance(node, ast.ClassDef) else node
    arguments = function.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if one is not None:
            one.annotation = None
    if function is not node:
        del arguments.args[0]
    found = re.search(r"keywords_of\((\w+)\)", " ".join(map(ast.unparse, function.decorator_list)))
    if found and arguments.kwarg:
        arguments.kwarg.arg, arguments.vararg = found[1], None  # what is given by position is refused
    return ast.unparse(arguments)


def options(parsers: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    """Lines of the options and arguments of commands, by name."""
    for name, parser in parsers.items():
        for one in parser._actions:
            if isinstance(one, (argparse._HelpAction, argparse._SubParsersAction)):
                continue
            many = " ..." if one.nargs in ("*", "+") else ""
            empty = one.default is None or one.default is False or one.default == []
            default = "" if empty else f" = {shown(one.default)}"
            required = ", required" if one.required and one.option_strings else ""
            yield f"{name} {'|'.join(one.option_strings) or one.dest}{many}{default}{required}"


def strategies() -> Iterator[str]:
    """Lines of the names that are registered for Trainer and Fabric."""
    top = preferred()
    other = "lightning_fabric" if top == PYTORCH_LIGHTNING else "lightning.fabric"
    trainer = importlib.import_module(f"{top}.strategies").StrategyRegistry
    fabric = importlib.import_module(f"{other}.strategies").STRATEGY_REGISTRY
    for host, registry in (("Trainer", trainer), ("Fabric", fabric)):
        yield from (
            f'{host}(strategy="{name}")' for name in registry.available_strategies() if name.startswith("sparse_")
        )


def surface() -> str:
    """The whole surface, as the file keeps it."""
    describer = Describer(PACKAGE.name)
    program, commands = cli._parsers()
    commands = {program.prog: program} | {f"{program.prog} {name}": parser for name, parser in commands.items()}
    environment = (f"{SETTING}={name}" for choice in CHOICES for name in choice)
    sections: dict[str, Iterable[str]] = {
        "Names below lightning_sparse": describer.modules(public_modules()),
        "Types that these take and return; their modules are not part of the surface": types_of_the_page(describer),
        "Modules for other frameworks": doors(),
        "Names of strategies": strategies(),
        "Logged quantities": (f"sparse/{name}" for name, one in QUANTITIES.items() if describer.is_ours(one.compute)),
        "Formats of states and side files": (f"Engine.state_dict: {STATE_FORMAT}", f"side files: {FORMAT}"),
        "Command line": options(commands),
        "Environment variables": environment,
    }
    parts = [
        f"# {title}\n\n" + "".join(f"{line}\n" for line in sorted(set(lines), key=order))
        for title, lines in sections.items()
    ]
    return "\n".join([f"{HEAD}\n", *parts])


def difference(kept: str, now: str) -> str:
    """Say what has changed, with what to do; empty if nothing has."""
    lines = difflib.unified_diff(kept.splitlines(), now.splitlines(), n=0, lineterm="")
    changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    if not changed:
        return ""
    more = [f"and {len(changed) - SHOWN} more lines"] if len(changed) > SHOWN else []
    return "\n".join(["The public surface has changed:", *changed[:SHOWN], *more, ADVICE])


def main() -> None:
    """Rewrite the file."""
    FILE.write_text(surface())
    print(f"Wrote {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
