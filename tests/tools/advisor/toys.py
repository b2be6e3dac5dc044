"""Small modules with their own data, at module level: configurations name them, and spawned processes find them."""

from __future__ import annotations

import importlib
import time
from typing import Any

import lightning.pytorch
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Steps:
    """What both packages have in common.

    Args:
        width: of the hidden layer.
        nap: seconds that each step sleeps, so that exchanges are a small part of it.
    """

    def __init__(self, width: int = 4, nap: float = 0.0) -> None:
        super().__init__()
        self.nap = nap
        self.net = nn.Sequential(nn.Linear(10, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        time.sleep(self.nap)
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)  # type: ignore[attr-defined]
        return loss

    def train_dataloader(self) -> Any:
        return Numbers().train_dataloader()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # type: ignore[attr-defined]


class Toy(Steps, pl.LightningModule):
    """For pytorch_lightning."""


class OtherToy(Steps, lightning.pytorch.LightningModule):
    """For lightning.pytorch."""


TOYS = {"pytorch_lightning": Toy, "lightning.pytorch": OtherToy}


class Numbers(pl.LightningDataModule):
    """Batches of normal random numbers."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        x = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x), batch_size=self.batch_size)


class WithoutOptimizer(pl.LightningModule):
    """Its optimizer comes from a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)


def quiet(package: str, **options: Any) -> Any:
    """A Trainer on the CPU that writes nothing."""
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = importlib.import_module(package).Trainer
    return trainer(**{"accelerator": "cpu", "enable_model_summary": False, "max_epochs": 1} | silent | options)
