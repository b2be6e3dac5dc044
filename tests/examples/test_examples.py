"""Every example's `--fast`, from its command line to what it leaves behind."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.engine.optimizers.kinds import check_pair
from tests.examples import made_up
from tests.warm import warm_python

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("not_launched")]


def run(command: list[str], folder: Path, errors: int = subprocess.STDOUT, **environment: str) -> str:
    """Standard output, and errors beside it if nothing else is said."""
    given = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"} | environment
    result = subprocess.run(
        command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=110
    )
    assert result.returncode == 0, result.stdout[-5000:]
    return result.stdout


def command_line(script: str, *arguments: str, configs: tuple[str, ...] = ("base",)) -> list[str]:
    given = [f"--config={ROOT / 'configs' / name}.yaml" for name in configs]
    return [warm_python(), str(EXAMPLES / script), "fit", *given, "--fast", "--trainer.accelerator=cpu", *arguments]


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of each quantity."""
    [path] = folder.glob("lightning_logs/version_0/metrics.csv")
    series: dict[str, list[tuple[int, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    series.setdefault(name, []).append((int(row["step"]), float(value)))
    return series


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    made_up.wikitext2(folder / "text" / "wikitext-2-v1.zip")
    made_up.cifar10_binary(folder / "images" / "cifar-10-batches-bin")
    return {"wikitext2": folder / "text", "cifar10": folder / "images"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "source", "smaller", "result", "sparsifier"),
    [
        (
            "gpt_wikitext2",
            "wikitext2",
            "--data.words=150 --data.batch_size=4 --model.layers=1",
            "val/perplexity",
            "exdyna",
        ),
        ("lora_gpt", None, "--data.batch_size=2", "val/perplexity", "union_top_k"),
        ("lstm_wikitext2", "wikitext2", "--data.words=150", "val/perplexity", "top_k"),
        ("resnet18_cifar10", "cifar10", "--data.batch_size=8", "val/accuracy", "union_top_k"),
    ],
)
def test_models_that_people_recognise(
    data: dict[str, Path], tmp_path: Path, script: str, source: str | None, smaller: str, result: str, sparsifier: str
) -> None:
    where = [f"--data.dir={data[source]}"] if source else []
    output = run(command_line(f"{script}.py", *where, *smaller.split(), configs=("base", sparsifier)), tmp_path)
    assert "Warning" not in output.replace("FutureWarning", ""), output  # Lightning's own, under this torch
    found = logged(tmp_path)
    assert [step for step, _ in found[result]] == [9, 19]
    assert [step for step, _ in found["train/loss"]] == [9, 19]
    assert all(
        density == pytest.approx(0.01, rel=0.1) or sparsifier == "top_k" for _, density in found["sparse/density"]
    )
    assert "step_ms" in found
    if script == "lora_gpt":
        assert "49,152" in output  # coordinates of the adapters: all that is exchanged
        assert "keeps 0.393 MB" in output
        assert "stay dense" not in output  # nothing else is


@pytest.mark.parametrize(
    ("script", "model", "data_class", "config"),
    [
        ("lstm_wikitext2", "LSTM", "WikiText2", "dgc"),
        ("resnet18_cifar10", "ResNet18", "CIFAR10", "adam_correction"),
        ("gpt_wikitext2", "GPT", "WikiText2", "epochs"),
    ],
)
def test_configurations_go_with_models(
    monkeypatch: pytest.MonkeyPatch, script: str, model: str, data_class: str, config: str
) -> None:
    pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")
    from pytorch_lightning.cli import LightningCLI

    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls what it deprecates
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [script])
    module = importlib.import_module(script)
    args = [f"--config={ROOT / 'configs' / name}.yaml" for name in ("base", config)]
    args += ["--trainer.accelerator=cpu", "--trainer.logger=false"]
    cli = LightningCLI(getattr(module, model), getattr(module, data_class), run=False, args=args)
    if config == "epochs":
        assert cli.trainer.max_epochs == 30
    else:
        optimizer = torch.optim.SGD(cli.model.parameters(), lr=cli.model.lr, momentum=cli.model.momentum)
        check_pair(cli.trainer.strategy.config.memory_in_use, optimizer)


def test_fabric(tmp_path: Path) -> None:
    output = run([warm_python(), str(EXAMPLES / "fabric_digits.py"), "--fast", "--sparsifier=exdyna"], tmp_path)
    assert "step 20: loss" in output
    assert "after a last step with what was not sent (norm" in output
    found = logged(tmp_path)
    assert [step for step, _ in found["val/accuracy"]] == [10, 20]
    assert found["sparse/density"][-1][1] == pytest.approx(0.01, rel=0.1)


def test_accordion_changes_the_densities_of_layers(tmp_path: Path) -> None:
    output = run([warm_python(), str(EXAMPLES / "accordion.py"), "--fast"], tmp_path)
    found = re.findall(r"^step (\d+): (\d) of 4 layers are critical", output, re.MULTILINE)
    assert [step for step, _ in found] == ["5", "10", "15", "20"]
    assert found[0][1] == "4" and min(number for _, number in found) < "4"
    assert "dense DDP sends 4.67 MB" in output


@pytest.mark.parametrize(
    ("now", "critical"), [(1.49, False), (1.5, True), (0.5, True), (0.51, False), (math.nan, True)]
)
def test_accordion_compares_norms_with_the_one_before(
    monkeypatch: pytest.MonkeyPatch, now: float, critical: bool
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    callback = importlib.import_module("accordion").Accordion(0.01, 0.1, 5)
    assert callback.changes(None, now) and callback.changes(1.0, now) == critical


@pytest.mark.thorough
def test_plain_ddp_on_two_nodes(tmp_path: Path) -> None:
    output = run(["bash", str(EXAMPLES / "two_nodes.sh"), "--fast"], tmp_path, PYTHON=warm_python())
    lines = [line for line in output.splitlines() if line.startswith("step")]
    assert [line.split(":")[0] for line in lines] == ["step 10", "step 20"]
    assert "density 0.0100" in lines[1]


def sharded(folder: Path, *options: str) -> list[str]:
    """What the example of sharded replicas prints, on four processes."""
    script = [str(EXAMPLES / "hsdp_gpt.py"), *options]
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", *script]
    return run(command, folder, errors=subprocess.DEVNULL).splitlines()


@pytest.mark.thorough
def test_sharded_replicas(tmp_path: Path) -> None:
    [*steps, end] = (line for line in sharded(tmp_path, "--fast") if line.startswith(("step", "a rank")))
    assert [line.split(":")[0] for line in steps] == ["step 10", "step 20"]
    assert "a rank keeps 1.88 MB" in end and "densely 18.82 MB" in end


@pytest.mark.thorough
def test_sharded_replicas_go_on_as_others(tmp_path: Path) -> None:
    sharded(tmp_path, "--steps=10", "--checkpoint=kept")
    lines = sharded(tmp_path, "--fast", "--replicas=4", "--checkpoint=kept")
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == ["step 20"]


@pytest.mark.thorough
def test_plain_ddp_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    nodes = ["bash", str(EXAMPLES / "two_nodes.sh"), "--checkpoint=kept"]
    run([*nodes, "--steps=10"], tmp_path, PYTHON=warm_python())
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"shared.pt", "sparse_0.pt", "sparse_1.pt"}
    output = run([*nodes, "--fast"], tmp_path, PYTHON=warm_python())
    assert [line.split(":")[0] for line in output.splitlines() if line.startswith("step")] == ["step 20"]


@pytest.mark.thorough
def test_two_nodes_end_when_one_of_them_fails(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(3)\ntime.sleep(200)\n")
    result = subprocess.run(
        ["bash", str(EXAMPLES / "two_nodes.sh")],
        env=os.environ | {"PYTHON": warm_python(), "SCRIPT": str(script), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=100,
    )
    assert result.returncode != 0


def test_files_for_schedulers_start_the_example_with_arguments_that_it_knows() -> None:
    """They are not run: no such scheduler is here."""
    import yaml

    job = yaml.safe_load((EXAMPLES / "kubeflow_trainjob.yaml").read_text())
    assert (job["kind"], job["spec"]["trainer"]["command"]) == ("TrainJob", ["torchrun"])
    script, *arguments = job["spec"]["trainer"]["args"]
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    command = task["run"].replace("\\\n", " ").split("torchrun")[1].split()
    in_clouds = command[command.index("examples/plain_ddp.py") :]
    known = run([warm_python(), str(ROOT / script), "--help"], ROOT, subprocess.PIPE)
    for given in (arguments, in_clouds[1:]):
        options = [word for word in given if word.startswith("--")]
        assert options
        assert all(option in known for option in options)
    assert task["num_nodes"] == job["spec"]["trainer"]["numNodes"] == 2


def test_slurm_script(tmp_path: Path) -> None:
    """With commands in the place of SLURM's and Python, which say what they are called with."""
    script = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    said = tmp_path / "said"
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "python").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\n')
    for name in ("srun", "python"):
        (tmp_path / name).chmod(0o700)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    run(["bash", str(script), "--config", "configs/exdyna.yaml"], tmp_path, PATH=path, **job)
    arguments = said.read_text().splitlines()
    assert arguments[:2] == ["examples/gpt_wikitext2.py", "fit"]
    printed = run([warm_python(), *arguments, "--print_config"], ROOT, subprocess.PIPE)

    import yaml

    config: dict[str, Any] = yaml.safe_load(printed[printed.index("seed_everything") :])
    trainer = config["trainer"]
    assert (trainer["num_nodes"], trainer["devices"], trainer["accelerator"]) == (2, "4", "gpu")
    assert trainer["enable_checkpointing"]
    assert trainer["strategy"]["init_args"]["sparsifier"]["class_path"].endswith("ExDyna")
    asked = [line.split()[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=SIGUSR1@90", "--nodes=2", "--ntasks-per-node=4"} <= set(asked)


@pytest.mark.thorough
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("nbclient", "ipykernel"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    import nbclient
    import nbformat

    def pictures(notebook: Any) -> int:
        outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
        return sum("image/png" in output.get("data", {}) for output in outputs)

    kernel = tmp_path / "kernels" / "warm"
    kernel.mkdir(parents=True)
    arguments = [warm_python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": arguments, "display_name": "warm", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(EXAMPLES / "simulate.ipynb", 4)
    assert pictures(notebook) == 3  # for those who only look at it
    [setting] = [cell for cell in notebook.cells if "STEPS, DENSITY" in cell.source]
    setting.source = setting.source.replace("= 4, 300, ", "= 4, 15, ")
    assert " 15, " in setting.source
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="warm").execute()
    assert pictures(notebook) == 3
    printed = "".join(
        output.text for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "stream"
    )
    assert "UnionTopK" in printed
    assert "union_top_k density 0.0100" in printed
