"""Logs that nobody should have: each is one line with its file and place, costs no memory, and hides no other run."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.tools.report.page import write_page
from lightning_sparse.tools.report.runs import Run, read_runs
from lightning_sparse.tools.report.summary import totals_table
from tests.covering import by_default
from tests.tools.report.made_up import rows, write_csv

for needed in ("plotly", "yaml"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

NUMBERS = "step,loss\n0,1\n1,2\n"


@contextmanager
def frugal() -> Iterator[None]:
    """What comes takes a few seconds and a few megabytes."""
    tracemalloc.start()
    begin = time.monotonic()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 60e6
        assert time.monotonic() - begin < 20
    finally:
        tracemalloc.stop()


def write_wandb(folder: Path, records: Iterable[bytes], pieces: Callable[[bytes], Any] | None = None) -> Path:
    """A W&B file of records; of their pieces where ``pieces`` says which: kinds and contents."""
    folder.mkdir(parents=True, exist_ok=True)
    data = b":W&B" + bytes(3)
    for record in records:
        for kind, piece in pieces(record) if pieces else [(1, record)]:
            data += struct.pack("<IHB", zlib.crc32(piece, zlib.crc32(bytes([kind]))), len(piece), kind) + piece
    file = folder / "run-x.wandb"
    file.write_bytes(data)
    return file


def history(**values: str) -> bytes:
    """A row, with values in JSON."""
    from wandb.proto import wandb_internal_pb2 as proto

    items = [proto.HistoryItem(key=name, value_json=value) for name, value in values.items()]
    return proto.Record(history=proto.HistoryRecord(item=items)).SerializeToString()  # type: ignore[no-any-return]


def config(name: str, value: str) -> bytes:
    from wandb.proto import wandb_internal_pb2 as proto

    update = [proto.ConfigItem(key=name, value_json=value)]
    return proto.Record(config=proto.ConfigRecord(update=update)).SerializeToString()  # type: ignore[no-any-return]


def write_events(folder: Path, records: Iterable[bytes], length: int | None = None, name: str = "1") -> Path:
    """A TensorBoard file of records; the last one says that it has another length."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    folder.mkdir(parents=True, exist_ok=True)
    data, records = b"", list(records)
    for place, record in enumerate(records):
        head = struct.pack("<Q", len(record) if length is None or place + 1 < len(records) else length)
        data += head + struct.pack("<I", masked_crc32c(head)) + record + struct.pack("<I", masked_crc32c(record))
    file = folder / f"events.out.tfevents.{name}"
    file.write_bytes(data)
    return file


def event(step: int, value: float = 1.0, tag: str = "loss", seconds: float = 1.0) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
    return Event(step=step, wall_time=seconds, summary=summary).SerializeToString()  # type: ignore[no-any-return]


# Runs that cannot be read

CSV = {
    "infinite step": ("step,loss\n0,1\ninf,2\n", "Expected steps from 0 on in {file}, but line 3 has inf."),
    "no step": ("step,loss\n0,1\nnan,2\n", "but line 3 has nan."),
    "negative step": ("step,loss\n-5,1\n", "but line 2 has -5."),
    "step beyond counting": ("step,loss\n1e19,1\n", "but line 2 has 1e+19."),
    "step of 400 digits": (f"step,loss\n{'9' * 400},1\n", "but line 2 has inf."),
    "empty step": ("step,loss\n,1\n", "but line 2 has '1' under 'loss' at step ''."),
    "a cell of 131072 letters": (f"step,loss\n0,{'x' * 131_072}\n", "but line 2 has 'xxxx"),
    "a larger cell": (f"step,loss\n0,1\n1,{'x' * 131_073}\n", "Expected {file} to be CSV, but line 3 is not: field"),
    "a quote that does not end": ('step,loss\n0,"1\n1,2\n' + "2,3\n" * 20_000, "{file}, but line 20003 has "),
    "a returned carriage": ('step,loss\n0,"1"\r\r2\n', "Expected "),
    "the same column twice": (
        "step,loss,loss\n0,1,2\n",
        "Expected different columns in {file}, but several are",
    ),
    "long names": (f"{'x' * 130_000},y\n1,2\n", "to have a column step, but its columns are: xxx"),
    "two-byte letters": ("step,loss\n0,1\n".encode("utf-16"), "Expected {file} to be a readable text file"),
    "zero bytes": (b"\0" * 100_000 + b"\n", "to have a column step"),
    "a line that is too long": ("step,loss\n0,1,2\n", "Expected 2 cells in line 2 of {file}, but got 3."),
}


@pytest.mark.parametrize("case", CSV)
def test_a_malformed_csv_is_one_line(tmp_path: Path, case: str) -> None:
    content, expected = CSV[case]
    (tmp_path / "bad").mkdir()
    file = tmp_path / "bad" / "metrics.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    check(tmp_path, file, expected)


def check(folder: Path, file: Path, expected: str) -> None:
    """By itself, it is an error of one short line; beside another run, it is named and left out."""
    with frugal(), pytest.raises(ValueError) as error:
        read_runs([file])
    said = str(error.value)
    assert expected.format(file=file) in said
    assert str(file) in said
    assert "\n" not in said and len(said) < 1000
    write_csv(file.parent.parent / "good" / "run", rows(30))
    [run] = read_runs([folder / "good", file])
    assert run.name == "run"


WANDB: dict[str, tuple[Callable[[], Any], str]] = {
    "records that are no protobuf": (lambda: [b"\xff" * 50], "but that at byte 7 is none: DecodeError."),
    "history that is no JSON": (
        lambda: [history(loss="1"), history(loss="{")],
        "but that at byte 28 is none: JSONDecodeError.",
    ),
    "numbers of 5000 digits": (lambda: [history(loss="9" * 5000)], "is none: ValueError."),
    "numbers of 400 digits": (lambda: [history(loss="9" * 400)], "is none: OverflowError."),
    "deep nesting": (lambda: [config("a", "[" * 60_000)], "is none: RecursionError."),
    "infinite step": (
        lambda: [history(loss="1", **{"trainer/global_step": "Infinity"})],
        "Expected steps from 0 on in {file}, but row 1 of the history has inf.",
    ),
    "no step": (lambda: [history(loss="1", _step="NaN")], "but row 1 of the history has nan."),
}
PIECES: dict[str, Callable[[bytes], Any]] = {
    "an end without a beginning": lambda record: [(4, record)],
    "a middle without a beginning": lambda record: [(3, record), (1, record)],
    "a beginning without an end": lambda record: [(2, record[:3]), (1, record)],
    "a piece of no kind": lambda record: [(1, record), (0, b"")],
}


@pytest.mark.parametrize("case", [*WANDB, *PIECES])
def test_a_malformed_file_of_wandb_is_one_line(tmp_path: Path, case: str) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed")
    whole = (lambda: [history(loss="1")]), "Expected {file} to be whole, but it is broken after "
    records, expected = WANDB.get(case, whole)
    check(tmp_path, write_wandb(tmp_path / "bad", records(), PIECES.get(case)), expected)


EVENTS: dict[str, tuple[Callable[[], Any], int | None, str]] = {
    "records that are no protobuf": (
        lambda: [event(0), b"\xff" * 50],
        None,
        "but what follows byte 40 is none: DecodeError.",
    ),
    "negative steps": (lambda: [event(-3)], None, "Expected steps from 0 on in {file}, but loss has -3."),
    "steps beyond counting": (lambda: [event(2**62)], None, "but loss has 4.61169e+18."),
    "four exabytes": (lambda: [event(0), event(1)], 2**62, "but what follows byte 40 is none: "),
}


@pytest.mark.parametrize("case", EVENTS)
def test_malformed_events_are_one_line(tmp_path: Path, case: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    records, length, expected = EVENTS[case]
    check(tmp_path, write_events(tmp_path / "bad", records(), length), expected)


def test_what_is_no_file_is_no_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.csv")
    (tmp_path / "run-x.wandb").mkdir()
    (tmp_path / "events.out.tfevents.1").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="but found none of"):
        read_runs([tmp_path])
    with pytest.raises(ValueError, match="Expected a run in"):
        read_runs([tmp_path / "metrics.csv"])
    with pytest.raises(ValueError, match=r"Expected a run in .{1,600}$"):
        read_runs([tmp_path / ("a" * 5000)])


# Runs that can be read, but for something beside them


def shown(run: Run, folder: Path) -> str:
    """A page of the run."""
    totals_table([run]).markdown()
    return write_page([run], folder / "page.html").read_text(encoding="utf-8")


def growing(first: str, level: str, each: str, join: str, times: int) -> str:
    """Eleven levels, of which each names the one before several times."""
    lines = [f"a: &a {first}\n"]
    for x, y in pairwise("abcdefghijkl"):
        lines.append(f"{y}: &{y} {level.format(join.join(each.format(x=x, i=i) for i in range(times)))}\n")
    return "".join(lines)


YAML = {
    "aliases that grow": (
        growing("[1, 2]", "[{}]", "*{x}", ", ", 20),
        "at most 100,000 values, but it holds",
    ),
    "dicts that grow": (growing("{x: 1}", "{{{}}}", "k{i}: *{x}", ", ", 9), "to hold at most 100,000 values"),
    "merges that grow": (growing("{x: 1}", "{{<<: [{}]}}", "*{x}", ", ", 9), "to hold at most 100,000 values"),
    "a list within itself": ("a: &a [*a]\n", "to hold at most 100,000 values"),
    "deep lists": ("a: " + "[" * 5000 + "]" * 5000 + "\n", "nested too deeply"),
    "deep dicts": ("a: " + "{b: " * 900 + "1" + "}" * 900 + "\n", "nested too deeply"),
    "a number of 5000 digits": (f"a: {'9' * 5000}\n", "to be settings by name, but: Exceeds the limit"),
    "a hexadecimal one": (f"a: 0x{'f' * 20_000}\n", "to be settings by name, but: Exceeds the limit"),
    "a date that is none": ("a: 2026-02-31\n", "to be settings by name, but: day is out of range for month."),
    "a truth that is none": ("a: !!bool maybe\n", "to be settings by name, but: 'maybe'."),
    "a list as key": ("? [a]\n: 1\n", "to be YAML, but it is broken in line 1."),
    "a letter that YAML refuses": ("a: 1\nb: \x01\n", "to be YAML, but it is broken in line 2."),
    "two documents": ("a: 1\n---\nb: 2\n", "to be YAML, but it is broken in line 2."),
    "no names": ("- 1\n- 2\n", "to be settings by name, but: they are a list."),
    "a large file": ("a: 1\n" * 500_000, "to have at most 2,000,000 bytes, but it has 2,500,000."),
    "an open list": ("a: [1\nb: 2\n", "to be YAML, but it is broken in line 2."),
}


@pytest.mark.parametrize("case", YAML)
def test_settings_that_cannot_be_read_are_said_and_the_run_is_shown(tmp_path: Path, case: str) -> None:
    text, expected = YAML[case]
    folder = write_csv(tmp_path / "run", rows(30))
    (folder / "hparams.yaml").write_text(text)
    with frugal():
        [run] = read_runs([folder])
    assert (run.settings, run.unread) == ({}, True)
    [note] = run.notes
    assert note.startswith(f"Not all of its settings are known. Expected {folder / 'hparams.yaml'} ")
    assert expected in note
    assert "\n" not in note and len(note) < 600


@pytest.mark.parametrize("text", ["", "null\n", "{}\n", "fit: 3\n", "fit: [1, 2]\n"])
def test_settings_that_say_little_are_no_problem(tmp_path: Path, text: str) -> None:
    folder = write_csv(tmp_path / "run", rows(30))
    (folder / "hparams.yaml").write_text(text)
    [run] = read_runs([folder])
    assert not run.notes
    assert list(run.settings) == (["fit"] if "fit" in text else [])


def test_long_settings_and_halves_of_letters_fit_a_page(tmp_path: Path) -> None:
    folder = write_csv(tmp_path / "run", rows(30), long="x" * 131_072)
    (folder / "config.yaml").write_text('half: "\\uD800"\n')
    [run] = read_runs([folder])
    text = shown(run, tmp_path).split("<h2>Settings</h2>")[1]
    assert "(131,072 letters)" in text
    assert "x" * 1000 not in text


@pytest.mark.parametrize(
    "table",
    [
        "{",
        '{"columns": ["a"]}',
        '{"columns": 1, "data": 1}',
        '{"columns": [], "data": [1]}',
        "[" * 100_000,
        "\udcff",
        Path("nowhere"),
        Path("plan_1.table.json"),
        Path("/dev/zero"),
    ],
)
def test_a_plan_that_cannot_be_read_is_said_and_the_run_is_shown(tmp_path: Path, table: str | Path) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed")
    file = write_wandb(tmp_path / "run", [history(loss="1")])
    plan = tmp_path / "run/files/media/table/sparse/plan_1.table.json"
    plan.parent.mkdir(parents=True)
    if isinstance(table, Path):  # a link
        plan.symlink_to(table)
    else:
        plan.write_bytes(table.encode(errors="surrogateescape"))
    [run] = read_runs([file])
    assert run.plan is None
    assert run.notes[1].startswith(f"Its plan of groups is not known. Expected {plan} ")
    shown(run, tmp_path)


def test_a_plan_with_a_large_cell_is_said_and_the_run_is_shown(tmp_path: Path) -> None:
    folder = write_csv(tmp_path / "run", rows(30))
    (folder / "sparse").mkdir()
    (folder / "sparse" / "plan.csv").write_text(f"group\n{'x' * 131_073}\n")
    [run] = read_runs([folder])
    assert (run.plan, len(run.notes)) == (None, 1)
    (folder / "sparse" / "plan.csv").write_text("group,size\nbucket0\nbucket1,1,2\n")
    assert "bucket1" in shown(read_runs([folder])[0], tmp_path)


def test_deep_settings_of_wandb_are_said_and_the_run_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed")
    deep = config("a", '{"b":' * 900 + "1" + "}" * 900)
    times = [history(loss="1", _step=str(step), _timestamp=at) for step, at in enumerate(["Infinity", "1e300", "NaN"])]
    [run] = read_runs([write_wandb(tmp_path / "run", [deep, *times])])
    assert (run.settings, run.unread, run.clock) == ({}, True, None)
    assert any(note.startswith("Not all of its settings are known.") for note in run.notes)


def test_events_that_are_broken_in_the_middle_are_read_as_far_as_they_go_and_said(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    file = write_events(tmp_path / "run", [event(step) for step in range(10)])
    data = file.read_bytes()
    half = len(data) // 2
    file.write_bytes(data[:half] + b"\xff\xff" + data[half + 2 :])
    [run] = read_runs([file])
    assert list(run.series["loss"].steps) == [0.0, 1.0, 2.0, 3.0, 4.0]
    [note] = run.notes
    assert note.startswith(f"{file.name} was read as far as byte ")


def test_several_files_of_events_in_a_folder_are_one_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    restart = Event(step=2, session_log=SessionLog(status=SessionLog.START)).SerializeToString()
    write_events(tmp_path / "run", [event(step, 1.0) for step in range(5)], name="1")
    write_events(tmp_path / "run", [restart, event(2, 2.0)], name="2")
    [run] = read_runs([tmp_path])
    assert list(run.series["loss"].values) == [1.0, 1.0, 2.0], "what a restart has replaced does not count"
    assert not run.notes


EXTREMES = ["1e308", "-1e308", "1e-320", "nan", "inf", "-inf", "0", "-0.0", "1e99", "1e-99"]
LOGGED = ["loss", "sparse/traffic/total_mb", "sparse/traffic/dense_total_mb", "sparse/time/total_s"]
LOGGED += ["sparse/time/exposed_ms", "sparse/group/a/density"]


@pytest.mark.parametrize("first", by_default(range(len(EXTREMES))))
def test_extreme_values_are_drawn_or_left_out(tmp_path: Path, first: int) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from lightning_sparse.tools.report.static import write_figures

    lines = [
        ",".join([str(step), *(EXTREMES[(first + step * (1 + place)) % len(EXTREMES)] for place in range(len(LOGGED)))])
        for step in range(4)
    ]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.csv").write_text("\n".join([",".join(["step", *LOGGED]), *lines, ""]))
    other = [{"step": step, "loss": 1.0, "sparse/traffic/total_mb": 1.0 + step} for step in range(3)]
    found = read_runs([tmp_path / "a", write_csv(tmp_path / "b", other)])
    totals_table(found).markdown()
    if first % 5 == 0:  # drawing takes most of the time
        write_page(found, tmp_path / "page.html")
        write_figures(found, tmp_path / "figures")


def test_odd_names_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\n<b>")
    write_csv(folder, [{"step": 0, "a\x01\x1b\n": 1.0, "": 2.0, "x" * 131_000: 3.0}])
    [run] = read_runs([folder])
    assert run.name == "\ufffd\ufffd<b>"
    assert [len(name) for name in run.series] == [4, len("(no name)"), 120]
    assert "a\ufffd\ufffd\ufffd" in json.dumps(shown(run, tmp_path), ensure_ascii=False)


@pytest.mark.parametrize("same", ["relative", "file", "link"])
def test_a_run_that_is_named_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: str) -> None:
    folder = write_csv(tmp_path / "runs" / "a", rows(30))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    other = {"relative": Path("runs/a"), "file": folder / "metrics.csv", "link": tmp_path / "link"}[same]
    assert len(read_runs([folder, other])) == 1


def test_two_logs_of_one_folder_have_names(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    events = write_events(tmp_path / "run", [event(0)])
    (tmp_path / "run" / "metrics.csv").write_text(NUMBERS)
    assert [run.name for run in read_runs([tmp_path / "run" / "metrics.csv", events])] == [
        "run/metrics.csv",
        f"run/{events.name}",
    ]


def test_runs_that_cannot_be_read_need_no_name(tmp_path: Path) -> None:
    for name in "abc":
        write_csv(tmp_path / name, rows(30))
    (tmp_path / "b" / "metrics.csv").write_text("step,loss\ninf,1\n")
    for names in (["A", "B", "C"], ["A", "C"]):
        assert [run.name for run in read_runs([tmp_path], names)] == ["A", "C"]
    with pytest.raises(ValueError, match="Expected 2 different names"):
        read_runs([tmp_path], ["A"])
