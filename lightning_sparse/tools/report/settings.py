"""Hyper-parameters and configuration of a run, from the files of loggers and LightningCLI beside its logs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MOST_BYTES = 2_000_000
"""Most bytes of a file beside the logs: PyYAML takes a minute for some megabytes."""
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
        if most is not None and (size := file.stat().st_size) > most:
            raise ValueError(f"Expected {file} to have at most {most:,} bytes, but it has {size:,}.")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Expected {file} to be a readable text file, but got: {error}.") from error


def settings_in(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Read the settings of ``hparams.yaml``, and of LightningCLI's ``config.yaml`` if it exists.

    Args:
        folder: of a run.

    Returns:
        Flattened settings; sentences about files that cannot be read, whose settings are unknown.

    Raises:
        ValueError: if PyYAML is missing.
    """
    found: dict[str, str] = {}
    notes = []
    for file in (folder / "config.yaml", folder / "hparams.yaml"):
        if file.is_file():
            need("yaml", "pyyaml", "cli", file)
            try:
                found |= _read(file)
            except ValueError as error:
                notes.append(f"Not all of its settings are known. {error}")
    return found, notes


def _read(file: Path) -> dict[str, str]:
    import yaml

    # In C if PyYAML has it: the one in Python takes seconds for some hundred levels.
    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Loader that replaces serialised objects by their names."""

    Loader.add_multi_constructor("", lambda _, tag, node: tag.rsplit(":", 1)[-1])
    text = text_of(file, MOST_BYTES)
    loader = None
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        if (values := _count(root, {})) > MOST_VALUES:
            raise _TooMany(values)
        loaded = loader.construct_document(root)
        fit = loaded.get("fit") if isinstance(loaded, Mapping) else None
        chosen = fit if fit and isinstance(fit, Mapping) else loaded
        if not (chosen is None or isinstance(chosen, Mapping)):
            raise ValueError(f"they are a {type(chosen).__name__}")
        return flat(chosen or {})
    except _TooMany as error:
        raise ValueError(f"Expected {file} to hold at most {MOST_VALUES:,} values, but it holds {error}.") from None
    except (RecursionError, yaml.YAMLError) as error:
        if isinstance(error, RecursionError) or "maximum nesting depth" in str(error):  # PyYAML from 6.0.4 on
            raise ValueError(f"Expected {file} to be settings by name, but they are nested too deeply.") from None
        raise ValueError(f"Expected {file} to be YAML, but it is broken in line {_line(error, text)}.") from error
    except Exception as error:  # constructors raise anything for, say, the date 2026-02-31
        raise ValueError(f"Expected {file} to be settings by name, but: {_one_line(error)}.") from error
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].removesuffix(".") or type(error).__name__


def flat(settings: Any, prefix: str = "") -> dict[str, str]:
    """Return nested settings as texts, by names with slashes.

    Args:
        settings: mappings, and lists that may hold mappings, of anything that has a text.
        prefix: before all names.

    Raises:
        RecursionError: if they are nested too deeply.
        ValueError: if a value has no text, such as a number of more than 4300 digits.

    Example:
        >>> flat({"lr": 0.1, "layers": [1, 2], "sparse_ddp": {"density": 0.01}})
        {'lr': '0.1', 'layers': '[1, 2]', 'sparse_ddp/density': '0.01'}
    """
    if isinstance(settings, Mapping) and (settings or not prefix):
        parts = [flat(value, f"{prefix}/{name}" if prefix else str(name)) for name, value in settings.items()]
        return {name: text for part in parts for name, text in part.items()}
    if isinstance(settings, list) and any(isinstance(one, Mapping) for one in settings):
        return flat(dict(enumerate(settings)), prefix)
    return {prefix: str(settings)}
