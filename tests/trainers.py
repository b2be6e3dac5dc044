"""A small model and a Trainer for either Lightning package."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls

PACKAGES = ["pytorch_lightning", "lightning.pytorch"]
INTEGRATIONS = {
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
    "lightning.pytorch": ("lightning", "lightning"),
}
"""Modules with the strategies of each package, for the Trainer and for Fabric."""
HALF = "epoch=1.ckpt"
"""Checkpoint after half of four epochs."""
Fit = Callable[..., tuple[Any, nn.Module]]
"""Trains with options of a Trainer, from a checkpoint if one is given as `ckpt`; returns the Trainer and the module."""

# Each Trainer asks all installed distributions whether they bring callbacks, which takes longer than all else it does.
for _fabric in ("lightning_fabric", "lightning.fabric"):
    _registry = importlib.import_module(f"{_fabric}.utilities.registry")
    _registry.entry_points = functools.cache(_registry.entry_points)

EVERYTHING_SPARSE = ls.Rules(dense_ndim=0, dense_numel=0)
"""For models so small that nothing would be left to sparsify."""


def make_module(package: str, layers: str = "plain", lr: float = 0.1) -> Any:
    """A classifier of 10 features; `layers` is "plain", "unused" (one linear layer never used) or "norm"."""
    torch.manual_seed(0)
    base = importlib.import_module(package).LightningModule

    class Classifier(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            norm = [nn.BatchNorm1d(30)] if layers == "norm" else []
            self.net = nn.Sequential(nn.Linear(10, 30), *norm, nn.ReLU(), nn.Linear(30, 3))
            if layers == "unused":
                self.spare = nn.Linear(7, 7)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Classifier()


def make_data(samples: int = 48) -> DataLoader[Any]:
    """Batches of 8; Lightning gives each rank its share of the samples."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 10, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()), batch_size=8)


def make_trainer(package: str, **options: Any) -> Any:
    """A silent Trainer on the CPU; two devices unless told otherwise. A dict is for SparseDDPStrategy."""
    if isinstance(settings := options.get("strategy"), dict):
        ours = importlib.import_module(f"lightning_sparse.integrations.{package.partition('.')[0]}")
        options["strategy"] = ours.SparseDDPStrategy(**settings)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, **quiet}
    return importlib.import_module(package).Trainer(**defaults | options)


def straight_and_resumed(
    package: str, path: Path, weights: Callable[[nn.Module], dict[str, Tensor]], fit: Fit, then: Fit, **options: Any
) -> dict[str, Any]:
    """Weights of a run of four epochs, and of one of two that another one has gone on from, which `then` trains."""
    straight, module = fit(max_epochs=4, **options)
    first = {"weights": weights(module), "steps": straight.strategy.engine.step}
    made = importlib.import_module(package).callbacks.ModelCheckpoint
    options |= {"enable_checkpointing": True}

    def save() -> dict[str, Any]:
        return options | {"callbacks": [made(path, filename="{epoch}", save_top_k=-1, every_n_epochs=2)]}

    fit(max_epochs=2, **save())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        second, module = then(ckpt=path / HALF, max_epochs=4, **save())
    engine = second.strategy.engine
    found = {"first": first, "second": {"weights": weights(module), "steps": engine.step}}
    return {**found, "memory": repr(engine.settings.memory), "clipped": engine.stepper.grad_norm is not None}


def flat(module: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])
