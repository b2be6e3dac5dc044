"""What `torchrun --max-restarts` starts in test_failures.py: a training in which rank 1 dies once."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint

import lightning_sparse as ls
from tests.trainers import EVERYTHING_SPARSE, make_data, make_module, make_trainer


class Story(Callback):
    """Says where training starts and ends; kills rank 1 once."""

    def __init__(self, died: Path) -> None:
        self.died = died

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        residual = float(trainer.strategy.engine.residual("net.0.weight").abs().sum())
        print(f"rank {trainer.global_rank} starts at {trainer.global_step} with {residual > 0}", flush=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 8 and trainer.global_rank == 1 and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), 9)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        print(f"rank {trainer.global_rank} ends at {trainer.global_step}", flush=True)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    strategy = ls.SparseDDPStrategy(
        sparsifier="top_k",
        density=0.05,
        rules=EVERYTHING_SPARSE,
        timeout=timedelta(seconds=30),
        strict_resume=True,
    )
    saver = ModelCheckpoint(f"{folder}/ckpt", save_last=True, every_n_train_steps=3)
    trainer = make_trainer(
        "pytorch_lightning",
        strategy=strategy,
        enable_checkpointing=True,
        callbacks=[Story(Path(folder) / "died"), saver],
        max_epochs=2,
    )
    resume = f"{folder}/ckpt/last.ckpt"
    trainer.fit(
        make_module("pytorch_lightning"),
        make_data(96),
        ckpt_path=resume if os.path.exists(resume) else None,
        weights_only=False,
    )


if __name__ == "__main__":
    main(sys.argv[1])
