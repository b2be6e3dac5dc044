"""Runs read back from what the loggers leave, and what is said where that fails."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.tools import yaml_file
from lightning_sparse.tools.report.runs import Run, read_runs
from lightning_sparse.tools.report.wandb_file import read_wandb_file
from tests.tools.report.made_up import compared, rows, write_csv

pytest.importorskip("yaml", reason="pyyaml is not installed")


def test_csv_with_settings(tmp_path: Path) -> None:
    folder = write_csv(tmp_path / "run", rows(), lr=0.1, sparse_ddp={"density": 0.01}, layers=[1, 2])
    (folder / "config.yaml").write_text("seed_everything: 3\ntrainer:\n  strategy: !!python/object:x.Y {}\nlr: 9\n")
    (folder / "sparse").mkdir()
    (folder / "sparse" / "plan.csv").write_text("group,coordinates\nbucket0,120\n")
    [run] = read_runs([folder])
    assert run.name == "run"
    assert run.plan is not None
    assert (run.plan.header, run.plan.rows) == (["group", "coordinates"], [["bucket0", "120"]])
    assert run.steps == 300
    assert list(run.series["val/accuracy"].steps) == [99.0, 199.0, 299.0]
    assert run.settings == {
        "seed_everything": "3",
        "trainer/strategy": "x.Y",
        "lr": "0.1",
        "sparse_ddp/density": "0.01",
        "layers": "[1, 2]",
    }
    assert not run.notes


def test_a_folder_above_holds_several_runs_named_by_what_differs(tmp_path: Path) -> None:
    compared(tmp_path / "logs")
    assert [run.name for run in read_runs([tmp_path])] == ["dense", "top_k", "union_top_k"]
    for name in ("a", "b"):
        write_csv(tmp_path / "more" / name / "lightning_logs" / "version_0", rows(50))
    assert [run.name for run in read_runs([tmp_path / "more" / name for name in "ba"])] == ["b", "a"]
    assert [run.name for run in read_runs([tmp_path / "more"], ["x", "y"])] == ["x", "y"]


def test_a_line_that_was_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "run", rows()) / "metrics.csv"
    file.write_text(file.read_text()[:-9])
    [run] = read_runs([file])
    assert run.notes == ["The last line of metrics.csv was cut off and is left out."]
    assert len(run.series["val/accuracy"].steps) == 2


def test_a_step_that_was_logged_twice_counts_once(tmp_path: Path) -> None:
    [run] = read_runs(
        [write_csv(tmp_path / "r", [{"step": 1, "x": 1.0}, {"step": 0, "x": 3.0}, {"step": 1, "x": 2.0}])]
    )
    assert list(run.series["x"].steps) == [0.0, 1.0]
    assert list(run.series["x"].values) == [3.0, 2.0]


BROKEN = {
    "": "but nothing was logged there: the run has not come to its first logging step (log_every_n_steps",
    "step,lo": "but nothing was logged there",
    "step,loss\n0,1.": "but nothing was logged there",
    "epoch,loss\n0,1\n": "to have a column step, but its columns are: epoch, loss.",
    "step,loss\n0,\n": "but nothing was logged there",
    "step,loss\n0,1\n1,abc\n2,3\n": "but line 3 has 'abc' under 'loss' at step '1'.",
    "step,loss\n0,1\n1\n2,3\n": "Expected 2 cells in line 3 of",
    "step,loss\n\xff": "to be a readable text file, but got: ",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_log_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError) as error:
        read_runs([tmp_path])
    assert BROKEN[text] in str(error.value)
    assert str(tmp_path / "metrics.csv") in str(error.value)


def test_of_several_runs_those_that_logged_nothing_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "c"):
        write_csv(tmp_path / name, rows(30))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.csv").touch()
    assert [run.name for run in read_runs([tmp_path])] == ["a", "c"]
    [note] = caplog.messages
    assert note.startswith(f"A run is left out. Expected numbers in {tmp_path / 'b' / 'metrics.csv'}, but nothing was")
    assert [run.name for run in read_runs([tmp_path], ["first", "second"])] == ["first", "second"]


def test_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="but there is no such file or folder"):
        read_runs([tmp_path / "nothing"])
    with pytest.raises(ValueError, match=r"but found none of metrics.csv, run-\*.wandb, events.*there or below"):
        read_runs([tmp_path])
    (tmp_path / "x.txt").touch()
    with pytest.raises(ValueError, match=r"to be one of metrics\.csv"):
        read_runs([tmp_path / "x.txt"])
    with pytest.raises(ValueError, match=r"Expected 1 different names, for .*, but got a, b"):
        read_runs([write_csv(tmp_path / "run", rows(30))], ["a", "b"])


def test_a_missing_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run-a.wandb").touch()
    monkeypatch.setattr(yaml_file, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lightning-sparse\[wandb\]'"):
        read_runs([tmp_path])


def test_tensorboard(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "run"))
    for step in range(3):
        value = Summary.Value(tag="val/loss", simple_value=0.5 * step)
        writer.add_event(Event(step=step, wall_time=100.0 + 2 * step, summary=Summary(value=[value])))
    writer.close()
    (tmp_path / "run" / "hparams.yaml").write_text("lr: 0.1\n")
    [run] = read_runs([tmp_path])
    assert list(run.series["val/loss"].values) == [0.0, 0.5, 1.0]
    assert run.settings == {"lr": "0.1"}
    assert run.clock is not None
    assert list(run.clock.values) == [0.0, 2.0, 4.0]


@pytest.fixture(scope="module")
def logged_to_wandb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an offline run, of more than one block."""
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    folder = tmp_path_factory.mktemp("wandb")
    settings = wandb.Settings(silent=True, x_disable_stats=True, x_disable_meta=True, console="off")
    run = wandb.init(mode="offline", dir=folder, config={"lr": 0.1, "sparse_ddp": {"density": 0.01}}, settings=settings)
    for row in rows():
        step = row.pop("step")
        run.log({**row, "trainer/global_step": step})
    run.log({"sparse/plan": wandb.Table(columns=["group"], data=[["bucket0"]]), "trainer/global_step": 300})
    run.finish()
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 20
    while read_wandb_file(file)[2] and time.monotonic() < deadline:
        time.sleep(0.1)  # W&B's own process may still be writing when `finish` returns
    return file


@pytest.mark.thorough
@pytest.mark.slow
def test_wandb_offline_and_csv_are_read_alike(logged_to_wandb: Path, tmp_path: Path) -> None:
    def values(run: Run) -> dict[str, Any]:
        return {name: (list(one.steps), list(one.values)) for name, one in run.series.items()}

    assert logged_to_wandb.stat().st_size > 45_000  # more than a block of 32 KiB
    [run] = read_runs([logged_to_wandb.parent])
    [same] = read_runs([write_csv(tmp_path / "run", rows())])
    assert values(run) == values(same)
    assert run.plan is not None
    assert run.plan.rows == [["bucket0"]]
    assert run.settings == {"lr": "0.1", "sparse_ddp/density": "0.01"}
    assert run.clock is not None
    assert run.clock.values[0] == 0.0
    assert not run.notes

    whole, cut = logged_to_wandb.read_bytes(), tmp_path / "run-cut.wandb"
    cut.write_bytes(whole[:45_000])
    [run] = read_runs([cut])
    assert run.notes == ["run-cut.wandb has no end: the run still writes, or was killed."]
    assert 5 < len(run.series["train/loss"].steps) < 30
    cut.write_bytes(whole[:40_000] + b"\x00\x01\x02" + whole[40_003:])
    with pytest.raises(ValueError, match=r"to be whole, but it is broken after \d+ of"):
        read_runs([cut])
    cut.write_bytes(b"something else")
    with pytest.raises(ValueError, match="it does not begin like one"):
        read_runs([cut])
