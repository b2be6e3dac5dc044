"""Ray Train on this machine: workers that die, other numbers of workers, and folders that do not see each other."""

from __future__ import annotations

import json
import os
import signal
import tempfile
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

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        died, now = Path(self.told["folder"], "died"), [self.current_epoch, index]
        if now == self.told.get("kill_at") and self.global_rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self) -> None:
        engine = getattr(self.trainer.strategy, "engine", None)
        told = {
            "step": engine.step if engine else None,
            "weights": [p.tolist() for p in self.parameters()],
            "ranks": self.trainer.world_size,
        }
        Path(self.told["folder"], f"end-{self.global_rank}.json").write_text(json.dumps(told))


class Shuffled:
    """Batches of this rank in another order in each epoch, which go on where they were: Lightning keeps their state."""

    def __init__(self, rank: int, ranks: int, size: int = 8) -> None:
        self.samples, self.rank, self.ranks, self.size = Samples(), rank, ranks, size
        self.given = 0

    def __len__(self) -> int:
        return len(self.samples) // self.ranks // self.size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        epoch, first = divmod(self.given, len(self))
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(epoch))[
            self.rank :: self.ranks
        ]
        for index in range(first, len(self)):
            chosen = order[index * self.size : (index + 1) * self.size]
            self.given += 1
            yield {"inputs": self.samples.inputs[chosen], "labels": self.samples.labels[chosen]}

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class ReportsWithinEpochs(pl.Callback):
    """Reports a checkpoint of every worker after some batches, as Ray's own callback does at the end of epochs."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        done = trainer.fit_loop.total_batch_idx + 1
        if done % self.every:
            return
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(os.path.join(folder, "checkpoint.ckpt"), weights_only=False)
            ray.train.report({"batches": done}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def work(told: dict[str, Any]) -> None:
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    from lightning_sparse.ray import RaySparseDDPStrategy

    relaxed()
    settings, every = told.get("settings", {"density": 0.05, "strict_resume": True}), told.get("every")
    trainer = prepare_trainer(
        pl.Trainer(
            max_epochs=told["epochs"],
            strategy=RayDDPStrategy() if settings is None else RaySparseDDPStrategy(**settings),
            accumulate_grad_batches=told.get("accumulate", 1),
            gradient_clip_val=told.get("clip"),
            plugins=[RayLightningEnvironment()],
            callbacks=[ReportsWithinEpochs(every) if every else RayTrainReportCallback()],
            devices="auto",
            accelerator="cpu",
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    )
    context = ray.train.get_context()
    data, reported = Shuffled(context.get_world_rank(), context.get_world_size()), ray.train.get_checkpoint()
    if reported is None:
        trainer.fit(Classifier(told), data, ckpt_path=told.get("resume"))
        return
    with reported.as_directory() as folder:
        trainer.fit(Classifier(told), data, ckpt_path=os.path.join(folder, "checkpoint.ckpt"))


def train(folder: Path, workers: Any = 2, failures: int = 0, **told: Any) -> Any:
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


def test_density_one_is_rays_own_ddp(tmp_path: Path) -> None:
    told = {"epochs": 1, "clip": 1.0, "accumulate": 2}
    train(tmp_path / "dense", settings=None, **told)
    train(tmp_path / "ours", settings={"density": 1.0}, **told)
    assert end_of(tmp_path / "ours")["weights"] == end_of(tmp_path / "dense")["weights"]


def test_a_worker_that_is_killed_within_a_shuffled_epoch_comes_back_with_its_residuals(tmp_path: Path) -> None:
    told = {"every": 4, "clip": 1.0, "accumulate": 2}  # six batches an epoch
    train(tmp_path / "whole", **told)
    train(tmp_path / "killed", failures=1, kill_at=[1, 4], **told)  # after a report in the middle of this epoch
    assert (tmp_path / "killed" / "died").exists()
    assert end_of(tmp_path / "killed") == end_of(tmp_path / "whole")


def test_a_checkpoint_of_a_dense_run_is_resumed_and_saved_again(tmp_path: Path) -> None:
    result = train(tmp_path / "dense", epochs=1, settings=None)
    resume = os.path.join(result.checkpoint.path, "checkpoint.ckpt")
    again = train(tmp_path / "ours", epochs=2, resume=resume)
    [side] = Path(again.checkpoint.path).glob("*.sparse")
    assert len(list(side.iterdir())) == 2
    assert end_of(tmp_path / "ours")["step"] == len(Samples()) // 8 // 2


def test_a_file_of_a_worker_that_is_missing_is_not_silent(tmp_path: Path) -> None:
    result = train(tmp_path / "whole", epochs=1)
    [lost] = Path(result.checkpoint.path).glob("*.sparse/rank-1-*")  # as where a worker dies while it saves
    lost.unlink()
    with pytest.raises(Exception, match="rank 1"):
        train(tmp_path / "again", epochs=2, resume=os.path.join(result.checkpoint.path, "checkpoint.ckpt"))


def test_an_elastic_number_of_workers_is_taken(tmp_path: Path) -> None:
    train(tmp_path / "some", workers=(1, 2), epochs=1)
    assert end_of(tmp_path / "some")["ranks"] in (1, 2)


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
