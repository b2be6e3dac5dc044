"""The commands, from their options to the files they leave."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

pytest.importorskip("rich", reason="rich is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import lightning_sparse_cli as cli
from lightning_sparse.tools.compare import recorded, tasks, training
from lightning_sparse_cli import commands
from lightning_sparse_cli.options import OPTIONS
from lightning_sparse_cli.output import print_json

REPLAY = ["replay", "--streams", "heavy_tail", "--ranks", "2", "--densities", "0.01", "0.001", "--steps", "4"]
COMPARE = ["compare", "--tasks", "digits", "--ranks", "2", "--budgets", "0.1", "--seeds", "0", "1", "--steps", "3"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "digits", partial(tasks.digits, width=2))
    monkeypatch.setattr(recorded, "heavy_tail", partial(tasks.heavy_tail, numel=2000))


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def stopped(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The one line in which a command line is refused."""
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    answer = capsys.readouterr()
    assert (stop.value.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    return answer.err


# Help and options


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_can_be_read_alone(capsys: pytest.CaptureFixture[str], command: str) -> None:
    shown = helped(capsys, *command.split())
    assert shown.startswith(f"usage: lightning-sparse {command}".rstrip() + " [-h]")
    assert not re.search(r"<class|\(default|\(type|null|None|False|\[options\]", shown)
    if not command:
        assert cli.PURPOSE in " ".join(shown.split())
        assert all(f"    {name} " in shown for name in cli.COMMANDS)


def test_an_option_has_one_meaning_and_one_type() -> None:
    meanings = defaultdict(set)
    for parser in cli._parsers()[1].values():
        for one in parser._actions[1:]:
            kind = type(one.type("7")).__name__ if one.type else "flag"
            meanings[one.dest].add((one.help.partition(" Default: ")[0], one.nargs, kind))  # type: ignore[union-attr]
    assert [name for name, found in meanings.items() if len(found) > 1] == []
    assert meanings.keys() == OPTIONS.keys()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_has_examples_and_the_parser_takes_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(rf"^  .*lightning-sparse {command} (.*)$", helped(capsys, command), flags=re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        cli._parsers()[1][command].parse(shlex.split(example.partition(" > ")[0]))


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "lightning-sparse: expected a command, one of probe, advise, report, compare, replay, but got none."),
        (["train"], "but got 'train'. lightning-sparse --help"),
        (["repla"], "Did you mean replay?"),
        (["repot", "x"], "Did you mean report?"),
        (["--versoin"], "Did you mean --version?"),
        (["replay", "--bogus", "4"], "'--bogus' is known. lightning-sparse replay --help"),
        (["replay", "--stepz=4"], "Did you mean --steps?"),
        (["replay", "--step", "4"], "Did you mean --steps?"),
        (["report", "x", "--nams", "y"], "Did you mean --names?"),
        (["compare", "--config", "x"], "no option or argument '--config' is known."),
        (["replay", "--ranks=4", "8"], "no option or argument '8' is known."),
        (["advise"], "the following arguments are required: --config."),
        (["replay", "--ranks", "four"], "argument --ranks: expected a whole number, but got 'four'."),
        (["replay", "--densities", "few"], "argument --densities: expected a number, but got 'few'."),
        (["replay", "--ranks"], "expected at least one argument"),
        (["compare", "--steps", "many"], "expected a whole number, but got 'many'"),
    ],
)
def test_words_that_cannot_be_read_are_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], complaint: str
) -> None:
    assert complaint in stopped(capsys, args)


def test_words_become_values() -> None:
    def parsed(*args: str) -> Any:
        return cli._parsers()[1]["replay"].parse(args)

    given = parsed("--ranks", "4", "8", "--seeds=1", "--sparsifiers", "top_k", "no", "--out=a=b", "--json")
    assert (given.ranks, given.seeds, given.sparsifiers) == ([4, 8], [1], ["top_k", "no"])
    assert (given.out, given.json) == (Path("a=b"), True)
    assert (parsed().ranks, parsed().sparsifiers, parsed().json) == ([8], None, False)


# What commands do


def test_replay_prints_rows_as_they_come_and_leaves_numbers_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, before = recorded.compare, []
    monkeypatch.setattr(recorded, "compare", lambda *args: before.append(capsys.readouterr().out) or original(*args))
    threads = torch.get_num_threads()
    cli.main([*REPLAY, "--sparsifiers", "top_k", "micro", f"--out={tmp_path / 'x'}"])
    assert torch.get_num_threads() == threads
    rows = lines(tmp_path / "x" / "replay.csv")
    assert [(row["stream"], row["ranks"], row["density"], row["method"]) for row in rows] == [
        ("heavy_tail", "2", density, method) for density in ("0.01", "0.001") for method in ("top_k", "micro")
    ]
    assert float(rows[0]["bytes_sent"]) == 4 + 20 * 8
    assert rows[1]["relative_density_error"] == "0.0"
    written = (tmp_path / "x" / "replay.md").read_text()
    assert written.count("### heavy_tail, 2 ranks, density") == 2
    assert all(f"- {name}: {meaning}." in written for name, meaning in recorded.QUANTITIES.items())
    shown, on_error = capsys.readouterr()
    assert on_error == ""  # a bar is for terminals
    assert shown.endswith(f"Tables and numbers are in {tmp_path / 'x'}.\n")
    assert before[0] == ""
    first, second, third = ("".join(text) for text in before[1:])
    assert "heavy_tail, 2 ranks, density 0.01, 4 steps, seed 0\nmethod " in first
    assert first.splitlines()[-1].split()[0] == "top_k"
    assert [line.split()[0] for line in (second + third).splitlines() if line][:2] == ["micro", "heavy_tail,"]


def test_a_bar_is_shown_on_a_terminal_and_rows_go_where_the_output_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    cli.main([*REPLAY, "--sparsifiers", "top_k", f"--out={tmp_path}"])
    assert "2/2" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "top_k" not in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert capsys.readouterr().out.count("\ntop_k ") == 2


def test_compare_leaves_numbers_curves_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([*COMPARE, "--sparsifiers", "top_k", "--every", "2", "--out", str(tmp_path)])
    rows = lines(tmp_path / "compare.csv")
    assert [(row["method"], row["seed"]) for row in rows] == [(m, s) for s in "01" for m in ("dense", "top_k")]
    curves = lines(tmp_path / "compare_curves.csv")
    assert [(row["method"], row["step"]) for row in curves[:4]] == [
        (m, s) for m in ("dense", "top_k") for s in ("2", "3")
    ]
    assert curves[1]["loss"] == rows[0]["loss"]
    written = (tmp_path / "compare.md").read_text()
    assert written.startswith("### digits, 2 ranks, 3 steps, bytes of MiCRO at density 0.1\n")
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("accuracy or perplexity", "loss, seed 1", "accuracy"))


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_what_was_replayed_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cut: int
) -> None:
    command = [*REPLAY, "--sparsifiers", "top_k", "micro", "--out", str(tmp_path)]
    cli.main(command)
    shown, path = capsys.readouterr().out, tmp_path / "replay.csv"
    whole, tables = path.read_bytes(), (tmp_path / "replay.md").read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    done = []
    original = recorded.compare
    monkeypatch.setattr(recorded, "compare", lambda g, m, d: done.append((m.name, d)) or original(g, m, d))
    cli.main(command)
    assert done == ([("micro", 0.001)] if cut else [])
    assert path.read_bytes() == whole
    assert (tmp_path / "replay.md").read_bytes() == tables
    assert capsys.readouterr().out == shown


def test_an_interrupted_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMPARE, "--sparsifiers", "top_k", "--out"]
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
    assert len(lines(tmp_path / "parts" / "compare.csv")) == 2
    monkeypatch.setattr(training, "execute", lambda job: done.append(job.key) or original(job))
    cli.main([*command, str(tmp_path / "parts")])
    assert len(done) == len(set(done)) == 4
    for name in ("compare.csv", "compare_curves.csv", "compare.md"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("command", "note"), [("replay", " The same command goes on from here."), ("advise", "")], ids=str
)
def test_only_what_keeps_results_is_said_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, note: str
) -> None:
    parsers = cli._parsers()
    monkeypatch.setattr(cli, "_parsers", lambda: parsers)
    stopped = create_autospec(cli.COMMANDS[command], side_effect=KeyboardInterrupt)
    monkeypatch.setitem(cli.COMMANDS, command, stopped)
    with pytest.raises(SystemExit):
        cli.main([command, *(["--config", "x.yaml"] if command == "advise" else [])])
    assert capsys.readouterr().err.endswith(f"Interrupted.{note}\n")


def test_versions_need_no_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    cli.main(["--version"])
    assert f"torch {torch.__version__}\n" in capsys.readouterr().out


def test_a_diverging_method_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explosive(*, momentum: float = 0.9, **settings: Any) -> tasks.Task:
        optimizer = partial(torch.optim.SGD, lr=1e30 if momentum == 0 else 0.05)
        return tasks.digits(width=2, optimizer=optimizer, **settings)

    monkeypatch.setitem(tasks.TASKS, "digits", explosive)
    cli.main([*COMPARE, "--steps=8", "--sparsifiers", "union_top_k+momentum", "top_k", "--out", str(tmp_path)])
    found = {(row["method"], row["loss"] == "nan") for row in lines(tmp_path / "compare.csv")}
    assert found == {("dense", False), ("top_k", False), ("union_top_k+momentum", True)}
    assert "diverged | diverged" in (tmp_path / "compare.md").read_text()
    assert {row["method"] for row in lines(tmp_path / "compare_curves.csv")} == {"dense", "top_k"}


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (
            ["replay", "--streams", "digit"],
            "Unknown stream 'digit'. Did you mean 'digits'? Known names: digits, heavy_",
        ),
        (["replay", "--streams", "text", "--text", "{binary}"], "binary: invalid start byte."),
        (["compare", "--tasks", "text", "--text", "{short}"], "Expected at least 32 examples to train on"),
        (["replay", "--seeds", str(2**64)], "Expected seeds to be numbers of 64 bits"),
        (["compare", "--jobs", "0"], "Expected jobs to be at least 1, but got 0."),
        (["compare", "--out", "{short}"], "short: File exists."),
        (["compare", "--out", "{other}"], "compare.csv to have the columns task, ranks,"),
        (["compare", "--out", "{broken}"], "compare_curves.csv, but got the line"),
    ],
)
def test_bad_input_is_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], complaint: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    (tmp_path / "short").write_text("too short")
    for name in ("other", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "compare.csv").write_text("a,b\n")
    broken = ",".join(training.CurvePoint._fields) + "\n" + "x," * 9 + "x\n"
    (tmp_path / "broken" / "compare_curves.csv").write_text(broken)
    paths = {name: tmp_path / name for name in ("binary", "short", "other", "broken")}
    out = [] if "--out" in args else ["--out", str(tmp_path / "out")]
    answer = stopped(capsys, [arg.format(**paths) if arg.startswith("{") else arg for arg in args] + out)
    assert answer.startswith(f"lightning-sparse {args[0]}: ")
    assert complaint in answer
    assert not (tmp_path / "out").exists()


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
        names = ["lightning-sparse", "torch", "pytorch-lightning", "lightning", "numpy", "python", "device:"]
        assert [line.split()[0] for line in shown[:-1]] == [*names, "kernels", "kernels"]
        assert f"torch {torch.__version__}" in shown


@pytest.mark.parametrize(
    ("module", "package", "args", "extra"),
    [
        ("jsonargparse", "jsonargparse", ["advise", "--config", "x.yaml"], "cli"),
        ("yaml", "pyyaml", ["advise", "--config", "x.yaml"], "cli"),
        ("rich", "rich", REPLAY, "cli"),
        ("sklearn", "scikit-learn", COMPARE, "cli"),
        ("plotly", "plotly", ["report", "somewhere"], "cli"),
        ("wandb", "wandb", ["report", "--workspace", "a/b"], "wandb"),
        ("wandb_workspaces", "wandb-workspaces", ["report", "--workspace", "a/b"], "wandb"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, args: list[str], extra: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == module else found(name) or found("json"))
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == (
        f"The command lightning-sparse needs {package}. "
        f"Install what is missing with: pip install 'lightning-sparse[{extra}]'"
    )


def test_the_benchmark_calls_both_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module = importlib.import_module("compare_sparsifiers")
    for name in ("replay", "compare"):
        monkeypatch.setattr(module, name, create_autospec(getattr(cli, name)))
    module.main(tmp_path, 2)
    assert module.replay.call_args.kwargs["out"] == tmp_path / "replay"
    assert module.compare.call_args.kwargs["out"] == tmp_path / "compare"


def test_json_is_the_only_output_and_has_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([*REPLAY, "--sparsifiers", "top_k", "micro", "--json", "--out", str(tmp_path / "replay")])
    replayed = json.loads(capsys.readouterr().out)
    assert [(row["density"], row["method"]) for row in replayed] == [
        (density, method) for density in (0.01, 0.001) for method in ("top_k", "micro")
    ]
    assert replayed[0]["bytes_sent"] == 4 + 20 * 8
    cli.main([*COMPARE, "--sparsifiers", "top_k", "--json", "--out", str(tmp_path / "compare")])
    assert [row["method"] for row in json.loads(capsys.readouterr().out)] == ["dense", "top_k", "dense", "top_k"]


def test_json_has_no_number_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"a": float("nan"), "b": (1.5, float("inf"))}])
    assert json.loads(capsys.readouterr().out) == [{"a": None, "b": [1.5, None]}]
