"""``make gpu`` on a machine without a GPU: its parts at toy sizes on the CPU, and what it says of what is missing."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine import group
from lightning_sparse.engine.pipeline import exchange_group
from tests.covering import by_default
from tests.gpu import equality, marked, races, training
from tests.gpu import ranks as several
from tests.gpu.__main__ import main
from tests.gpu.checks import Check, Clock, Outcome, SkipError, run
from tests.gpu.parts import PARTS, ROOT, Part, PartResult, summarize, watch
from tests.gpu.processes import one_rank
from tests.ranks import Ranks
from tests.warm import warm_python

CPU = torch.device("cpu")
PART = Part("toy", "a toy", 5, keys=(("first", "GB/s"),))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Toy sizes gain nothing from more, and lose much where other tests compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outcomes(checks: list[Check], seconds: float = 60) -> list[Outcome]:
    return list(run(checks, Clock(seconds), CPU, lambda name: None))


def fail() -> None:
    raise AssertionError("as planned")


def skip() -> None:
    raise SkipError("not here")


def need() -> None:
    import a_package_that_nobody_has  # noqa: F401


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("too much")


def test_a_check_that_fails_or_skips_does_not_stop_the_others() -> None:
    jobs: list[Any] = [lambda: {"GB/s": 3}, fail, skip, need, run_out_of_memory, lambda: None]
    found = outcomes([Check(str(number), job) for number, job in enumerate(jobs)])
    assert [outcome.result for outcome in found] == ["passed", "failed", "skipped", "skipped", "skipped", "passed"]
    assert found[0].numbers == {"GB/s": 3}
    assert "as planned" in found[1].why
    reasons = ["not here", "package missing: a_package_that_nobody_has", "out of memory: too much"]
    assert [outcome.why for outcome in found[2:5]] == reasons


def test_checks_that_there_is_no_time_for_are_skipped() -> None:
    assert [(o.result, o.why) for o in outcomes([Check("late", fail)], seconds=-1)] == [("skipped", "out of time")]


def after(program: str, tmp_path: Path, limit: float = 60) -> PartResult:
    """What is found when a process writes its lines and then does something."""
    lines = tmp_path / "lines"
    passed = {"check": "first", "result": "passed", "seconds": 1, "numbers": {"GB/s": 3}, "why": ""}
    lines.write_text("".join(json.dumps(line) + "\n" for line in ({"begin": "first"}, passed, {"begin": "second"})))
    return watch(PART, [sys.executable, "-S", "-c", program], limit, lines)


@pytest.mark.parametrize(
    ("program", "limit", "why"),
    [
        ("import time; time.sleep(60)", 0.5, "no answer within 0 s, in 'second'"),
        ("import os; os.abort()", 60, "its process ended with exit code -6, in 'second'"),
        ("raise SystemExit(3)", 60, "its process ended with exit code 3, in 'second'"),
    ],
)
def test_a_part_that_hangs_or_crashes_fails_and_what_it_had_found_is_kept(
    program: str, limit: float, why: str, tmp_path: Path
) -> None:
    result = after(program, tmp_path, limit)
    assert (result.result, result.why, result.keys) == ("failed", why, "1 of 1 checks, first: 3 GB/s")


def test_a_part_is_as_good_as_its_checks() -> None:
    def line(result: str, why: str = "") -> dict[str, Any]:
        return {"check": "it", "result": result, "seconds": 1, "numbers": {}, "why": why}

    def row(*lines: dict[str, Any]) -> tuple[str, str]:
        found = summarize(PART, list(lines), "", 1.0)
        return found.result, found.why

    assert row(line("passed"), line("failed", "Traceback")) == ("failed", "it")
    assert row(line("passed"), line("skipped", "out of time")) == ("passed", "out of time")
    assert row(line("skipped", "out of time"), line("skipped", "no NCCL")) == ("skipped", "no NCCL; out of time")
    assert row() == ("skipped", "nothing was checked")


def test_without_a_gpu_every_part_says_that_it_skips_and_why(tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path)}
    command = [warm_python(), "-m", "tests.gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[-len(PARTS) - 1 : -1]
    for part, row in zip(PARTS, rows, strict=True):
        assert row.startswith(f"{part.name} ({part.title})")
        assert "skipped" in row
        assert "no CUDA" in row
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert [part["name"] for part in kept["parts"]] == [part.name for part in PARTS]
    assert torch.__version__.startswith(kept["versions"]["torch"])  # metadata of some builds lack the build


def test_a_part_writes_a_line_before_and_after_each_check(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    assert main(["--part", "machine", "--device", "cpu", "--seconds", "60", "--lines", str(lines)]) == 0
    before, after = (json.loads(line) for line in lines.read_text().splitlines()[-2:])
    assert before == {"begin": "copy 100k"}
    assert (after["check"], after["result"]) == ("copy 100k", "passed")
    assert after["numbers"]["GB/s"] > 0


def test_a_part_that_fails_makes_the_command_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(part: Part, device: str, seconds: float, folder: Path) -> PartResult:
        given[part.name] = seconds
        checks = [{"check": "it", "result": "failed", "seconds": 1, "numbers": {}, "why": "Traceback"}]
        return summarize(part, checks if part.name == "machine" else [], "", 1.0)

    given: dict[str, float] = {}
    monkeypatch.setattr("tests.gpu.__main__.run_part", run_part)
    out = ["--out", str(tmp_path / "new" / "gpu.json")]
    assert main(["--device", "cpu", "--parts", "machine", "memory", *out]) == 1
    machine, memory, _ = capsys.readouterr().out.splitlines()[-3:]
    assert machine.split()[3:4] == ["failed"]
    assert memory.split()[2:3] == ["skipped"]
    seconds = {part.name: part.seconds for part in PARTS}
    assert given["machine"] > seconds["machine"] and given["memory"] > 400  # two alone have time for more
    assert main(["--device", "cpu", "--minutes", "1", *out]) == 1
    assert given["machine"] == seconds["machine"]
    assert main(["--device", "cpu", "--minutes", "0", *out]) == 0
    assert capsys.readouterr().out.count("out of time") >= len(PARTS) - 1


def test_what_a_part_has_found_is_there_before_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(part: Part, device: str, seconds: float, folder: Path) -> PartResult:
        assert folder == tmp_path  # where the lines of a part that is cut off stay, too
        if part.name == "memory":
            [row] = json.loads((folder / "gpu.json").read_text())["parts"]
            assert (row["name"], row["checks"]) == ("machine", [checked])
            assert capsys.readouterr().out.splitlines()[-2].startswith("machine (copy rate)  passed")
            raise KeyboardInterrupt
        return summarize(part, [checked], "", 1.0)

    checked = {"check": "it", "result": "passed", "seconds": 1, "numbers": {"GB/s": 3}, "why": ""}
    monkeypatch.setattr("tests.gpu.__main__.run_part", run_part)
    with pytest.raises(KeyboardInterrupt):
        main(["--device", "cpu", "--parts", "machine", "memory", "--out", str(tmp_path / "gpu.json")])
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]


@pytest.mark.parametrize(("name", "check"), [("times", "transformer, defaults"), ("memory", "grouping bucket")])
def test_whole_trainings_are_measured_as_one_of_many_ranks(
    name: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(grad: Tensor, state: Any, ctx: Context, **parts: Any) -> Any:
        ranks.append(ctx.world_size)
        return exchange_group(grad, state, ctx, **parts)

    ranks: list[int] = []
    monkeypatch.setattr(group, "exchange_group", noted)
    module = importlib.import_module(f"tests.gpu.{name}")
    chosen = (one for one in module.checks(CPU, Clock(100)) if one.name == check)
    passes(chosen)
    assert set(ranks) == {8}


@pytest.mark.thorough
def test_tests_that_do_not_end_leave_what_they_have_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    program = "import time, pytest\npytestmark = pytest.mark.gpu\ndef test_a(): pass\ndef test_b(): time.sleep(60)\n"
    (tmp_path / "tests" / "test_it.py").write_text(program)
    monkeypatch.setattr(marked, "ROOT", tmp_path)

    def run(command: list[str], cwd: Path, stdout: Any, timeout: float, **options: Any) -> None:
        with subprocess.Popen(command, cwd=cwd, stdout=stdout, **options) as process:
            while "test_a PASSED" not in Path(stdout.name).read_text():
                time.sleep(0.1)
            process.kill()
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(marked.subprocess, "run", run)
    with pytest.raises(AssertionError, match=r"no end within \d+ s:(?s:.*)test_a PASSED"):
        marked.run_tests(Clock(60))


def passes(checks: Any, device: torch.device = CPU) -> list[Outcome]:
    found = list(run(checks, Clock(100), device, lambda name: None))
    failed = {outcome.check: outcome.why for outcome in found if outcome.result == "failed"}
    assert not failed, "\n\n".join(map(str, failed.values()))
    return found


@pytest.mark.usefixtures("not_launched")
@pytest.mark.parametrize(
    "name",
    by_default(
        ["machine", "equality", "syncs", "collectives", "races", "kernels", "times", "graphs", "memory", "ranks"], 2
    ),
)
def test_a_part_runs_on_a_cpu_at_toy_sizes(name: str) -> None:
    found = passes(importlib.import_module(f"tests.gpu.{name}").checks(CPU, Clock(100)))
    assert sum(outcome.result == "passed" for outcome in found) >= 2
    by_name = {outcome.check: outcome for outcome in found}
    for check, number in next(part.keys for part in PARTS if part.name == name):
        if check in by_name and by_name[check].result == "passed" and number != "launches":  # of kernels
            assert number in by_name[check].numbers


def test_ranks_that_add_up_wrongly_or_do_not_notice_a_loss_are_seen(
    two_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = several.Place(CPU)
    assert several.on(place, two_ranks, several.sums_are_those_of_the_cpu) == {"sums": 42}
    assert several.lose_one(place, "raises")["seconds"] < several.SOON
    assert several.lose_one(place, "is killed")["seconds"] < several.SOON
    monkeypatch.setattr(several, "SOON", -1.0)
    with pytest.raises(AssertionError, match="another rank has seen LostRankError"):
        several.lose_one(place, "raises")
    place.refused = "not here"
    with pytest.raises(SkipError, match="not here"):
        several.lose_one(place, "raises")


def test_ranks_on_one_device_are_apart_for_nccl() -> None:
    place = several.Place(CPU)
    two, one = (place.ranks(n).environment for n in (2, 1))
    assert two(0).keys() == {"NCCL_HOSTID", *several.APART} and two(0)["NCCL_HOSTID"] != two(1)["NCCL_HOSTID"]
    assert not one(0)


def test_all_modules_of_kernels_launch_late_where_a_stream_is_slow() -> None:
    folder = pytest.importorskip("lightning_sparse.ops.triton")
    kernel: Any = {(2,): lambda *args, **options: None}
    with races.launches_after(0) as launched:
        names = [f"{folder.__name__}.{found.name}" for found in pkgutil.iter_modules(folder.__path__)]
        launching = [module for name in names if hasattr(module := importlib.import_module(name), "launch")]
        for module in launching:
            module.launch(kernel, 2, torch.zeros(1))
    assert launched == [len(launching)]
    assert len(launching) >= len(names) - 1  # of runs all read


def test_other_numbers_are_noticed() -> None:
    gradients = equality.stream(2, torch.float64)
    parts: dict[str, Any] = {"sparsifier": "top_k", "density": 0.1}
    found, other = list(ls.simulate(gradients, **parts)), list(ls.simulate(gradients * 1.001, **parts))
    assert equality.equal(found, found, rtol=0, atol=0)
    with pytest.raises(AssertionError):
        equality.equal(other, found, **equality.CLOSE[torch.float64])


@pytest.mark.parametrize(
    "job",
    by_default(
        [
            pytest.param(
                job, marks=[pytest.mark.thorough] * training.title(job).startswith("losses are those")
            )  # takes long
            for job in training.JOBS
        ],
        3,
    ),
    ids=training.title,
)
def test_a_training_runs_on_a_cpu(job: Any) -> None:
    passes([Check("it", partial(in_a_group, partial(job, "cpu")))])


def in_a_group(job: Callable[[], Any]) -> Any:
    with one_rank(CPU):
        return job()


def test_a_training_runs_on_two_cpus(two_ranks: Ranks) -> None:
    training.on_two_ranks(two_ranks, training.a_skipped_step_moves_nothing, "cpu")


@pytest.mark.usefixtures("not_launched")
def test_a_training_runs_in_lightning() -> None:
    job = training.the_strategy_resumes_bit_for_bit
    passes([Check("it", partial(in_a_group, partial(training.in_lightning, job, "pytorch_lightning", CPU)))])
