"""Files in YAML that may come from anywhere: what is wrong with one is a sentence that names it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

MOST_BYTES = 2_000_000
"""Most bytes of a file: PyYAML takes a minute for some megabytes."""
MOST_VALUES = 100_000
"""Most values of a file, with those of aliases: each may be ten others."""


def need(module: str, package: str, extra: str | None, file: Path) -> None:
    """Raise a ``ValueError`` with the command to install a package, if it is missing."""
    if find_spec(module) is None:
        install = f"'lightning-sparse[{extra}]'" if extra else package
        raise ValueError(f"Expected {package} to be installed, to read {file}: pip install {install}.")


def text_of(file: Path, most: int | None = None) -> str:
    """Return the text of a file.

    Args:
        file: in UTF-8.
        most: largest number of bytes; None: any number.

    Raises:
        ValueError: if it cannot be read, or is larger; in one sentence.
    """
    try:
        size = file.stat().st_size
        if not (file.is_file() or file.is_dir()):  # pipes and devices might have no end
            raise ValueError(f"Expected {file} to be a file, but it is none.")
        if most is not None and size > most:
            raise ValueError(f"Expected {file} to have at most {most:,} bytes, but it has {size:,}.")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Expected {file} to be a readable text file, but got: {error}.") from error


def content_of(file: Path, names_for_objects: bool = False) -> Any:
    """Return the plain data in a file of YAML; None if there is none.

    Args:
        file: in UTF-8.
        names_for_objects: take the names of serialised objects in their place, which are an error else.

    Raises:
        ValueError: if PyYAML is missing, or the file cannot be read or holds too much; in one sentence.
    """
    need("yaml", "pyyaml", "cli", file)
    import yaml

    # In C if PyYAML has it: the one in Python takes seconds for some hundred levels.
    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Loader of this file alone."""

    if names_for_objects:
        Loader.add_multi_constructor("", lambda _, tag, node: tag.rsplit(":", 1)[-1])
    text = text_of(file, MOST_BYTES)
    loader = None
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        if (values := _count(root, {})) > MOST_VALUES:
            raise _TooMany(values)
        return loader.construct_document(root)
    except _TooMany as error:
        raise ValueError(f"Expected {file} to hold at most {MOST_VALUES:,} values, but it holds {error}.") from None
    except (RecursionError, yaml.YAMLError) as error:
        if isinstance(error, RecursionError) or "maximum nesting depth" in str(error):  # PyYAML from 6.0.4 on
            raise ValueError(f"Expected {file} to be settings by name, but they are nested too deeply.") from None
        raise ValueError(f"Expected {file} to be YAML, but it is broken in line {_line(error, text)}.") from error
    except Exception as error:  # constructors raise anything for, say, the date 2026-02-31
        raise ValueError(f"Expected {file} to be settings by name, but: {one_line(error)}.") from error
    finally:
        if loader is not None:
            loader.dispose()


class _TooMany(Exception):
    """More values than allowed."""

    def __str__(self) -> str:
        values = self.args[0]
        return f"{values:,}" if values < 1e12 else "more than 1e12"


def _count(node: Any, known: dict[int, int]) -> int:
    """Count the values of a tree of YAML nodes, with those of the anchor for each alias."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # of a node within itself
        inner = [node.value] if isinstance(node.value, str) else node.value
        parts = [part for one in inner for part in (one if isinstance(one, tuple) else (one,))]
        known[id(node)] = 1 + sum(_count(part, known) for part in parts if not isinstance(part, str))
    return known[id(node)]


def _line(error: Any, text: str) -> int:
    """Return the line of a YAML error."""
    mark = getattr(error, "problem_mark", None)
    return int(mark.line + 1) if mark is not None else text.count("\n", 0, getattr(error, "position", 0)) + 1


def one_line(error: Exception, most: int = 200) -> str:
    """Return the message of an error in one line, or its type if it has none."""
    return " ".join(str(error).split())[:most].rstrip(" .^") or type(error).__name__
