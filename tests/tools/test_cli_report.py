"""The command report, and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_sparse_cli as cli
from tests.tools.report.made_up import compared

for needed in ("matplotlib", "plotly", "rich"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")


def test_report_leaves_a_page_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run) for run in compared(tmp_path / "runs")]
    page = tmp_path / "new" / "page.html"
    cli.main(["report", *runs, "--names", "dense DDP", "a", "b", "--title", "Digits", "--out", str(page)])
    assert "<title>Digits</title>" in page.read_text()
    shown = capsys.readouterr().out
    assert "dense DDP" in shown
    assert f"The page is {page}." in shown.replace("\n", "")
    cli.main(["report", str(tmp_path / "runs"), "--out", str(page), "--json"])
    dense, top_k, _ = json.loads(capsys.readouterr().out)
    assert (dense["run"], dense["sent_mb"], dense["assumed"]) == ("dense", pytest.approx(75), True)
    assert top_k["results"]["val/accuracy"] == pytest.approx(0.968, abs=1e-3)
    assert top_k["dense_over_sent"] == pytest.approx(1 / 0.023)


COMPLAINTS = {
    "report nothing_there": "Expected a run in nothing_there, but there is no such file or folder.",
    f"report {'x' * 300}": "xxx, but got: File name too long.",
    "report . --out .": "Expected a run in ., but found none of metrics.csv",
    "report": "Expected folders of runs, or --workspace with a project of W&B, but got neither.",
    "report . --publish": "Expected --workspace with a project of W&B, to publish there, but got none.",
    "report --workspace a/b/c": "Expected project to be one name without a slash, but got 'b/c'.",
}


@pytest.mark.parametrize("command", COMPLAINTS)
def test_bad_input_is_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "workspace" in command:
        pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(command.split())
    assert stop.value.code == 2
    answer = capsys.readouterr().err
    assert COMPLAINTS[command] in answer
    assert answer.count("\n") == 1


def test_runs_that_are_not_there_are_answered_before_anything_is_imported(tmp_path: Path) -> None:
    heavy = "{'lightning_sparse', 'matplotlib', 'numpy', 'plotly', 'pytorch_lightning', 'torch'}"
    code = f"""
import sys
from lightning_sparse_cli import main
try:
    main(["report", "nothere", "--svg", "figures"])
except SystemExit as stop:
    print(stop.code, sorted({heavy} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert found.stdout == "2 []\n", found.stderr
    expected = "lightning-sparse report: Expected a run in nothere, but there is no such file or folder.\n"
    assert found.stderr == expected


def test_what_is_odd_about_runs_is_said_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    dense, union, _ = compared(tmp_path / "runs")
    (dense / "metrics.csv").write_text("step,loss\ninf,1\n")
    (union / "hparams.yaml").write_text("a: [1\n")
    cli.main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html"), "--json"])
    shown = capsys.readouterr()
    assert [run["run"] for run in json.loads(shown.out)] == ["top_k", "union_top_k"]
    [left_out] = caplog.messages
    assert left_out == (f"A run is left out. Expected steps from 0 on in {dense / 'metrics.csv'}, but line 2 has inf.")
    assert shown.err.startswith("union_top_k: Not all of its settings are known. Expected ")
    assert shown.err.count("\n") == 1
    assert "<li>union_top_k: Not all of its settings are known." in (tmp_path / "page.html").read_text()


@pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")
def test_a_workspace_is_written_without_an_account_beside_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed")
    out = tmp_path / "here.html"
    command = ["report", "--workspace", "team/p", "--results", "val/loss", "--out", str(out)]
    cli.main(command)
    made = out.with_suffix(".json")
    assert json.loads(made.read_text())["displayName"] == "Sparsified training"
    assert capsys.readouterr().out == f"The specification of the workspace is {made}.\n"
    assert not out.exists()
    cli.main([*command, *(str(run) for run in compared(tmp_path / "runs")), "--title", "Mine", "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert "<title>Mine</title>" in out.read_text()
    assert json.loads(made.read_text())["displayName"] == "Mine"
