"""GradientDistribution, PartitionMap, ResidualAudit and the monitor: TensorBoard, MLflow and CSV, read back."""

from __future__ import annotations

import csv
import json
import os
import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import lightning_sparse as ls
from lightning_sparse.engine.metrics import QUANTITIES
from lightning_sparse.integrations.audit import Ages
from lightning_sparse.integrations.distribution import describe, sample_of
from lightning_sparse.integrations.loggers import log_settings
from lightning_sparse.methods.grouping import make_plan
from tests.fake_cuda import CUDA, fake_cuda
from tests.integrations.documented import documented
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, make_data, make_module, make_trainer


def train(folder: str, kinds: list[str]) -> dict[str, Any]:
    from pytorch_lightning import Callback, loggers

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # else it wants a database
    made = {
        "csv": lambda: loggers.CSVLogger(folder, name="csv", version=0),
        "tensorboard": lambda: loggers.TensorBoardLogger(folder, name="tensorboard", version=0),
        "mlflow": lambda: loggers.MLFlowLogger("tests", tracking_uri=f"file:{folder}/mlflow"),
    }

    class Warner(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.strategy.engine._warn("growth", "the residual grows.")

    partition, audit = ls.PartitionMap(every=2), ls.ResidualAudit()
    strategy = ls.SparseDDPStrategy(sparsifier="exdyna", density=0.05, rules=EVERYTHING_SPARSE)
    with warnings.catch_warnings(action="ignore"):  # those of MLflow, and the one that is made up
        trainer = make_trainer(
            "pytorch_lightning",
            strategy=strategy,
            max_epochs=1,
            limit_val_batches=0,
            log_every_n_steps=2,
            logger=[made[kind]() for kind in kinds],
            callbacks=[ls.SparsityMonitor(), ls.GradientDistribution(every=3), partition, audit, Warner()],
            gradient_clip_val=100.0,
        )
        trainer.fit(make_module("pytorch_lightning"), make_data(96))
        if kinds == ["mlflow"]:  # the run goes on, and settings have changed
            trainer.fit_loop.max_epochs += 1
            strategy.config = replace(strategy.config, density=0.1)
            trainer.fit(make_module("pytorch_lightning"), make_data(96))
    return {"rows": partition.rows, "progress": {key: float(x) for key, x in trainer.callback_metrics.items()}}


EXPECTED = {f"sparse/{name}" for name in QUANTITIES if not name.startswith("lengths/")} | {
    f"sparse/residual/{name}" for name in documented("residual")
}


def test_files_beside_a_csv_hold_all_that_it_cannot(two_ranks: Ranks, tmp_path: Path) -> None:
    result, _ = two_ranks(train, str(tmp_path), ["csv"])
    folder = tmp_path / "csv" / "version_0"
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["sparse/density"]]
    assert {name for name in rows[-1] if name.startswith("sparse/")} == EXPECTED
    assert all(row["loss"] for row in rows)
    last = {name: float(value) for name, value in rows[-1].items() if value}
    # floor(0.05 * 423) picks in each of 6 steps: at most 126 of 423 coordinates were sent.
    assert 1 - 126 / 423 <= last["sparse/residual/never_sent"] < 1 - 20 / 423
    assert 0 <= last["sparse/residual/age_median"] <= last["sparse/residual/age_p99"] <= 5
    assert last["sparse/residual/norm"] == pytest.approx(last["sparse/residual_norm"])

    with (folder / "sparse" / "partition_map.csv").open(newline="") as file:
        ranges = list(csv.DictReader(file))
    assert [
        {key: type(row[key])(value) for key, value in one._asdict().items()}
        for row, one in zip(ranges, result["rows"], strict=True)
    ] == ranges
    assert sorted({int(row["step"]) for row in ranges}) == [1, 3, 5]
    for step in ("1", "3", "5"):
        parts = sorted((int(row["begin"]), int(row["end"])) for row in ranges if row["step"] == step)
        assert [parts[0][0], parts[0][1], parts[1][1]] == [0, parts[1][0], 423], "they cover the group"
        assert sum(int(row["picks"]) for row in ranges if row["step"] == step) == 21

    shown = sorted((folder / "sparse" / "gradient_distribution" / "bucket0").glob("*.json"))
    assert [file.name for file in shown] == ["step-000001.json", "step-000004.json"]
    for file in shown:
        data = json.loads(file.read_text())
        assert set(data["laws"]) == {"exponential", "gamma", "pareto"}
        assert all(0 < law["distance"] < 1 for law in data["laws"].values())
        assert data["threshold"] > 0
        assert sum(data["counts"]) >= 0.99 * data["sample"] > 0
        assert 0 < data["beyond"] < 0.5
    [ages] = (folder / "sparse" / "residual" / "age").glob("*.json")
    assert 20 <= sum(json.loads(ages.read_text())["coordinates"]) <= 126
    assert (folder / "sparse" / "warnings.txt").read_text() == "sparse_ddp at step 2: the residual grows.\n"


@pytest.mark.thorough
def test_tensorboard_shows_texts_histograms_and_figures(two_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    two_ranks(train, str(tmp_path), ["tensorboard"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard" / "version_0"
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) >= EXPECTED | {"loss"}
    assert "hp_metric" not in tags["scalars"]
    assert [event.step for event in events.Scalars("sparse/density")] == [1, 3, 5]
    assert set(tags["histograms"]) == {"sparse/gradient_distribution/bucket0", "sparse/residual/age"}
    figures = {"gradient_distribution/bucket0", "residual/age", "partition_map/map"}
    assert set(tags["images"]) == {f"sparse/{name}/figure" for name in figures}
    texts = {
        tag.removesuffix("/text_summary"): events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in tags["tensors"]
        if tag.endswith("text_summary")
    }
    assert texts["sparse/warnings/growth"] == "sparse_ddp at step 2: the residual grows."
    assert "| bucket0 | 4 | 423 |" in texts["sparse/plan"]
    settings = yaml.safe_load((folder / "hparams.yaml").read_text())["sparse_ddp"]
    assert (settings["sparsifier"], settings["ranks"]) == ("exdyna", 2)


@pytest.mark.thorough
def test_mlflow_has_parameters_tags_and_artifacts(two_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    two_ranks(train, str(tmp_path), ["mlflow"])
    [run] = [folder for folder in tmp_path.glob("mlflow/*/*") if (folder / "metrics").is_dir()]
    metrics = {str(path.relative_to(run / "metrics")) for path in (run / "metrics").rglob("*") if path.is_file()}
    assert metrics >= EXPECTED | {"loss"}
    assert len((run / "metrics" / "sparse" / "density").read_text().splitlines()) == 6
    assert (run / "params" / "sparse_ddp" / "sparsifier").read_text() == "exdyna"
    assert (run / "params" / "sparse_ddp" / "ranks").read_text() == "2"
    assert (run / "params" / "sparse_ddp" / "watch" / "every").read_text() == "100"
    assert (run / "tags" / "sparse" / "warnings" / "growth").read_text() == "sparse_ddp at step 2: the residual grows."
    assert "| bucket0 |" in (run / "artifacts" / "sparse" / "plan.md").read_text()
    assert len(list((run / "artifacts" / "sparse" / "gradient_distribution" / "bucket0").glob("*.json"))) == 4


def test_mlflow_gets_new_parameters_only_under_names_that_it_takes() -> None:
    class MLFlowLogger:
        run_id = "run"
        logged: dict[str, Any] = {}  # noqa: RUF012

        @property
        def experiment(self) -> Any:
            return SimpleNamespace(
                get_run=lambda _: SimpleNamespace(data=SimpleNamespace(params={"sparse_ddp/watch/every": "9"}))
            )

        def log_hyperparams(self, params: dict[str, Any]) -> None:
            self.logged |= params

    plain = ls.SparseDDPStrategy(rules=ls.Rules(densities={"embed*": 0.5})).config.as_dict()
    log_settings(MLFlowLogger(), {"sparse_ddp": plain})
    logged = MLFlowLogger.logged
    assert "sparse_ddp/watch/every" not in logged, "it refuses other values"
    assert logged["sparse_ddp/watch/growth"] == 10.0
    assert logged["sparse_ddp/rules/densities"] == "{'embed*': 0.5}"
    assert all(re.fullmatch(r"[\w/]+", name) for name in logged)


def once() -> int:
    everything = [ls.SparsityMonitor(groups=True, table=False), ls.GradientDistribution(), ls.ResidualAudit()]
    with warnings.catch_warnings(action="ignore"):
        trainer = make_trainer(
            "pytorch_lightning",
            strategy={"sparsifier": "micro"},
            fast_dev_run=True,
            callbacks=[*everything, ls.PartitionMap()],
            logger=True,
        )
        trainer.fit(make_module("pytorch_lightning"), make_data(96), make_data(16))
    return trainer.global_step


def test_a_run_of_one_step_for_trying_works(two_ranks: Ranks) -> None:
    assert two_ranks(once) == [1, 1]


def ages_by_hand() -> tuple[dict[str, float], dict[str, float]]:
    """Ages of a model of two layers, and the same by a list of steps for each coordinate."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(torch.distributed.get_rank())
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)))
    engine = ls.attach(ddp, sparsifier="top_k", density=0.05, rules=EVERYTHING_SPARSE, grouping="layer", watch=None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    watching, last = Ages(), {name: torch.zeros(p.numel()) for name, p in engine.stepper.parameters.items()}
    for step in range(1, 6):
        ddp.zero_grad()
        batch = torch.randn(4, 20)
        ddp(batch * (float("nan") if step == 3 else 1.0)).square().mean().backward()
        optimizer.step()
        if step != 3:  # it is skipped
            for name, p in engine.stepper.parameters.items():
                last[name][p.grad.flatten() != 0] = step - (step > 3)
        watching.note(engine)
        if step == 2:
            engine.regroup(
                make_plan([p for g in engine.groups for p in g.parameters][::-1], "model", EVERYTHING_SPARSE)
            )
    found = watching.quantities()
    engine.close()
    ages = 4 - torch.cat(list(last.values())).double()
    sent = ages[ages < 4].sort().values
    quantile = {
        name: float(sent[max(0, -(-int(100 * q) * len(sent) // 100) - 1)])
        for name, q in (("age_median", 0.5), ("age_p99", 0.99))
    }
    return found, {"never_sent": float((ages == 4).double().mean()), "age_mean": float(sent.mean()), **quantile}


def test_ages_follow_parameters_through_groups_and_leave_skipped_steps_out(two_ranks: Ranks) -> None:
    for found, expected in two_ranks(ages_by_hand):
        assert found == pytest.approx(expected)


@pytest.mark.usefixtures("one_rank")
def test_batches_without_an_exchange_age_nothing() -> None:
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(torch.nn.Linear(20, 20))
    engine = ls.attach(ddp, single_device="sparse", watch=None)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(engine=engine))
    trainer._logger_connector = SimpleNamespace(should_update_logs=False)
    audit, noted = ls.ResidualAudit(), []
    audit.on_train_start(trainer, None)
    for batch in range(5):
        with nullcontext() if batch % 2 else ddp.no_sync():
            ddp(torch.randn(4, 20)).square().mean().backward()
        if batch % 2:
            engine.exchange(ddp.parameters())
        audit.on_train_batch_end(trainer, None)
        noted.append(audit._ages._steps)
    assert noted == [0, 1, 1, 2, 2]
    audit.on_train_start(trainer, None)
    audit.on_train_batch_end(trainer, None)
    assert audit._ages._steps == 0, "the exchange was one of the fit before"
    engine.close()


class OnDevice:
    """As much of a group, or an engine, as ages look at."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def test_noting_ages_waits_for_no_device() -> None:
    with fake_cuda():
        statistics = OnDevice(indices=torch.empty(7, dtype=torch.int64, device=CUDA))  # padded
        plan = OnDevice(dense=False, numel=20)
        group = OnDevice(plan=plan, spans={"w": slice(0, 20)}, device=CUDA, ran=True, statistics=statistics)
        ages = Ages()
        for _ in range(3):
            ages.note(OnDevice(stepper=OnDevice(groups=[group]), device=CUDA))  # has no `skipped` to be asked for
        [last] = ages._last.values()
        assert (last.device, last.shape, last.dtype) == (CUDA, (21,), torch.int32)
        with pytest.raises(Exception, match="bincount"):
            ages.quantities()


def test_a_sample_is_even_positive_and_ascending() -> None:
    flat = torch.cat([torch.zeros(1000), torch.linspace(-1, 1, 300_000), torch.tensor([float("nan")])])
    sample = sample_of(flat)
    assert 90_000 < len(sample) <= 131_072
    assert bool((sample.diff() >= 0).all())
    assert float(sample.median()) == pytest.approx(0.5, abs=0.01)
    assert describe(sample, None)["beyond"] is None
    assert describe(torch.ones(5, dtype=torch.float64), None) is None, "nothing to fit"


def warned() -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer = make_trainer(
            "pytorch_lightning",
            strategy="ddp",
            max_epochs=1,
            limit_val_batches=0,
            callbacks=[ls.PartitionMap(), ls.ResidualAudit(), ls.GradientDistribution(every=1)],
        )
        trainer.fit(make_module("pytorch_lightning"), make_data(96))
    return [str(w.message).split(":")[0] for w in caught if "has nothing to" in str(w.message)]


def test_without_anything_to_look_at_they_say_so(two_ranks: Ranks) -> None:
    first, second = two_ranks(warned)
    assert [words.split()[0] for words in first] == ["PartitionMap", "ResidualAudit"]
    assert second == []
    for wrong in ({"every": 0}, {"most": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} to be"):
            ls.PartitionMap(**wrong)
    with pytest.raises(ValueError, match="'accumulated' or 'gradient'"):
        ls.GradientDistribution(what="momentum")
