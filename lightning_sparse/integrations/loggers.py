"""Logging of settings, texts, tables, figures and alerts, in the form that each logger can show.

Weights & Biases, TensorBoard and MLflow get their own formats; all others get files in their folder. Everything here
is for rank zero.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.core.console import Table
from lightning_sparse.engine.metrics import QUANTITIES

AXIS = "trainer/global_step"
"""W&B's default axis of quantities."""
PREFIX = "sparse/"


def kind_of(logger: Any) -> str:
    """Return "wandb", "tensorboard" or "mlflow"; empty for all others."""
    kinds = {"WandbLogger": "wandb", "TensorBoardLogger": "tensorboard", "MLFlowLogger": "mlflow"}
    return next((kinds[one.__name__] for one in type(logger).__mro__ if one.__name__ in kinds), "")


def log_settings(logger: Any, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Log hyper-parameters, by part and name, and no metric with them."""
    given = {part: dict(values) for part, values in settings.items()}
    match kind_of(logger):
        case "tensorboard":  # which else adds a metric, hp_metric
            logger.log_hyperparams(given, metrics={})
            _write_settings_again(logger)
        case "mlflow":  # which refuses to change values of an earlier fit
            known = logger.experiment.get_run(logger.run_id).data.params
            if new := {name: value for name, value in _by_path(given) if name not in known}:
                logger.log_hyperparams(new)
        case _:
            logger.log_hyperparams(given)


def _by_path(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings by names with slashes; as text if keys are no names for MLflow, such as patterns."""
    for name, value in settings.items():
        if not isinstance(value, Mapping):
            yield f"{above}{name}", value
        elif value and all(re.fullmatch(r"\w+", key, re.ASCII) for key in value):
            yield from _by_path(value, f"{above}{name}/")
        else:
            yield f"{above}{name}", str(value)


def _write_settings_again(logger: Any) -> None:
    """Rewrite ``hparams.yaml`` of Lightning's TensorBoardLogger, which it writes once, too early."""
    if name := getattr(logger, "NAME_HPARAMS_FILE", None):
        Path(logger.log_dir, name).unlink(missing_ok=True)
        logger.save()


def define_axes(logger: Any) -> None:
    """Set steps as the axis of all quantities in W&B, and the summaries of a run; totals can be chosen as axes."""
    if kind_of(logger) != "wandb":
        return
    define = logger.experiment.define_metric
    define(AXIS)
    define(f"{PREFIX}*", step_metric=AXIS)
    for name, one in QUANTITIES.items():
        define(f"{PREFIX}{name}", step_metric=AXIS, summary=one.over_run)


def log_warning(logger: Any, kind: str, sentence: str, step: int) -> None:
    """Log an alert in W&B, a text in TensorBoard, a tag in MLflow, else a line in ``sparse/warnings.txt``."""
    match kind_of(logger):
        case "wandb":
            logger.experiment.alert(title=f"lightning-sparse: {kind}", text=sentence, level="WARN")
        case "tensorboard":
            logger.experiment.add_text(f"{PREFIX}warnings/{kind}", sentence, step)
        case "mlflow":
            logger.experiment.set_tag(logger.run_id, f"{PREFIX}warnings/{kind}", sentence[:5000])
        case _:
            if (path := _file(logger, "warnings.txt")) is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.write(sentence + "\n")


def log_table(logger: Any, name: str, table: Table, step: int) -> None:
    """Log a table in W&B, a text in TensorBoard, a markdown artifact in MLflow, else ``sparse/<name>.csv``."""
    match kind_of(logger):
        case "wandb":
            rows = [
                [cell if column in table.left else _number(cell) for column, cell in enumerate(row)]
                for row in table.rows
            ]
            logger.log_table(f"{PREFIX}{name}", columns=list(table.header), data=rows, step=step)
        case "tensorboard":
            logger.experiment.add_text(f"{PREFIX}{name}", table.markdown(), step)
        case "mlflow":
            logger.experiment.log_text(logger.run_id, table.markdown(), f"{PREFIX}{name}.md")
        case _:
            if (path := _file(logger, f"{name}.csv")) is not None:
                with path.open("w", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerows([table.header, *table.rows])


def log_figure(
    logger: Any, name: str, data: Mapping[str, Any], draw: Callable[[], Any], step: int, histogram: Tensor | None = None
) -> None:
    """Log an image if the logger shows images and matplotlib is installed; else the data as a JSON file.

    Args:
        logger: of Lightning.
        name: under ``sparse/``.
        data: of the figure: numbers, texts, lists.
        draw: makes a figure of matplotlib.
        step: of the Trainer.
        histogram: values for a histogram beside the figure in W&B and TensorBoard.
    """
    kind, key = kind_of(logger), f"{PREFIX}{name}"
    if kind in ("", "mlflow"):
        text, file = json.dumps({"step": step, **data}, indent=1), f"{name}/step-{step:06d}.json"
        if kind == "mlflow":
            logger.experiment.log_text(logger.run_id, text, PREFIX + file)
        elif (path := _file(logger, file)) is not None:
            path.write_text(text, encoding="utf-8")
        return
    figure = draw() if find_spec("matplotlib") else None
    if kind == "tensorboard":
        if histogram is not None:
            logger.experiment.add_histogram(key, histogram, step)
        if figure is not None:
            logger.experiment.add_figure(f"{key}/figure", figure, step)
        return
    import wandb

    if histogram is not None:
        counts, edges = torch.histogram(histogram.double(), 64)  # made here, because W&B needs equal bins
        bars = wandb.Histogram(np_histogram=(counts.numpy(), edges.numpy()))
        logger.log_metrics({f"{key}/histogram": bars}, step)
    if figure is not None:
        logger.log_metrics({key: wandb.Image(figure)}, step)


def _file(logger: Any, name: str) -> Path | None:
    """Return the path of a file in a logger's folder; None if the folder is not on this machine."""
    folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
    if not isinstance(folder, (str, Path)) or "://" in str(folder):  # the logger of fast_dev_run returns functions
        return None
    path = Path(folder) / PREFIX / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _number(cell: str) -> float | None:
    """Convert a cell to a number, which W&B sorts as such; None for an empty cell."""
    plain = cell.replace(",", "")
    return (float(plain) if "." in plain or "e" in plain else int(plain)) if plain else None
