"""A Weights & Biases workspace with the figures of a report, by wandb-workspaces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_sparse.tools.report.catalog import EXCHANGE, EXPOSED, SECONDS, SECTIONS, SELECT, TOTAL_MB, Figure

STEP = "trainer/global_step"
"""Axis of Lightning's logs in W&B."""
AXES = {"optimizer steps": STEP, "MB sent by a rank": TOTAL_MB, "seconds of training": SECONDS}
"""Axes of results."""


def workspace(entity: str, project: str, name: str, results: Sequence[str]) -> Any:
    """Make a workspace: results against steps, megabytes and seconds, then all of a report's figures.

    Args:
        entity: user or team that owns the project.
        project: that the runs are logged to.
        name: of the workspace.
        results: logged quantities of the training, such as ``val/loss``.

    Returns:
        A ``wandb_workspaces.workspaces.Workspace`` that is not online yet.

    Raises:
        ValueError: if a name is empty or W&B does not allow it.
    """
    for field, value in (("entity", entity), ("project", project)):
        if not value or "/" in value:
            raise ValueError(f"Expected {field} to be one name without a slash, but got {value!r}.")
    os.environ.setdefault("WANDB_SILENT", "true")  # it prints a line on accounts when it is imported
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports import v2

    wr: Any = v2  # type checkers do not see its names

    def line(title: str, x: str, y: Sequence[str], **settings: Any) -> Any:
        return wr.LinePlot(title=title, x=x, y=list(y), **settings)

    def against_steps(figure: Figure) -> Any:
        names = [figure.name, *([figure.reference] if figure.reference else [])]
        return line(figure.title, STEP, names, title_x="optimizer steps", ignore_outliers=True)

    against = [
        line(f"{result} against {title}", x, [result], title_x=title, log_x=x == TOTAL_MB)
        for result in results
        for title, x in AXES.items()
    ]
    sections = [ws.Section(name="Results", panels=against, is_open=True)]
    for section in SECTIONS:
        panels = [against_steps(figure) for figure in section.figures]
        if section.title == "Time":
            panels.insert(0, wr.BarPlot(title="Times of a step / ms", metrics=[SELECT, EXCHANGE, EXPOSED]))
        sections.append(ws.Section(name=section.title, panels=panels, is_open=section.title != "Steps"))
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections, auto_generate_panels=False)


def write_specification(made: Any, path: Path) -> Path:
    """Write the workspace as JSON, as it would be sent to W&B; no account is needed.

    Args:
        made: by :func:`workspace`.
        path: of the file; its folder is made.

    Raises:
        ValueError: if the file cannot be written, in one sentence.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=1), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"Expected out to be a file to write to, but got {path}: {error.strerror}.") from error
    return path


def publish_workspace(made: Any) -> str:
    """Save a workspace online.

    Args:
        made: by :func:`workspace`.

    Returns:
        Its address.

    Raises:
        ValueError: without an account, project or network, in one sentence.
    """
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ValueError("Expected to be logged in to W&B, to publish: call wandb login, or set WANDB_API_KEY.")
    try:
        return str(made.save().url)
    except Exception as error:  # any error of the server or the network
        raise ValueError(f"Expected W&B to save the workspace, but it did not: {error}") from error
