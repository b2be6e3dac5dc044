"""Hyper-parameters and configuration of a run, from the files of loggers and LightningCLI beside its logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_sparse.tools.yaml_file import content_of, need, one_line


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
    loaded = content_of(file, names_for_objects=True)
    fit = loaded.get("fit") if isinstance(loaded, Mapping) else None
    chosen = fit if fit and isinstance(fit, Mapping) else loaded
    if not (chosen is None or isinstance(chosen, Mapping)):
        raise ValueError(f"Expected {file} to be settings by name, but: they are a {type(chosen).__name__}.")
    try:
        return flat(chosen or {})
    except RecursionError:
        raise ValueError(f"Expected {file} to be settings by name, but they are nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"Expected {file} to be settings by name, but: {one_line(error)}.") from error


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
