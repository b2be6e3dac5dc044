"""The commands, from their options to the files they leave."""

from __future__ import annotations

import csv
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("rich", reason="rich is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import lightning_sparse_cli as cli
from lightning_sparse.tools.compare import figures, recorded, tasks, training
from lightning_sparse_cli import commands
from lightning_sparse_cli.output import print_json

SIMULATE = ["simulate", "--streams", "heavy_tail", "--ranks", "2", "--densities", "0.01", "0.001", "--steps", "4"]
JUDGE = ["judge", "--tasks", "digits", "--ranks", "2", "--densities", "0.1", "--seeds", "0", "1", "--steps", "3"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "digits", partial(tasks.digits, width=2))
    monkeypatch.setattr(recorded, "heavy_tail", partial(tasks.heavy_tail, numel=2000))


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "simulate_figures", lambda *_: [])
    monkeypatch.setattr(figures, "judge_figures", lambda *_: [])


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_simulate_leaves_numbers_tables_and_a_figure_for_each_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main([*SIMULATE, "--methods", "top_k", "micro", f"--out={tmp_path / 'x'}"])
    rows = lines(tmp_path / "x" / "simulate.csv")
    assert [(row["stream"], row["ranks"], row["density"], row["method"]) for row in rows] == [
        ("heavy_tail", "2", density, method) for density in ("0.01", "0.001") for method in ("top_k", "micro")
    ]
    assert float(rows[0]["bytes_sent"]) == 4 + 20 * 8
    assert rows[1]["relative_density_error"] == "0.0"
    written = (tmp_path / "x" / "simulate.md").read_text()
    assert written.count("### heavy_tail, 2 ranks, density") == 2
    assert all(f"- {name}: {meaning}." in written for name, meaning in recorded.QUANTITIES.items())
    pictures = sorted(path.name for path in (tmp_path / "x").glob("*.svg"))
    assert pictures == sorted(
        f"simulate_{name}.svg"
        for name in (
            "relative_density_error",
            "steps_to_target",
            "padding_ratio",
            "build_up",
            "estimate",
            "captured",
            "bytes_sent",
        )
    )
    shown, progress = capsys.readouterr()
    assert "4/4" in progress
    assert "heavy_tail, 2 ranks, density 0.01, 4 steps, seed 0" in shown
    assert f"Tables, numbers and figures are in {tmp_path / 'x'}." in shown.replace("\n", "")


def test_judge_leaves_numbers_curves_tables_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([*JUDGE, "--methods", "top_k", "--every", "2", "--out", str(tmp_path)])
    rows = lines(tmp_path / "judge.csv")
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("dense", "0"),
        ("top_k", "0"),
        ("dense", "1"),
        ("top_k", "1"),
    ]
    curves = lines(tmp_path / "judge_curves.csv")
    assert [(row["method"], row["step"]) for row in curves[:4]] == [
        (m, s) for m in ("dense", "top_k") for s in ("2", "3")
    ]
    assert curves[1]["loss"] == rows[0]["loss"]
    written = (tmp_path / "judge.md").read_text()
    assert written.startswith("### digits, 2 ranks, 3 steps, bytes of MiCRO at density 0.1\n")
    assert {path.name for path in tmp_path.glob("*.svg")} == {"judge_loss.svg", "judge_quality.svg"}
    shown = capsys.readouterr().out
    assert "loss, seed 1" in shown
    assert "accuracy" in shown


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("cut", [0, 1, 30])
def test_what_was_simulated_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    command = [*SIMULATE, "--methods", "top_k", "micro", "--out", str(tmp_path)]
    cli.main(command)
    path = tmp_path / "simulate.csv"
    whole, tables = path.read_bytes(), (tmp_path / "simulate.md").read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    done = []
    original = recorded.compare
    monkeypatch.setattr(recorded, "compare", lambda g, m, d: done.append((m.name, d)) or original(g, m, d))
    cli.main(command)
    assert done == ([("micro", 0.001)] if cut else [])
    assert path.read_bytes() == whole
    assert (tmp_path / "simulate.md").read_bytes() == tables


@pytest.mark.usefixtures("without_figures")
def test_an_interrupted_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*JUDGE, "--methods", "top_k", "--out"]
    cli.main([*command, str(tmp_path / "whole")])
    original, done = training.execute, []

    def execute(job: training.Job) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job.key)
        return original(job)

    monkeypatch.setattr(training, "execute", execute)
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, str(tmp_path / "parts")])
    assert stop.value.code == 130
    assert capsys.readouterr().err.endswith("Interrupted. The same command goes on from here.\n")
    assert len(lines(tmp_path / "parts" / "judge.csv")) == 2
    monkeypatch.setattr(training, "execute", lambda job: done.append(job.key) or original(job))
    cli.main([*command, str(tmp_path / "parts")])
    assert len(done) == len(set(done)) == 4
    for name in ("judge.csv", "judge_curves.csv", "judge.md"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("command", "note"), [("simulate", " The same command goes on from here."), ("advise", "")], ids=str
)
def test_only_what_keeps_results_is_said_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, note: str
) -> None:
    def interrupt(config: str = "", **_: Any) -> None:
        raise KeyboardInterrupt

    stopped = create_autospec(cli.COMMANDS[command], side_effect=interrupt)
    parser = cli._parser()
    monkeypatch.setattr(cli, "_parser", lambda: parser)
    monkeypatch.setitem(cli.COMMANDS, command, stopped)
    with pytest.raises(SystemExit):
        cli.main([command, *(["--config", "x.yaml"] if command == "advise" else [])])
    assert capsys.readouterr().err.endswith(f"Interrupted.{note}\n")


def test_versions_need_no_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    cli.main(["--version"])
    assert f"torch {torch.__version__}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("without_figures")
def test_a_diverging_method_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explosive(*, momentum: float = 0.9, **settings: Any) -> tasks.Task:
        optimizer = partial(torch.optim.SGD, lr=1e30 if momentum == 0 else 0.05)
        return tasks.digits(width=2, optimizer=optimizer, **settings)

    monkeypatch.setitem(tasks.TASKS, "digits", explosive)
    cli.main([*JUDGE, "--steps=8", "--methods", "union_top_k+momentum", "top_k", "--out", str(tmp_path)])
    found = {(row["method"], row["loss"] == "nan") for row in lines(tmp_path / "judge.csv")}
    assert found == {("dense", False), ("top_k", False), ("union_top_k+momentum", True)}
    assert "diverged | diverged" in (tmp_path / "judge.md").read_text()
    assert {row["method"] for row in lines(tmp_path / "judge_curves.csv")} == {"dense", "top_k"}


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (
            ["simulate", "--streams", "digit"],
            "Unknown stream 'digit'. Did you mean 'digits'? Known names: digits, heavy_tail,",
        ),
        (["simulate", "--methods", "top_k", "tpok"], "Unknown method 'tpok'. Did you mean 'top_k'"),
        (["simulate", "--methods", "null"], "Unknown method 'null'."),
        (["simulate", "--densities", "0.1", "2"], "Expected density to be a number in (0, 1]"),
        (["simulate", "--ranks", "0"], "Expected ranks to be at least 1, but got 0."),
        (["simulate", "--steps", "-1"], "Expected steps to be at least 1, but got -1."),
        (
            ["simulate", "--text", "no/file.txt"],
            "Expected text to be a file in UTF-8, but got no/file.txt: No such file",
        ),
        (["simulate", "--streams", "text", "--text", "{binary}"], "binary: invalid start byte."),
        (["judge", "--tasks", "text", "--text", "{short}"], "Expected at least 32 examples to train on"),
        (["judge", "--tasks", "heavy_tail"], "Unknown task 'heavy_tail'. Known names: digits, text."),
        (["judge", "--tasks", "digits", "--ranks", "90"], "Expected at least 1440 examples to train on"),
        (["judge", "--ranks", "1"], "Expected ranks to be at least 2, but got 1."),
        (["simulate", "--seed", str(2**64)], "Expected seeds to be numbers of 64 bits"),
        (["judge", "--jobs", "0"], "Expected jobs to be at least 1, but got 0."),
        (["judge", "--out", "{short}"], "short: File exists."),
        (["judge", "--out", "{other}"], "judge.csv to have the columns task, ranks,"),
        (["judge", "--out", "{broken}"], "judge_curves.csv, but got the line"),
    ],
)
def test_bad_input_is_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], complaint: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    (tmp_path / "short").write_text("too short")
    for name in ("other", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "judge.csv").write_text("a,b\n")
    (tmp_path / "broken" / "judge_curves.csv").write_text(
        ",".join(training.CurvePoint._fields) + "\n" + "x," * 9 + "x\n"
    )
    paths = {name: tmp_path / name for name in ("binary", "short", "other", "broken")}
    out = [] if "--out" in args else ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        cli.main([arg.format(**paths) if arg.startswith("{") else arg for arg in args] + out)
    answer = capsys.readouterr()
    assert stop.value.code == 2
    assert answer.err.startswith(f"lightning-sparse {args[0]}: ")
    assert complaint in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], 'expected "subcommand" to be one of {probe,advise,simulate,judge,report, ...}'),
        (["train"], "invalid choice: 'train'"),
        (["simulat"], "Did you mean simulate?"),
        (["simulate", "--bogus", "4"], "unrecognized arguments: --bogus"),
        (["simulate", "--stepz", "4"], "unrecognized arguments: --stepz 4. Did you mean --steps?"),
        (["simulate", "--step", "4"], "unrecognized arguments: --step 4. Did you mean --steps?"),
        (["judge", "--gbit", "1"], "unrecognized arguments: --gbit 1\n"),
        (["judge", "--confg", "x"], "Did you mean --config?"),
        (["--versoin"], "Did you mean --version?"),
        (["simulate", "--config", "missing.yaml"], "error: Expected --config to be a file: no '"),
        (["simulate", "--config", "misspelt.yaml"], "does not accept option 'stepz'. Did you mean steps?"),
        (["simulate", "--config", "binary.yaml"], "error: Expected --config to be a file in UTF-8: "),
        (["simulate", "--config", "no_list.yaml"], "error: Expected a list of values in --config, but got one int"),
        (["simulate", "--ranks=4", "8"], "unrecognized arguments: 8"),
        (["advise"], "the following arguments are required: --config"),
        (["simulate", "--ranks", "four"], "Got value: four"),
        (["simulate", "--ranks"], "expected at least one argument"),
        (["judge", "--steps", "many"], "Got value: many"),
    ],
)
def test_options_that_cannot_be_read_are_answered_with_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("misspelt.yaml").write_text("stepz: 4\n")
    Path("binary.yaml").write_bytes(b"\xff\xfe")
    Path("no_list.yaml").write_text("ranks: 4\n")
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == 2
    answer = capsys.readouterr().err
    assert "usage: lightning-sparse" in answer
    assert complaint in answer


@pytest.mark.parametrize("command", ["simulate", "judge", "advise"])
def test_help_explains_every_option(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    documented = inspect.cleandoc(cli.COMMANDS[command].__doc__ or "").split("Args:")[1]  # 3.13 cleans by itself
    options = inspect.signature(cli.COMMANDS[command]).parameters
    for name in options:
        assert f"--{name}" in shown
        [explanation] = [line.split(": ", 1)[1] for line in documented.splitlines() if line.startswith(f"    {name}: ")]
        assert explanation.strip() in shown


def parsed(*args: str) -> dict[str, Any]:
    return cli._parser().parse_args(["simulate", *args]).simulate.as_dict()


def test_lists_are_written_with_spaces_and_in_files_as_lists(tmp_path: Path) -> None:
    assert parsed("--ranks", "4", "8", "--seed", "1")["ranks"] == [4, 8]
    assert parsed("--ranks=4")["ranks"] == [4]
    assert parsed("--methods", "top_k", "no")["methods"] == ["top_k", "no"]  # no YAML
    assert parsed("--out=a=b")["out"] == Path("a=b")
    assert (parsed()["ranks"], parsed()["methods"]) == ([4, 8, 16], None)
    (tmp_path / "x.yaml").write_text("ranks: [2, 3]\nsteps: 7\nmethods: [top_k]\n")
    file = parsed("--config", str(tmp_path / "x.yaml"), "--steps", "9")
    assert (file["ranks"], file["steps"], file["methods"]) == ([2, 3], 9, ["top_k"])


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_torch_and_lightning_are_not_waited_for(option: str) -> None:
    program = (
        "import sys\nfrom lightning_sparse_cli import main\ntry:\n    main([sys.argv[1]])\nexcept SystemExit as stop:\n"
        "    assert not stop.code\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'lightning_sparse', 'matplotlib', 'numpy', 'rich'}\n"
        "print('imported:', *sorted(heavy & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    started = time.perf_counter()
    command = [sys.executable, "-c", program, option]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[-1].split() == ["imported:"]
    assert time.perf_counter() - started < 20  # a fifth of a second on an idle machine
    if option == "--version":
        names = [
            "lightning-sparse",
            "torch",
            "pytorch-lightning",
            "lightning",
            "numpy",
            "python",
            "device:",
            "kernels",
            "kernels",
        ]
        assert [line.split()[0] for line in shown[:-1]] == names
        assert f"torch {torch.__version__}" in shown


@pytest.mark.parametrize(
    ("module", "package", "args"),
    [
        ("jsonargparse", "jsonargparse", ["--help"]),
        ("rich", "rich", SIMULATE),
        ("matplotlib", "matplotlib", JUDGE),
        ("sklearn", "scikit-learn", JUDGE),
        ("yaml", "pyyaml", ["advise", "--config", "x.yaml"]),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, args: list[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == module else found(name))
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == (
        f"The command lightning-sparse needs {package}. "
        "Install what is missing with: pip install 'lightning-sparse[cli]'"
    )


def test_the_benchmark_asks_for_what_the_documentation_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "compare_sparsifiers.py"
    spec = importlib.util.spec_from_file_location("compare_sparsifiers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    simulate, judge = create_autospec(cli.simulate), create_autospec(cli.judge)
    monkeypatch.setattr(module, "simulate", simulate)
    monkeypatch.setattr(module, "judge", judge)
    module.main(tmp_path, 2)
    opened, closed = simulate.call_args.kwargs, judge.call_args.kwargs
    assert opened["ranks"] == [4, 8, 16]
    assert opened["streams"] == list(recorded.STREAMS)
    assert opened["densities"] == closed["densities"] == [0.01, 0.001]
    assert closed["tasks"] == list(tasks.TASKS)
    assert len(closed["seeds"]) == 3
    assert (opened["out"], closed["out"], closed["jobs"]) == (tmp_path / "simulate", tmp_path / "judge", 2)
    assert "methods" not in opened | closed  # all


@pytest.mark.usefixtures("without_figures")
def test_json_is_the_only_output_and_has_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([*SIMULATE, "--methods", "top_k", "micro", "--json", "--out", str(tmp_path / "simulate")])
    simulated = json.loads(capsys.readouterr().out)
    assert [(row["density"], row["method"]) for row in simulated] == [
        (density, method) for density in (0.01, 0.001) for method in ("top_k", "micro")
    ]
    assert simulated[0]["bytes_sent"] == 4 + 20 * 8
    cli.main([*JUDGE, "--methods", "top_k", "--json", "--out", str(tmp_path / "judge")])
    assert [row["method"] for row in json.loads(capsys.readouterr().out)] == ["dense", "top_k", "dense", "top_k"]


def test_json_has_no_number_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"a": float("nan"), "b": (1.5, float("inf"))}])
    assert json.loads(capsys.readouterr().out) == [{"a": None, "b": [1.5, None]}]
