"""Pages of the reference, from settings, metrics, the command's parsers and the messages of the code."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from docstrings import Docstring, fill, flowing, table
from roles import plain

import lightning_sparse as ls
import lightning_sparse_cli as cli
from lightning_sparse.engine.config import SparsificationConfig, StrategyConfig, docstrings_of
from lightning_sparse.engine.metrics import QUANTITIES
from lightning_sparse.integrations.base import StrategyArguments
from lightning_sparse.integrations.hsdp import HSDPArguments

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIGHTNINGS = "You selected an invalid strategy name"
"""Beginning of the one message that is not of this package."""
TELLING = 20
"""Characters of a part of a message by which its file is found."""
SETTINGS = (
    ("Of all hosts", "`attach`, the strategies, `SparsityMonitor(shadow=...)`.", SparsificationConfig, object),
    ("Of strategies", "Also `SparseDDPStrategy` and its like.", StrategyConfig, SparsificationConfig),
    ("Of DDP strategies", "Arguments that go to Lightning and to DDP.", StrategyArguments, StrategyConfig),
    ("Of sharded replicas", "`SparseHSDPStrategy`, `FabricSparseHSDPStrategy`.", HSDPArguments, StrategyConfig),
)


def pages() -> dict[str, str]:
    """All pages of the reference by path."""
    sections = [(title, lead, list(_settings(cls, base))) for title, lead, cls, base in SETTINGS]
    for function in (ls.attach, ls.attach_hsdp):
        lead = Docstring.of(function).summary
        sections.append((f"Of {function.__name__}", lead, list(_arguments(function, SparsificationConfig))))
    sections.append(("Rules", Docstring.of(ls.Rules).summary, list(_arguments(ls.Rules))))
    sections.append(("Watch", Docstring.of(ls.Watch).summary, list(_arguments(ls.Watch))))
    rows = [(f"`{name}`", one.unit, one.meaning, one.good) for name, one in QUANTITIES.items()]
    quantities = table(("name", "unit", "meaning", "good value"), rows)
    namespaces = {name: public(getattr(ls, name)) for name in ("sparsifiers", "exchanges", "memories", "metrics")}
    return {
        "reference/settings.md": fill("settings.md.j2", sections=sections),
        "reference/metrics.md": fill("metrics.md.j2", quantities=quantities),
        "reference/command-line.md": fill("commands.md.j2", commands=list(_commands())),
        "reference/errors.md": fill("errors.md.j2", errors=errors()),
        "reference/api.md": fill("api.md.j2", **namespaces),
        "reference/glossary.md": fill("glossary.md.j2"),
    }


def public(module: Any) -> list[str]:
    """Names of a module that users make, in its order."""
    return [name for name in module.__all__ if inspect.isclass(getattr(module, name))]


def _settings(cls: type, base: type) -> Iterable[tuple[str, str, str]]:
    told, known = docstrings_of(cls), inspect.signature(cls).parameters
    shared = inspect.signature(base).parameters if base is not object else {}
    return [
        (name, _shown(one.default), flowing(plain(told[name]))) for name, one in known.items() if name not in shared
    ]


def _arguments(called: Any, base: type = object) -> Iterable[tuple[str, str, str]]:
    known, told = inspect.signature(called).parameters, Docstring.of(called).arguments
    own = told.keys() - (inspect.signature(base).parameters if base is not object else {})
    return [(name, _shown(known[name].default), text) for name, text in told.items() if name in own]


def _shown(default: Any) -> str:
    return {"<factory>": "{}", repr(inspect.Parameter.empty): ""}.get(repr(default), repr(default))


def _commands() -> Iterable[dict[str, str]]:
    for name, parser in cli._parsers()[1].items():
        every = [one for one in parser._actions if not isinstance(one, argparse._HelpAction)]
        names = [f"`--{one.dest}`" if one.option_strings else f"`{one.dest}`" for one in every]
        rows = [(shown, (one.help or "").replace("%%", "%")) for shown, one in zip(names, every, strict=True)]
        yield {
            "name": name,
            "text": flowing(parser.description or ""),
            "options": table(("option", "meaning"), rows),
            "examples": inspect.cleandoc((parser.epilog or "").partition("\n")[2]),
        }


def _fixed(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "…"


@cache
def messages() -> dict[str, str]:
    """Sentences in the code of each file, one after the other, with what is filled in as ``…``."""
    found = {}
    for file in [*ROOT.glob("lightning_sparse/**/*.py"), *ROOT.glob("lightning_sparse_cli/*.py")]:
        texts = []
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(_fixed(part) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
        found[file.relative_to(ROOT).as_posix()] = "\n".join(texts)
    return found


def parts(message: str) -> list[str]:
    """Those of a message that stand in the code."""
    return [part for part in re.split(r"…|(?<=[.:]) ", message) if part]


def places(message: str) -> list[str]:
    """Files of the code that have the long parts of a message.

    Raises:
        ValueError: if a part of it is in no file.
    """
    for part in parts(message):
        if not any(part in text for text in messages().values()):
            raise ValueError(f"Expected {part!r} in the code, for {message!r}: correct docs/site/errors.toml.")
    long = [part for part in parts(message) if len(part) >= TELLING]
    return [file for file, text in messages().items() if long and all(part in text for part in long)]


def errors() -> list[dict[str, Any]]:
    """Messages with what to do, and where the code has them."""
    every = tomllib.loads((HERE / "errors.toml").read_text(encoding="utf-8"))["error"]
    for one in every:
        found = [places(message) for message in one["messages"] if not message.startswith(LIGHTNINGS)]
        one["files"] = sorted({file for files in found for file in files})
    return every
