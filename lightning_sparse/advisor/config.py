"""From a LightningCLI configuration to a module, its data and its Trainer."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning_sparse import packages
from lightning_sparse.advisor.run import Advice, advise

SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler")
"""What every LightningCLI knows; others, such as ``ckpt_path``, belong to its subcommands."""


def advise_config(
    path: Path, *, model: str | None = None, data: str | None = None, **settings: Any
) -> tuple[Advice, dict[str, Any]]:
    """Advise for the training that a configuration describes.

    Args:
        path: the configuration, flat as LightningCLI saves it or with its sections under ``fit``.
        model: import path of the LightningModule, where the configuration has only its arguments.
        data: import path of the LightningDataModule, likewise.
        settings: of :func:`~lightning_sparse.advisor.run.advise`.

    Returns:
        The advice, and the configuration as it was.

    Raises:
        ValueError: if the file is no such configuration, or as ``advise`` says.
    """
    import yaml

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"Expected config to be a LightningCLI configuration in YAML, but {path}: {error}") from error
    sections = given.get("fit", given) if isinstance(given, dict) else None
    if not isinstance(sections, dict) or not isinstance(sections.get("trainer", {}), dict):
        raise ValueError(f"Expected config to be a LightningCLI configuration with sections, but {path} is none.")
    if model is None and not isinstance(sections.get("model"), dict):
        raise ValueError(f"Expected {path} to have a section 'model', or --model with an import path.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # classes are often in the folder that the command is called in
    kept = {name: value for name, value in sections.items() if name in SECTIONS and value is not None}
    trainer = dict(kept.get("trainer") or {})
    for name in ("logger", "callbacks"):
        trainer.pop(name, None)
    strategy = trainer.pop("strategy", None)
    kept["trainer"] = trainer | {"logger": False}
    cli = _read(kept, model, data)
    options = {name: value for name, value in cli.config_init["trainer"].items() if name not in ("strategy",)}
    advice = advise(cli.model, cli.datamodule, trainer=options | {"strategy": _strategy_name(strategy)}, **settings)
    return advice, given


def _strategy_name(strategy: Any) -> str | None:
    """The name, or something with the same way to start processes and the same treatment of unused parameters."""
    if not isinstance(strategy, dict):
        return strategy if isinstance(strategy, str) else None
    settings = strategy.get("init_args") or {}
    start = {"spawn": "_spawn", "fork": "_fork"}.get(settings.get("start_method", "popen"), "")
    unused = "_find_unused_parameters_true" if settings.get("find_unused_parameters") else ""
    return f"ddp{start}{unused}"


def _read(sections: dict[str, Any], model: str | None, data: str | None) -> Any:
    """Instantiate module and data as LightningCLI does, and leave the Trainer to the advisor."""
    import yaml

    name = packages.preferred()
    command_line = importlib.import_module(f"{name}.cli").LightningCLI

    class Reader(command_line):  # type: ignore[misc, valid-type]
        def instantiate_trainer(self, **_: Any) -> None:
            return None

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        try:
            return Reader(
                model_class=_class(model, "model"),
                datamodule_class=_class(data, "data"),
                subclass_mode_model=model is None,
                subclass_mode_data=data is None,
                save_config_callback=None,
                args=["--config", str(path)],
                run=False,
            )
        except SystemExit as error:
            raise ValueError("Expected a configuration that LightningCLI accepts; what it said is above.") from error


def _class(path: str | None, option: str) -> Any:
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"Expected --{option} to be an import path such as package.module.Class: {error}.") from error
