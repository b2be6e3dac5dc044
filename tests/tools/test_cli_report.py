"""The commands report and dashboard, examples in --help, and JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_sparse_cli as cli
from lightning_sparse_cli import commands
from tests.tools.report.made_up import compared

for needed in ("jsonargparse", "matplotlib", "plotly", "rich"):
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
    "dashboard --entity a/b --project c": "Expected entity to be one name without a slash, but got 'a/b'.",
}


@pytest.mark.parametrize("command", COMPLAINTS)
def test_bad_input_is_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if command.startswith("dashboard"):
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
def test_dashboard_writes_its_specification_without_an_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed")
    out = tmp_path / "dashboard.json"
    cli.main(["dashboard", "--entity", "team", "--project", "p", "--results", "val/loss", "--out", str(out)])
    assert json.loads(out.read_text())["displayName"] == "Sparsified training"
    assert capsys.readouterr().out == f"The specification is {out}.\n"


@pytest.mark.parametrize(("module", "package", "extra"), [("plotly", "plotly", "cli"), ("rich", "rich", "cli")])
def test_a_missing_package_of_report_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, extra: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == module else found(name))
    with pytest.raises(SystemExit, match=rf"needs {package}\. .*'lightning-sparse\[{extra}\]'"):
        cli.main(["report", "somewhere"])


@pytest.mark.parametrize(("module", "package"), [("wandb", "wandb"), ("wandb_workspaces", "wandb-workspaces")])
def test_a_missing_package_of_dashboard_is_named(monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == module else found(name) or found("json"))
    with pytest.raises(SystemExit, match=rf"needs {package}\. .*'lightning-sparse\[dashboard\]'"):
        cli.main(["dashboard", "--entity", "a", "--project", "b"])


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_has_examples_and_the_parser_takes_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    examples = re.findall(rf"^  lightning-sparse ({command} .*)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(examples) >= 2
    parser = cli._parser()
    for example in examples:
        parser.parse_args(shlex.split(example.partition(" > ")[0]))


@pytest.mark.parametrize(
    ("words", "close"),
    [(["repot", "x"], "report"), (["dashbord"], "dashboard"), (["report", "x", "--nams", "y"], "--names")],
)
def test_a_mistyped_word_is_answered_with_what_is_close(
    words: list[str], close: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    assert f"Did you mean {close}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "missing"), [("report", "runs"), ("dashboard", "--entity, --project"), ("advise", "--config")]
)
def test_what_is_missing_is_asked_for_by_its_name(
    command: str, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command])
    assert f"required: {missing}\n" in capsys.readouterr().err


def test_help_says_what_the_program_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert cli.PURPOSE in " ".join(capsys.readouterr().out.split())
