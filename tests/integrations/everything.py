"""What strategies for nodes and for sharded replicas are asked for on four ranks: runs, callbacks and loops."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lightning_sparse as ls
from tests.hsdp.model import weights
from tests.ranks import Ranks
from tests.trainers import INTEGRATIONS, make_data, make_trainer

EVERYTHING: dict[str, Any] = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}


def classes(package: str, name: str) -> tuple[Any, Any]:
    """The strategies of a package, for the Trainer and for Fabric."""
    trainer, fabric = (importlib.import_module(f"lightning_sparse.integrations.{one}") for one in INTEGRATIONS[package])
    return getattr(trainer, name), getattr(fabric, f"Fabric{name}")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 21), nn.Tanh(), nn.Linear(21, 3))


def module_of(package: str, kind: str, configure: Callable[[Any], None] = lambda module: None) -> Any:
    """A module that is trained by "adamw" or with "momentum"; `configure` is called as `configure_model` is."""
    base: Any = importlib.import_module(package).LightningModule

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def configure_model(self) -> None:
            configure(self)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            if kind == "adamw":
                return torch.optim.AdamW(self.parameters(), lr=0.01)
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def check_resumed(found: list[dict[str, Any]], kind: str) -> None:
    """Of each rank, what :func:`tests.trainers.straight_and_resumed` says of a run with everything at once."""
    for one in found:
        first, second = one["first"], one["second"]
        assert first["steps"] == second["steps"] == 4  # 2 batches on a rank, 2 in a step, 4 epochs
        assert one["clipped"]
        assert ("SecondMoment" in one["memory"]) == (kind == "adamw")
        for name, weight in first["weights"].items():
            assert torch.equal(weight, second["weights"][name])
            assert torch.equal(weight, found[0]["first"]["weights"][name])


def with_callbacks(path: Path, module: Any, strategies: list[Any]) -> list[tuple[int, set[str], dict[str, Tensor]]]:
    """Steps, logged quantities and weights of runs of a model with callbacks, one after another."""
    from pytorch_lightning.loggers import CSVLogger

    found = []
    for number, strategy in enumerate(strategies):
        trainer = make_trainer(
            "pytorch_lightning",
            devices=4,
            strategy=strategy,
            logger=CSVLogger(path, name=f"run{number}"),
            callbacks=[ls.SparsityMonitor(), ls.FlushResidual()],
            log_every_n_steps=1,
        )
        trainer.fit(module, make_data(64))
        found.append((trainer.strategy.engine.step, set(trainer.logged_metrics), weights(module)))
    return found


def check_callbacks(ranks: Ranks, job: Callable[[Path], Any], path: Path) -> None:
    of_ranks = ranks(job, path)
    for found in of_ranks:
        for (steps, logged, now), (_, _, first) in zip(found, of_ranks[0], strict=True):
            assert steps == 4
            assert {"sparse/density", "sparse/residual_norm"} <= logged
            assert all(torch.equal(now[name], first[name]) for name in now)
        assert not torch.equal(found[0][2]["net.0.weight"], found[1][2]["net.0.weight"])


def in_fabric(package: str, path: Path, strategy_of: Callable[[], Any]) -> tuple[Any, nn.Module, dict[str, Any]]:
    """Weights of a loop of four steps, and of one that another one has gone on from after two; its Fabric and model."""
    fabric_of = importlib.import_module("lightning_fabric" if package == "pytorch_lightning" else "lightning.fabric")

    def start() -> tuple[Any, Any, Any]:
        fabric = fabric_of.Fabric(accelerator="cpu", devices=4, strategy=strategy_of())
        fabric.launch()
        net = fabric.setup_module(network())
        return fabric, net, fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=0.01))

    def go(fabric: Any, net: Any, optimizer: Any, steps: range) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * steps.start + fabric.global_rank)
        for _ in steps:
            for last in (False, True):
                with fabric.no_backward_sync(net, enabled=not last):
                    fabric.backward(net(torch.randn(4, 10, generator=generator)).square().mean())
            fabric.clip_gradients(net, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        return weights(net)

    run = fabric, net, optimizer = start()
    go(*run, range(2))
    fabric.save(path, {"net": net, "optimizer": optimizer, "note": 3})
    straight, steps = go(*run, range(2, 4)), fabric.strategy.engine.step
    fabric.strategy.engine.close()
    run = fabric, net, optimizer = start()
    state = {"net": net, "optimizer": optimizer, "note": 0}
    fabric.load(path, state)
    found = {"straight": straight, "resumed": go(*run, range(2, 4)), "steps": (steps, fabric.strategy.engine.step)}
    return fabric, net, {**found, "note": state["note"]}


def check_loop(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["steps"] == (4, 4) and one["note"] == 3
        for name, weight in one["straight"].items():
            assert torch.equal(weight, one["resumed"][name])
            assert torch.equal(weight, found[0]["straight"][name])
