"""What SparsityMonitor writes, read back from the files of real loggers."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import struct
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml  # comes with Lightning

import lightning_sparse as ls
from lightning_sparse.engine.metrics import QUANTITIES
from tests.covering import by_default, covering, in_turns
from tests.integrations.test_telling import HEADER, Lines
from tests.ranks import Ranks
from tests.trainers import PACKAGES, make_data, make_module, make_trainer


def monitor(package: str, **options: Any) -> Any:
    assert issubclass(ls.SparsityMonitor, importlib.import_module(package).Callback)
    return ls.SparsityMonitor(**options)


def warner(package: str) -> Any:
    """Says something as a watchdog would, and looks at every step."""

    class Warner(importlib.import_module(package).Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.sent: list[float] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.sent.append(trainer.strategy.engine.summary().get("traffic/sent_mb", 0.0))
            if trainer.global_step == 2:
                with warnings.catch_warnings(action="ignore"):
                    trainer.strategy.engine._warn("growth", "the residual grows.")

    return Warner()


def train(package: str, folder: str, strategy: Any, wandb: bool, options: dict[str, Any]) -> dict[str, Any]:
    loggers = importlib.import_module(package + ".loggers")
    chosen = [loggers.CSVLogger(folder, name="csv", version=0)]
    if wandb:
        chosen.append(loggers.WandbLogger(save_dir=folder, project="tests", offline=True))
    trainer = make_trainer(
        package,
        strategy=strategy,
        logger=chosen,
        callbacks=[monitor(package, groups=True), *([warner(package)] if strategy != "ddp" else [])],
        log_every_n_steps=2,
        max_epochs=1,
        **options,
    )
    trainer.logger.log_hyperparams({"density": "the user's own"})
    trainer.fit(make_module(package), make_data(96 * options.get("accumulate_grad_batches", 1)), make_data(16))
    if wandb and trainer.is_global_zero:
        importlib.import_module("wandb").finish()
    return {
        "progress": {key: float(value) for key, value in trainer.progress_bar_metrics.items()},
        "steps": trainer.global_step,
        "sent": [sent for callback in trainer.callbacks for sent in getattr(callback, "sent", [])],
        "settings": trainer.strategy.config.as_dict() if strategy != "ddp" else {},
        "means": {name: float(metric.compute()) for name, metric in trainer.callbacks[0].metrics.items()},
        "traffic": {name: float(value) for name, value in trainer.callbacks[0].traffic.compute().items()},
    }


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "csv" / "version_0" / "metrics.csv").open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def sparse_rows(folder: Path) -> dict[int, dict[str, float]]:
    return {
        int(row["step"]): {key: value for key, value in row.items() if key.startswith("sparse/")}
        for row in rows(folder)
        if "sparse/density" in row
    }


SHARED = {"time/exposed_ms", "time/total_s", "traffic/total_mb", "traffic/dense_total_mb", "steps/skipped"}
SHARED |= {"steps/warnings"}
"""Of a step, and not of a group."""
NOT_HERE = {"lengths/clipped", "lengths/measured_anew", "grad_norm"}
"""Of a memory that follows the length of gradients, and of steps that clip."""


def check_settings(logged: dict[str, Any], config: dict[str, Any], sparsifier: str) -> None:
    """What a logger has, against the strategy's settings."""
    named = {"sparsifier": sparsifier, "memory": "residual", "grouping": "bucket", "ranks": 2}
    assert {name: logged[name] for name in named} == named
    assert {name: logged[name] for name in config if name not in (*named, "exchange")} == {
        name: value for name, value in config.items() if name not in (*named, "exchange")
    }
    assert logged["density"] == 0.01
    assert "(" not in json.dumps(logged), "nothing is written as in Python"
    assert logged["version"] == ls.__version__
    assert logged["sparsifier_settings"] == config["sparsifier"]
    assert (logged["parameters"], logged["sparsified_parameters"]) == (423, 300)
    assert 0.0012 <= logged["residual_mb"] < 0.005  # 4 bytes for each of 300 coordinates


@pytest.mark.parametrize("package", by_default(PACKAGES[::-1]))
def test_every_quantity_is_logged_on_logging_steps_only(two_ranks: Ranks, tmp_path: Path, package: str) -> None:
    result = two_ranks(train, package, str(tmp_path), {"sparsifier": "exdyna"}, False, {})
    folder = tmp_path / "csv" / "version_0"
    written = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert written.keys() == {"density", "sparse_ddp"}
    check_settings(written["sparse_ddp"], result[0]["settings"], "exdyna")
    [warning] = (folder / "sparse" / "warnings.txt").read_text().splitlines()
    assert warning == "sparse_ddp at step 2: the residual grows."
    with (folder / "sparse" / "plan.csv").open(newline="") as file:
        plan = list(csv.DictReader(file))
    assert [(row["group"], row["coordinates"]) for row in plan] == [("bucket0", "300"), ("dense.bucket0", "123")]
    logged = sparse_rows(tmp_path)
    # 6 steps; Lightning counts from 0 and logs every second one.
    assert list(logged) == [1, 3, 5]
    for row in logged.values():
        own = {key.removeprefix("sparse/") for key in row if "/group/" not in key}
        assert own == set(QUANTITIES) - NOT_HERE
        assert row["sparse/density"] == pytest.approx(3 / 300)  # the first weight; everything else is small
        assert {key for key in row if key.startswith("sparse/group/bucket0/")} == {
            f"sparse/group/bucket0/{name}" for name in set(QUANTITIES) - SHARED - NOT_HERE
        }
        assert row["sparse/group/bucket0/density"] == row["sparse/density"]
    assert [row["sparse/steps/warnings"] for row in logged.values()] == [0, 1, 1]
    # Every step counts, logged or not; the loss is in the same rows.
    sent = result[0]["sent"]
    totals = [row["sparse/traffic/total_mb"] for row in logged.values()]
    assert totals == pytest.approx([sum(sent[:2]), sum(sent[:4]), sum(sent)])
    last = [row for row in rows(tmp_path) if "sparse/density" in row or "val_loss" in row]
    assert all(row.keys() & {"loss", "val_loss"} for row in last)
    assert all(row["sparse/traffic/total_mb"] > 0 and row["sparse/time/total_s"] > 0 for row in last)
    assert last[-1]["sparse/traffic/dense_total_mb"] == pytest.approx(6 * 4 * 423 / 1e6)
    assert result[0]["traffic"] == result[1]["traffic"]
    assert result[0]["traffic"]["total_mb"] == pytest.approx(totals[-1])
    assert result[0]["means"]["padding_ratio"] == pytest.approx(
        sum(row["sparse/padding_ratio"] for row in logged.values()) / 3
    )
    assert result[0]["progress"]["sparse/density"] == pytest.approx(logged[5]["sparse/density"])
    assert all(not key.startswith("sparse/") or key == "sparse/density" for key in result[0]["progress"])


def fit_and_flush(package: str, folder: str, flush: bool) -> tuple[float, list[str]]:
    """Five steps, the last one not logged, and no validation; what all have sent, and what the run says of it."""
    csv_logger = importlib.import_module(package + ".loggers").CSVLogger(folder, name="csv", version=0)
    with Lines() as lines:
        trainer = make_trainer(
            package,
            strategy={"sparsifier": "top_k"},
            logger=csv_logger,
            callbacks=[ls.SparsityMonitor(table=False), *([ls.FlushResidual()] if flush else [])],
            log_every_n_steps=2,
            max_epochs=1,
            limit_train_batches=5,
            limit_val_batches=0,
        )
        trainer.fit(make_module(package), make_data(96), make_data(16))
    return trainer.strategy.engine.stepper.totals.sent_bytes, lines


@pytest.mark.parametrize(("package", "flush"), covering(in_turns(PACKAGES, [False, True]), together=1))
def test_the_last_row_has_the_totals_of_the_run(two_ranks: Ranks, tmp_path: Path, package: str, flush: bool) -> None:
    (sent, lines), _ = two_ranks(fit_and_flush, package, str(tmp_path), flush)
    # In a ring of two, see test_telling; the flush sends 300 residuals and a byte for each of two groups.
    assert sent == 5 * (2 * HEADER + 4 + 24 + 4 * 123) + flush * (4 * 300 + 2)
    last = rows(tmp_path)[-1]
    assert last["sparse/traffic/total_mb"] == pytest.approx(sent / 1e6, rel=1e-12)
    assert f"each rank sent {last['sparse/traffic/total_mb']:.3g} MB; dense DDP" in lines[-1]
    assert f"of {last['sparse/time/total_s']:.3g} s for the exchange" in lines[-1]
    assert (last["step"], last["sparse/traffic/dense_total_mb"]) == (4, pytest.approx(5 * 4 * 423 / 1e6))


def test_accumulated_batches_count_as_one_step(two_ranks: Ranks, tmp_path: Path) -> None:
    result = two_ranks(
        train, "pytorch_lightning", str(tmp_path), {"sparsifier": "top_k"}, False, {"accumulate_grad_batches": 3}
    )
    assert result[0]["steps"] == 6
    assert list(sparse_rows(tmp_path)) == [1, 3, 5]


def test_wandb_offline_holds_the_same_rows(two_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed")
    [result, _] = two_ranks(train, "pytorch_lightning", str(tmp_path), {"sparsifier": "micro"}, True, {})
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history: dict[int, dict[str, float]] = {}
    metrics: dict[str, Any] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    alerts, tables = [], []
    for record in finished_wandb_records(file):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            tables += [items["sparse/plan.path"]] if "sparse/plan.path" in items else []
            if "sparse/density" in items:
                assert "loss" in items, "in one row with what it is drawn against"
                sparse = {key: value for key, value in items.items() if key.startswith("sparse/")}
                history[items["trainer/global_step"]] = sparse
        elif kind == "config":
            config |= {update.key: json.loads(update.value_json) for update in record.config.update if update.key}
        elif kind == "metric":
            metrics[record.metric.name or record.metric.glob_name] = record.metric
        elif kind == "alert":
            alerts.append((record.alert.title, record.alert.text))
        elif kind == "summary":
            for update in record.summary.update:
                summary[update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
    check_settings(config["sparse_ddp"], result["settings"], "micro")
    assert metrics["sparse/*"].step_metric == "trainer/global_step"
    assert {f"sparse/{name}" for name in QUANTITIES} <= metrics.keys()
    for name in ("traffic/total_mb", "time/total_s", "density"):  # which can be chosen as axes, too
        assert metrics[f"sparse/{name}"].step_metric == "trainer/global_step", metrics
    asked = metrics["sparse/padding_ratio"].summary
    assert (asked.mean, asked.max) == (True, True)
    assert alerts == [("lightning-sparse: growth", "sparse_ddp at step 2: the residual grows.")]
    in_csv = sparse_rows(tmp_path)
    assert list(history) == list(in_csv) == [1, 3, 5]
    for step, row in in_csv.items():
        assert history[step] == pytest.approx(row)
    ratios = [row["sparse/padding_ratio"] for row in in_csv.values()]
    assert summary["sparse/padding_ratio"] == pytest.approx({"mean": sum(ratios) / 3, "max": max(ratios)})
    total = rows(tmp_path)[-1]["sparse/traffic/total_mb"]
    assert summary["sparse/traffic/total_mb"] == {"last": pytest.approx(total)}
    [table] = tables
    data = json.loads(next(tmp_path.glob(f"wandb/offline-run-*/files/{table}")).read_text())
    assert data["columns"][:3] == ["group", "parameters", "coordinates"]
    assert [row[:3] for row in data["data"]] == [["bucket0", 1, 300], ["dense.bucket0", 3, 123]]


def finished_wandb_records(path: Path) -> list[Any]:
    """All records, up to the one that ends a run: W&B's own process may still be writing when `finish` returns."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        records = list(wandb_records(path))
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end after 20 s")


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a W&B file: LevelDB's log format, 32 KiB blocks of pieces with a 7-byte header."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] in (b":W&B", b"")
    position, message = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        position += 7
        if position + size > len(data):
            return  # still being written
        message += data[position : position + size]
        position += size
        if kind in (1, 4):  # whole, or last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def warned_with_ddp(folder: str) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        train("pytorch_lightning", folder, "ddp", False, {})
    return [str(w.message) for w in caught if "SparsityMonitor" in str(w.message)]


def test_with_plain_ddp_it_warns_once_and_logs_nothing(two_ranks: Ranks, tmp_path: Path) -> None:
    messages = two_ranks(warned_with_ddp, str(tmp_path))
    assert len(messages[0]) == 1
    assert "the strategy DDPStrategy does not sparsify" in messages[0][0]
    assert messages[1] == [], "said by rank zero alone"
    assert sparse_rows(tmp_path) == {}
    assert len(rows(tmp_path)) > 0


def table(density: float, rich: bool) -> str:
    hidden: dict[str, Any] = {} if rich else {"rich.console": None, "rich.table": None}
    strategy = {"sparsifier": "top_k", "density": density, "grouping": "layer", "dense": ["*.0.bias"]}
    strategy["rules"] = ls.Rules(densities={"net.2.weight": 0.5})
    out = io.StringIO()
    with patch.dict(sys.modules, hidden), contextlib.redirect_stdout(out):
        options = {"strategy": strategy, "callbacks": [monitor("pytorch_lightning")], "max_epochs": 1}
        trainer = make_trainer("pytorch_lightning", **options)
        trainer.fit(make_module("pytorch_lightning"), make_data(96), make_data(16))
    return out.getvalue()


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_names_groups_and_sizes_and_repeats_nothing_of_the_line_of_the_start(
    two_ranks: Ranks, rich: bool
) -> None:
    printed = two_ranks(table, 0.1, rich)
    lines = printed[0].splitlines()
    assert "sparse_ddp: groups at Constant(density=0.1)" in lines[0]
    # Parameters, coordinates, density now, k now, exchange.
    expected = {
        "net.0": ["1", "300", "0.1", "30", "GatherPairs"],
        "density0.5.net.2": ["1", "90", "0.5", "45", "GatherPairs"],
        "dense.bucket0": ["2", "33", "33", "dense"],
    }
    rows = [line.replace("│", " ").split() for line in lines]
    for name, cells in expected.items():
        [row] = [row for row in rows if row[:1] == [name]]
        assert row[1 : 1 + len(cells)] == cells
    for said in ("TopK", "Residual", "2 ranks", "others stay dense", "fewer than 2 dimensions", "error feedback"):
        assert said not in printed[0]
    assert "sparse_ddp" not in printed[1], "rank zero alone prints"


def test_callback_logs_nothing_of_a_step_twice() -> None:
    loops = SimpleNamespace(should_update_logs=True, _should_accumulate=lambda: False)
    strategy = SimpleNamespace(engine=SimpleNamespace(step=4))
    trainer: Any = SimpleNamespace(strategy=strategy, _logger_connector=loops, fit_loop=loops)
    watching = monitor("pytorch_lightning")
    watching._logged_step = 4
    watching.on_train_batch_end(trainer, torch.nn.Identity())  # would need the engine's summary to go on
