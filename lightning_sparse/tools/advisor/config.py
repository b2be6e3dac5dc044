"""Advice from a LightningCLI configuration: module, data and Trainer."""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from lightning_sparse.integrations import packages
from lightning_sparse.tools.advisor.run import Advice, advise, package_of
from lightning_sparse.tools.yaml_file import content_of, one_line

SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler")
"""Sections of every LightningCLI; others, such as ``ckpt_path``, belong to its subcommands."""


def advise_config(
    *paths: Path, model: str | None = None, data: str | None = None, **settings: Any
) -> tuple[Advice, dict[str, Any]]:
    """Advise for the training of a configuration.

    Args:
        paths: the configuration, flat as LightningCLI saves it or with its sections under ``fit``. With several files,
            later ones override earlier ones, as in LightningCLI.
        model: import path of the LightningModule, if the configuration has only its arguments.
        data: import path of the LightningDataModule, likewise.
        settings: of :func:`~lightning_sparse.tools.advisor.run.advise`.

    Returns:
        The advice, and the unchanged configuration.

    Raises:
        ValueError: if the file is no such configuration, or an error of ``advise``.
    """
    sections: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for path in paths:
        given, found = _load(path)
        sections = _merge(sections, found)
    if len(paths) > 1:
        given = sections
    for name, option in (("model", model), ("data", data)):
        if option is None and _class_path(sections.get(name)) is None and (name == "model" or sections.get(name)):
            raise ValueError(f"Expected the section {name!r} of {path} to have a class_path, or --{name} with one.")
    kept = {name: value for name, value in sections.items() if name in SECTIONS and value is not None}
    trainer = dict(kept.get("trainer") or {})
    strategy = trainer.pop("strategy", None)
    left_out = ("logger", "callbacks", "profiler")
    kept["trainer"] = {name: value for name, value in trainer.items() if name not in left_out}
    cli = _read(kept, model, data, paths)
    options = cli.config_init["trainer"].as_dict() | {"strategy": strategy}
    return advise(cli.model, cli.datamodule, trainer=options, **settings), given


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of a configuration file, and its sections."""
    given = content_of(path)
    sections = given.get("fit", given) if isinstance(given, dict) else None
    if not isinstance(sections, dict) or not isinstance(sections.get("trainer") or {}, dict):
        raise ValueError(f"Expected config to be a LightningCLI configuration with sections, but {path} is not.")
    return given, sections


def _merge(earlier: Any, later: Any) -> Any:
    """Merge a later configuration into an earlier one; arguments are merged for the same class only."""
    if not isinstance(earlier, dict) or not isinstance(later, dict):
        return later
    if earlier.get("class_path") not in (None, later.get("class_path", earlier.get("class_path"))):
        return later
    return earlier | {name: _merge(earlier.get(name), value) for name, value in later.items()}


def _read(sections: dict[str, Any], model: str | None, data: str | None, paths: Sequence[Path]) -> Any:
    """Instantiate module and data as LightningCLI does, and leave the Trainer to the advisor.

    Args:
        sections: of the configuration.
        model: import path; None: the section names a class.
        data: likewise.
        paths: of the configuration; paths in it are relative to the folder of the first one.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # classes are often in the working folder
    model_class, data_class = _class(model, "--model"), _class(data, "--data")
    package = _package(model_class, sections)
    command_line = importlib.import_module(f"{package}.cli").LightningCLI
    misfit = importlib.import_module(f"{package}.utilities.exceptions").MisconfigurationException

    class Reader(command_line):  # type: ignore[misc, valid-type]
        def parse_arguments(self, parser: Any, _: Any) -> None:
            with chdir(paths[0].parent):
                self.config = parser.parse_object(sections)

        def instantiate_trainer(self, **_: Any) -> None:
            return None

    try:
        return Reader(
            model_class=model_class,
            datamodule_class=data_class,
            subclass_mode_model=model is None,
            subclass_mode_data=data is None,
            save_config_callback=None,
            seed_everything_default=False,
            parser_kwargs={"exit_on_error": False},
            run=False,
        )
    except (ArgumentError, ValueError, misfit) as error:
        named = ", ".join(map(str, paths))
        raise ValueError(f"Expected {named} to be what LightningCLI accepts, but: {one_line(error, 2000)}") from error


def _package(model_class: Any, sections: dict[str, Any]) -> str:
    """Return the Lightning package of the model; the preferred one if LightningCLI has to find its class."""
    try:
        return package_of(model_class or _class(_class_path(sections["model"]), "class_path"))
    except ValueError:
        return packages.preferred()


def _class_path(section: Any) -> str | None:
    """Return the class path of a section, in either notation, or None."""
    found = section.get("class_path") if isinstance(section, dict) else section
    return found if isinstance(found, str) else None


def _class(path: str | None, option: str) -> Any:
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # TypeError: of a module in no package
        raise ValueError(f"Expected {option} to be an import path such as package.module.Class: {error}.") from error
