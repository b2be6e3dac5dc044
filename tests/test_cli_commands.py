"""The commands, from their options to the files they leave."""

from __future__ import annotations

import csv
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("rich", reason="rich is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from lightning_sparse import cli
from lightning_sparse.bench import compare, runs, tasks

SIMULATE = ["simulate", "--streams", "heavy_tail", "--ranks", "2", "--densities", "0.01", "0.001", "--steps", "4"]
JUDGE = ["judge", "--tasks", "digits", "--ranks", "2", "--densities", "0.1", "--seeds", "0", "1", "--steps", "3"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "digits", partial(tasks.digits, width=2))
    monkeypatch.setattr(compare, "heavy_tail", partial(tasks.heavy_tail, numel=2000))


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "simulate_figures", lambda *_: [])
    monkeypatch.setattr(cli, "judge_figures", lambda *_: [])


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_simulate_leaves_numbers_tables_and_a_figure_for_each_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main([*SIMULATE, "--methods", "topk", "micro", f"--out={tmp_path / 'x'}"])
    rows = lines(tmp_path / "x" / "simulate.csv")
    assert [(row["stream"], row["ranks"], row["density"], row["method"]) for row in rows] == [
        ("heavy_tail", "2", density, method) for density in ("0.01", "0.001") for method in ("topk", "micro")
    ]
    assert float(rows[0]["bytes_sent"]) == 4 + 20 * 8
    assert rows[1]["density_error"] == "0.0"
    written = (tmp_path / "x" / "simulate.md").read_text()
    assert written.count("### heavy_tail, 2 ranks, density") == 2
    assert all(f"- {name}: {meaning}." in written for name, meaning in compare.QUANTITIES.items())
    pictures = sorted(path.name for path in (tmp_path / "x").glob("*.png"))
    assert pictures == sorted(
        f"simulate_{name}.png"
        for name in (
            "density_error",
            "steps_to_target",
            "padding_ratio",
            "build_up",
            "estimate",
            "captured",
            "bytes_sent",
        )
    )
    shown = capsys.readouterr().out
    assert "4/4" in shown  # the progress bar
    assert "heavy_tail, 2 ranks, density 0.01, 4 steps, seed 0" in shown
    assert f"Tables, numbers and figures are in {tmp_path / 'x'}." in shown.replace("\n", "")


def test_judge_leaves_numbers_curves_tables_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([*JUDGE, "--methods", "topk", "--every", "2", "--out", str(tmp_path)])
    rows = lines(tmp_path / "judge.csv")
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("dense", "0"),
        ("topk", "0"),
        ("dense", "1"),
        ("topk", "1"),
    ]
    curves = lines(tmp_path / "judge_curves.csv")
    assert [(row["method"], row["step"]) for row in curves[:4]] == [
        (m, s) for m in ("dense", "topk") for s in ("2", "3")
    ]
    assert curves[1]["loss"] == rows[0]["loss"]
    written = (tmp_path / "judge.md").read_text()
    assert written.startswith("### digits, 2 ranks, 3 steps, bytes of MiCRO at density 0.1\n")
    assert {path.name for path in tmp_path.glob("*.png")} == {"judge_loss.png", "judge_quality.png"}
    shown = capsys.readouterr().out
    assert "loss, seed 1" in shown
    assert "accuracy" in shown


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("cut", [0, 1, 30])
def test_what_was_simulated_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    command = [*SIMULATE, "--methods", "topk", "micro", "--out", str(tmp_path)]
    cli.main(command)
    path = tmp_path / "simulate.csv"
    whole, tables = path.read_bytes(), (tmp_path / "simulate.md").read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    done = []
    original = compare.compare
    monkeypatch.setattr(compare, "compare", lambda g, m, d: done.append((m.name, d)) or original(g, m, d))
    cli.main(command)
    assert done == ([("micro", 0.001)] if cut else [])
    assert path.read_bytes() == whole
    assert (tmp_path / "simulate.md").read_bytes() == tables


@pytest.mark.usefixtures("without_figures")
def test_an_interrupted_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*JUDGE, "--methods", "topk", "--out"]
    cli.main([*command, str(tmp_path / "whole")])
    original, done = runs.execute, []

    def execute(job: runs.Job) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job.key)
        return original(job)

    monkeypatch.setattr(runs, "execute", execute)
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, str(tmp_path / "parts")])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "Interrupted. The same command goes on from here.\n"
    assert len(lines(tmp_path / "parts" / "judge.csv")) == 2
    monkeypatch.setattr(runs, "execute", lambda job: done.append(job.key) or original(job))
    cli.main([*command, str(tmp_path / "parts")])
    assert len(done) == len(set(done)) == 4
    for name in ("judge.csv", "judge_curves.csv", "judge.md"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.usefixtures("without_figures")
def test_a_diverging_method_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explosive(*, momentum: float = 0.9, **settings: Any) -> tasks.Task:
        optimizer = tasks.optimizer_of("SGD", lr=1e30 if momentum == 0 else 0.05)
        return tasks.digits(width=2, optimizer=optimizer, **settings)

    monkeypatch.setitem(tasks.TASKS, "digits", explosive)
    cli.main([*JUDGE, "--steps=8", "--methods", "union_topk+momentum", "topk", "--out", str(tmp_path)])
    found = {(row["method"], row["loss"] == "nan") for row in lines(tmp_path / "judge.csv")}
    assert found == {("dense", False), ("topk", False), ("union_topk+momentum", True)}
    assert "diverged | diverged" in (tmp_path / "judge.md").read_text()
    assert {row["method"] for row in lines(tmp_path / "judge_curves.csv")} == {"dense", "topk"}


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["simulate", "--streams", "digit"], "Unknown streams digit. Known: digits, text, heavy_tail."),
        (["simulate", "--methods", "topk", "tpok"], "Unknown methods tpok. Known: topk, dgc,"),
        (["simulate", "--methods", "null"], "Unknown methods null."),
        (["simulate", "--densities", "0.1", "2"], "Expected density to be a number in (0, 1]"),
        (["simulate", "--ranks", "0"], "Expected ranks to be at least 1 but got 0."),
        (["simulate", "--ranks=[]"], "Expected at least one of ranks but got none."),
        (["simulate", "--steps", "-1"], "Expected steps to be at least 1 but got -1."),
        (
            ["simulate", "--text", "no/file.txt"],
            "Expected text to be a file in UTF-8 but got no/file.txt: No such file",
        ),
        (["simulate", "--streams", "text", "--text", "{binary}"], "binary: invalid start byte."),
        (["judge", "--tasks", "text", "--text", "{short}"], "Expected at least 32 examples to train on"),
        (["judge", "--tasks", "heavy_tail"], "Unknown tasks heavy_tail. Known: digits, text."),
        (["judge", "--tasks", "digits", "--ranks", "90"], "Expected at least 1440 examples to train on"),
        (["judge", "--ranks", "1"], "Expected ranks to be at least 2 but got 1."),
        (["judge", "--jobs", "0"], "Expected jobs to be at least 1 but got 0."),
        (["judge", "--out", "{short}"], "short: File exists."),
        (["judge", "--out", "{other}"], "judge.csv to have the columns task, ranks,"),
        (["judge", "--out", "{broken}"], "judge_curves.csv but got the line"),
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
    (tmp_path / "broken" / "judge_curves.csv").write_text(",".join(runs.CurvePoint._fields) + "\n" + "x," * 9 + "x\n")
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
        ([], 'expected "subcommand" to be one of {simulate,judge,advise}'),
        (["train"], "invalid choice: 'train'"),
        (["simulate", "--bogus", "4"], "--bogus"),
        (["simulate", "--ranks", "four"], "Got value: four"),
        (["simulate", "--ranks"], "expected one argument"),
        (["judge", "--steps", "many"], "Got value: many"),
    ],
)
def test_options_that_cannot_be_read_are_answered_with_usage(
    capsys: pytest.CaptureFixture[str], args: list[str], complaint: str
) -> None:
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
    documented = (cli.COMMANDS[command].__doc__ or "").split("Args:")[1]
    options = cli.inspect.signature(cli.COMMANDS[command]).parameters
    for name in options:
        assert f"--{name}" in shown
        [explanation] = [
            line.split(": ", 1)[1] for line in documented.splitlines() if line.startswith(f" {'':7}{name}: ")
        ]
        assert explanation.strip() in shown


def test_lists_may_be_written_in_several_ways() -> None:
    def joined(*args: str) -> list[str]:
        return cli._join_lists(["simulate", *args])[1:]

    assert joined("--ranks", "4", "8", "--seed", "1") == ["--ranks=[4, 8]", "--seed", "1"]
    assert joined("--ranks=4", "8") == ["--ranks=[4, 8]"]
    assert joined("--ranks=[4, 8]") == ["--ranks", "[4, 8]"]
    assert joined("--methods", "topk", "no") == ['--methods=["topk", "no"]']
    assert joined("--methods=topk") == ['--methods=["topk"]']
    assert joined("--out=a=b", "--text", "x") == ["--out=a=b", "--text", "x"]
    assert cli._join_lists(["other", "--ranks", "4"]) == ["other", "--ranks", "4"]
    assert cli._join_lists([]) == []


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
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == module else found(name))
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == (
        f"The command lightning-sparse needs {package}. "
        "Install what is missing with: pip install 'lightning-sparse[cli]'"
    )


def test_the_benchmark_asks_for_what_the_documentation_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = Path(__file__).parent.parent / "benchmarks" / "compare_sparsifiers.py"
    spec = importlib.util.spec_from_file_location("compare_sparsifiers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    simulate, judge = create_autospec(cli.simulate), create_autospec(cli.judge)
    monkeypatch.setattr(module, "simulate", simulate)
    monkeypatch.setattr(module, "judge", judge)
    module.main(["--out", str(tmp_path), "--jobs", "2"])
    opened, closed = simulate.call_args.kwargs, judge.call_args.kwargs
    assert opened["ranks"] == [4, 8, 16]
    assert opened["streams"] == list(compare.STREAMS)
    assert opened["densities"] == closed["densities"] == [0.01, 0.001]
    assert closed["tasks"] == list(tasks.TASKS)
    assert len(closed["seeds"]) == 3
    assert (opened["out"], closed["out"], closed["jobs"]) == (tmp_path / "simulate", tmp_path / "judge", 2)
    assert "methods" not in opened | closed  # all
