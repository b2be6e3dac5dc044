"""Where the host does not know of a skipped step yet, both Lightning doors let a fused optimizer skip it by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor, nn

import lightning_sparse as ls
from tests.trainers import EVERYTHING_SPARSE, flat, make_data, make_module, make_trainer

SKIPPED = 3
OPTIONS: dict[str, Any] = {"watch": None, "density": 0.1, "rules": EVERYTHING_SPARSE}
OPTIONS["single_device"] = "sparse"


class Seen:
    """Of each step: whether gradients are left before it, and whether they are finite."""

    def __init__(self) -> None:
        self.gradients: list[str] = []

    def look(self, module: nn.Module) -> None:
        grads = [p.grad for p in module.parameters()]
        none = all(grad is None for grad in grads)
        finite = not none and all(bool(grad.isfinite().all()) for grad in grads if grad is not None)
        self.gradients.append("none" if none else "finite" if finite else "NaN")


def fit(seen: Seen) -> tuple[Tensor, dict[str, Any], int]:
    """With a Trainer."""
    made = make_module("pytorch_lightning")

    class Module(type(made)):  # type: ignore[misc]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == SKIPPED else 1.0)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.look(self)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01, fused=True)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    made.__class__ = Module
    trainer = make_trainer("pytorch_lightning", devices=1, max_epochs=1, strategy=ls.SparseDDPStrategy(**OPTIONS))
    with pytest.warns(UserWarning, match="A gradient was not finite on some rank"):
        trainer.fit(made, make_data(96), make_data(8))
    assert trainer.global_step == len(seen.gradients) == 12
    return flat(made), trainer.optimizers[0].state_dict(), trainer.strategy.engine.skipped_steps


def with_fabric(seen: Seen) -> tuple[Tensor, dict[str, Any], int]:
    """With Fabric."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ls.FabricSparseDDPStrategy(**OPTIONS))
    fabric.launch()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 3))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01, fused=True))

    def step(number: int, x: Tensor) -> None:
        fabric.backward(model(x).square().mean() * (float("inf") if number == SKIPPED else 1.0))
        optimizer.step()
        seen.look(module)
        optimizer.zero_grad()

    with pytest.warns(UserWarning, match="A gradient was not finite on some rank"):
        for number, x in enumerate(torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(0))):
            step(number, x)
    engine = fabric.strategy.engine
    skips = engine.skipped_steps
    fabric.strategy.teardown()
    return flat(module), optimizer.state_dict(), skips


@pytest.fixture
def left_alone(not_launched: None) -> Iterator[None]:
    """Lightning may leave a process group of one rank behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
