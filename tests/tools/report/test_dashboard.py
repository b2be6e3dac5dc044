"""The workspace for W&B, by the classes of wandb-workspaces, and the sweep file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.engine.metrics import QUANTITIES
from lightning_sparse.tools.report.catalog import SECTIONS
from lightning_sparse.tools.report.dashboard import publish_workspace, workspace, write_specification

pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")  # in wandb-workspaces


@pytest.mark.thorough
def test_the_specification_is_a_workspace_with_the_papers_figures(tmp_path: Path) -> None:
    from wandb_workspaces.workspaces import Workspace, internal

    made = workspace("team", "project", "Digits", ["train/loss"])
    path = write_specification(made, tmp_path / "new" / "dashboard.json")
    read = Workspace._from_model(internal.View.model_validate_json(path.read_text()))
    assert (read.entity, read.project, read.name) == ("team", "project", "Digits")
    results, *others = read.sections
    assert [(str(panel.x), [str(y) for y in panel.y]) for panel in results.panels] == [
        (f"Metric(name='{x}')", ["Metric(name='train/loss')"])
        for x in ("trainer/global_step", "sparse/traffic/total_mb", "sparse/time/total_s")
    ]
    assert [section.name for section in others] == [section.title for section in SECTIONS]
    drawn = {
        panel.title: [y.name for y in panel.y] for section in others for panel in section.panels if hasattr(panel, "y")
    }
    assert drawn["Density of the update"] == ["sparse/density", "sparse/target_density"]
    assert drawn["Padding ratio f(t)"] == ["sparse/padding_ratio"]
    assert drawn["Threshold / norm of the residual"] == ["sparse/threshold_over_residual"]
    [times] = [panel for section in others for panel in section.panels if not hasattr(panel, "y")]
    assert [one.name for one in times.metrics] == [
        f"sparse/time/{name}_ms" for name in ("select", "exchange", "exposed")
    ]


@pytest.mark.parametrize("wrong", [("", "project"), ("team/x", "project"), ("team", "")])
def test_names_that_are_none_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"Expected (entity|project) to be one name without a slash"):
        workspace(*wrong, "Digits", [])


def test_publishing_needs_an_account_and_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    made = workspace("team", "project", "Digits", [])
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    with pytest.raises(ValueError, match="call wandb login"):
        publish_workspace(made)
    monkeypatch.setattr(wandb, "login", lambda **_: True)

    def save(self: Any) -> Any:
        raise RuntimeError("no such project")

    monkeypatch.setattr(type(made), "save", save)
    with pytest.raises(ValueError, match="did not: no such project"):
        publish_workspace(made)


def test_all_quantities_have_a_figure() -> None:
    figures = [figure for section in SECTIONS for figure in section.figures]
    drawn = {name.removeprefix("sparse/") for figure in figures for name in (figure.name, figure.reference) if name}
    # The clock is an axis.
    assert drawn == QUANTITIES.keys() - {"time/total_s"}
