"""Ray Train on this machine: workers that die, other numbers of workers, and folders that do not see each other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor
from torch.utils.data import DataLoader

from tests.doors.trained import Net, Samples, relaxed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    relaxed()
    env = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env})
    yield
    ray.shutdown()


class Classifier(pl.LightningModule):
    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.told = Net(), told

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        died = Path(self.told["folder"], "died")
        if self.current_epoch == self.told.get("kill_at") and self.global_rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self) -> None:
        engine = self.trainer.strategy.engine
        total = sum(float(p.double().abs().sum()) for p in self.parameters())
        told = {"step": engine.step, "weights": total, "ranks": engine.comm.world_size}
        Path(self.told["folder"], f"end-{self.global_rank}.json").write_text(json.dumps(told))


def work(told: dict[str, Any]) -> None:
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    from lightning_sparse.ray import RaySparseDDPStrategy

    relaxed()
    trainer = prepare_trainer(
        pl.Trainer(
            max_epochs=told["epochs"],
            strategy=RaySparseDDPStrategy(density=0.05, strict_resume=True),
            plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback()],
            devices="auto",
            accelerator="cpu",
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    )
    data, reported = DataLoader(Samples(), 8), ray.train.get_checkpoint()
    if reported is None:
        trainer.fit(Classifier(told), data, ckpt_path=told.get("resume"))
        return
    with reported.as_directory() as folder:
        trainer.fit(Classifier(told), data, ckpt_path=os.path.join(folder, "checkpoint.ckpt"))


def train(folder: Path, workers: int = 2, failures: int = 0, **told: Any) -> Any:
    folder.mkdir()
    return TorchTrainer(
        work,
        train_loop_config={"folder": str(folder), "epochs": 3, **told},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=str(folder), failure_config=FailureConfig(max_failures=failures)),
    ).fit()


def end_of(folder: Path, rank: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / f"end-{rank}.json").read_text())
    return told


def test_a_worker_that_is_killed_comes_back_with_its_residuals(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    train(tmp_path / "killed", failures=1, kill_at=2)
    assert (tmp_path / "killed" / "died").exists()
    assert end_of(tmp_path / "killed") == end_of(tmp_path / "whole")


def test_each_worker_reports_its_own_residuals_and_three_go_on_from_two(tmp_path: Path) -> None:
    result = train(tmp_path / "two", epochs=1)
    [side] = Path(result.checkpoint.path).glob("*.sparse")
    assert sorted(name.name.split(".")[0] for name in side.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    before = end_of(tmp_path / "two")
    train(tmp_path / "three", workers=3, epochs=2, resume=os.path.join(result.checkpoint.path, "checkpoint.ckpt"))
    after = end_of(tmp_path / "three")
    assert after["ranks"] == 3
    assert after["step"] == before["step"] + len(Samples()) // 8 // 3


@pytest.mark.parametrize(("name", "value"), [("timeout", 60), ("process_group_backend", "gloo")])
def test_what_ray_decides_is_refused_with_the_words_for_ray(name: str, value: Any) -> None:
    from lightning_sparse.ray import RaySparseDDPStrategy

    with pytest.raises(ValueError, match="TorchConfig"):
        RaySparseDDPStrategy(density=0.01, **{name: value})
