"""The command ``lightning-sparse advise``, from its options to a training with what it wrote."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="pyyaml is not installed")
pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("rich", reason="rich is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import yaml

import lightning_sparse_cli as cli
from lightning_sparse.tools.advisor import config
from lightning_sparse.tools.advisor.prediction import TRIED
from tests.tools.advisor.made_up import advice, predicted
from tests.warm import warm_python

ROOT = Path(__file__).parents[3]
TOY: dict[str, Any] = {
    "trainer": {"accelerator": "cpu", "devices": 1},
    "model": {"class_path": "tests.tools.advisor.toys.Toy"},
}


@pytest.fixture(autouse=True)
def unchanged_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls what it deprecates


def written(folder: Path, content: Any) -> str:
    path = folder / "given.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize("out", ["/proc/self/task", "{file}", "{file}/below"])
def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    if out.startswith("/proc") and not Path(out).is_dir():
        pytest.skip("no folder here that nobody may write into")
    monkeypatch.setattr(config, "advise_config", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stop:
        cli.main(["advise", "--config", "some.yaml", "--out", out.format(file=tmp_path / "file")])
    assert stop.value.code == 2
    assert "advise: Expected out to be a folder" in capsys.readouterr().err


def test_nothing_is_left_in_a_folder_that_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(*_: Any, **__: Any) -> Any:
        assert list(tmp_path.iterdir()) == []
        raise ValueError("enough")

    monkeypatch.setattr(config, "advise_config", stand_in)
    with pytest.raises(SystemExit):
        cli.main(["advise", "--config", "some.yaml", "--out", str(tmp_path)])


def test_options_reach_the_advisor_and_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    asked: dict[str, Any] = {}
    found = advice([predicted("top_k", 0.5, 0.01, "layer", 3), predicted("dgc", 0.7, 0.1)])

    def stand_in(*paths: Path, **settings: Any) -> Any:
        asked.update(settings, config=paths)
        return found, TOY

    monkeypatch.setattr(config, "advise_config", stand_in)
    command = ["advise", "--config", "some.yaml", "over.yaml", "--config=it.yaml", "--sparsifiers", "top_k", "dgc"]
    command += ["--ranks", "8", "64", "--gbit", "1", "2.5", "--rtt", "20", "80"]
    command += ["--densities", "0.1", "0.01", "--warmup=2", "--steps=3", "--model", "a.B", "--data", "c.D"]
    cli.main([*command, "--out", str(tmp_path / "x" / "y")])
    assert asked.pop("progress")
    assert asked == {
        "config": (Path("some.yaml"), Path("over.yaml"), Path("it.yaml")),
        "ranks": [8, 64],
        "gbit": [1.0, 2.5],
        "rtt": [20.0, 80.0],
        "sparsifiers": ["top_k", "dgc"],
        "densities": [0.1, 0.01],
        "warmup": 2,
        "steps": 3,
        "model": "a.B",
        "data": "c.D",
    }
    files = sorted(path.name for path in (tmp_path / "x" / "y").iterdir())
    assert {"advice.csv", "advice.md", "advice.png", "config.yaml"} <= set(files)
    assert len([name for name in files if name.startswith("config")]) == len(found.scenarios)
    shown = " ".join(capsys.readouterr().out.split())
    assert found.verdict() in shown
    assert "top_k <- use" in shown
    assert all(sentence in shown for sentence in found.assumptions())
    cli.main([*command, "--json", "--out", str(tmp_path)])
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["verdicts"].values()) == [found.verdict(scenario) for scenario in found.scenarios]
    assert [one["method"] for one in printed["predictions"]] == [one.method for one in found.predictions]


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    found = advice([predicted("top_k", 2.0)])
    monkeypatch.setattr(config, "advise_config", lambda path, **settings: asked.update(settings) or (found, TOY))
    monkeypatch.chdir(tmp_path)
    cli.main(["advise", "--config", "some.yaml"])
    assert asked["ranks"] == asked["gbit"] == []
    assert asked["densities"] == [0.1, 0.01, 0.001]
    assert (asked["sparsifiers"], asked["warmup"], asked["steps"]) == (None, 5, 10)
    assert (tmp_path / "advice" / "advice.md").exists()


@pytest.mark.usefixtures("not_launched")
@pytest.mark.parametrize(
    ("content", "options", "complaint"),
    [
        (None, [], "No such file"),
        ("a: [1\n", [], "to be YAML, but it is broken in line 2"),
        ({"model": {"width": 3}}, [], "to have a class_path, or --model with one."),
        (TOY, ["--model", "nowhere.Toy"], "Expected --model to be an import path"),
        (TOY | {"trainer": {"devcies": 2}}, [], "does not accept option 'devcies'"),
        (TOY, ["--ranks", "0", "--gbit", "1"], "Expected ranks to be a positive integer, but got 0."),
        (TOY, [], "there is one rank only: give ranks and gbit (--ranks 8 --gbit 10), or devices in the trainer."),
        (TOY, ["--sparsifiers", "top_k", "tpok"], "Unknown sparsifier 'tpok'. Did you mean 'top_k'"),
        (TOY, ["--out", "{file}"], "Expected out to be a folder, but got"),
    ],
)
def test_bad_input_is_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, options: list[str], complaint: str
) -> None:
    path = str(tmp_path / "missing.yaml") if content is None else written(tmp_path, content)
    (tmp_path / "file").write_text("")
    options = [option.format(file=tmp_path / "file") for option in options]
    out = [] if "--out" in options else ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        cli.main(["advise", "--config", path, *options, *out])
    assert stop.value.code == 2
    answer = capsys.readouterr()
    *before, last = answer.err.splitlines()
    assert last.startswith("lightning-sparse advise: ")
    assert complaint in last
    lightning = ("GPU", "TPU", "\U0001f4a1")
    assert [line for line in before if line and not line.startswith(lightning)] == []
    assert answer.out == ""


MODEL = """
import time
import pytorch_lightning as pl
import torch

class Napping(pl.LightningModule):
    def __init__(self, nap: float):
        super().__init__()
        self.nap = nap
        self.net = torch.nn.Linear(10, 3)
        self.spare = torch.nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        time.sleep(self.nap)
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 10), batch_size=8)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        strategy = type(self.trainer.strategy).__name__
        print(f"TRAINED {self.global_rank} {self.global_step} {strategy}\\n", end="", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("not_launched")
def test_advice_for_two_devices_and_a_training_with_it(tmp_path: Path) -> None:
    folder, scripts = tmp_path / "here", tmp_path / "bin"
    for made in (folder, scripts):
        made.mkdir()
    (folder / "napping.py").write_text(MODEL)
    # As installed commands are: not in the folder of the call, where the model's class is.
    (scripts / "advise.py").write_text("from lightning_sparse_cli import main\n\nmain()\n")
    (folder / "train.py").write_text("from pytorch_lightning.cli import LightningCLI\n\nLightningCLI()\n")
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_find_unused_parameters_true", "max_epochs": 5}
    given = {
        "seed_everything": 1,
        "trainer": trainer | quiet | {"logger": False},
        "model": {"class_path": "napping.Napping", "init_args": {"nap": 0.05}},
        "ckpt_path": None,
    }
    path = written(folder, given)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            [warm_python(), *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=140
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return result

    options = ["--gbit", "1", "10", "--ranks", "8", "64", "--sparsifiers", "top_k", "--densities", "0.01"]
    out = folder / "said"
    for _ in range(2):  # times of three steps, beside other work on the same cores, may mislead once
        asked = run(str(scripts / "advise.py"), "advise", "--config", path, *options, "--steps=3", "--out=said")
        if "2 ranks, measured: stay dense" in asked.stdout:
            break
    configs = ["config.yaml", *(f"config-{n}-ranks-{rate}-gbit.yaml" for n in (8, 64) for rate in (1, 10))]
    assert {file.name for file in out.iterdir()} == {"advice.csv", "advice.md", "advice.png", *configs}
    assert all(f"/{name} (" in asked.stdout for name in configs)
    verdict = (out / "advice.md").read_text().splitlines()[0]
    assert verdict.startswith("- 2 ranks, measured: stay dense")
    assert verdict.removeprefix("- ") in asked.stdout
    assert asked.stdout.count("What to use where") == 1  # one process of the two
    assert asked.stderr.count("timing top_k at 0.01") == 1
    networks = ["2 ranks, measured", *(f"{n} ranks, {rate} Gbit/s" for n in (8, 64) for rate in (1, 10))]
    assert all(f"\n{network}: " in asked.stdout for network in networks)
    with (out / "advice.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 5 * (4 + len(TRIED))
    after = yaml.safe_load((out / "config.yaml").read_text())
    strategy = {"class_path": "DDPStrategy", "init_args": {"find_unused_parameters": True}}
    assert after == given | {"trainer": given["trainer"] | {"strategy": strategy}}
    trained = run("train.py", "fit", "--config", str(out / "config.yaml"), "--trainer.max_steps=3")
    lines = sorted(line for line in trained.stdout.splitlines() if line.startswith("TRAINED"))
    assert lines == ["TRAINED 0 3 DDPStrategy", "TRAINED 1 3 DDPStrategy"]
