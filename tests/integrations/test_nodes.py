"""`node_size=2` in the strategies for the Trainer and for Fabric, on four real processes."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from tests.ranks import Ranks
from tests.trainers import HALF, INTEGRATIONS, make_data, make_trainer, straight_and_resumed

SETTINGS: dict[str, Any] = {"density": 0.05, "rules": ls.Rules(dense_numel=0), "node_size": 2}


def classes(package: str) -> tuple[Any, Any]:
    """The strategies of a package, for the Trainer and for Fabric."""
    trainer, fabric = (importlib.import_module(f"lightning_sparse.integrations.{one}") for one in INTEGRATIONS[package])
    return trainer.SparseDDPStrategy, fabric.FabricSparseDDPStrategy


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 21), nn.Tanh(), nn.Linear(21, 3))


def module_of(package: str, kind: str) -> Any:
    base: Any = importlib.import_module(package).LightningModule

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            if kind == "adamw":
                return torch.optim.AdamW(self.parameters(), lr=0.01)
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def fit(package: str, kind: str, size: Any, ckpt: Path | None = None, **options: Any) -> Any:
    module = module_of(package, kind)
    made = classes(package)[0](**{**SETTINGS, "node_size": size, "strict_resume": True})
    trainer = make_trainer(package, devices=4, strategy=made, **options)
    trainer.fit(module, make_data(64), ckpt_path=ckpt)
    return trainer, module


def everything_at_once(package: str, kind: str, path: Path, resumed_size: Any) -> dict[str, Any]:
    """Weights of a run of four epochs, and of one of two that another one has gone on from."""
    options = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    first, second = (partial(fit, package, kind, size) for size in (2, resumed_size))
    return straight_and_resumed(package, path, weights, first, second, **options)


@pytest.mark.parametrize(
    ("package", "kind"),
    [
        ("pytorch_lightning", "adamw"),
        pytest.param("lightning.pytorch", "adamw", marks=pytest.mark.thorough),
        pytest.param("lightning.pytorch", "momentum", marks=pytest.mark.thorough),
        pytest.param("pytorch_lightning", "momentum", marks=pytest.mark.thorough),
    ],
)
def test_a_run_with_everything_at_once_is_resumed_bit_for_bit(
    four_ranks: Ranks, tmp_path: Path, package: str, kind: str
) -> None:
    job = four_ranks(everything_at_once, package, kind, tmp_path, 2)
    for found in job:
        first, second = found["first"], found["second"]
        assert first["steps"] == second["steps"] == 4  # 2 batches on a rank, 2 in a step, 4 epochs
        assert found["clipped"]
        assert ("SecondMoment" in found["memory"]) == (kind == "adamw")
        for name, weight in first["weights"].items():
            assert torch.equal(weight, second["weights"][name])
            assert torch.equal(weight, job[0]["first"]["weights"][name])
    files = sorted(file.name.split(".")[0] for file in (tmp_path / f"{HALF}.sparse").iterdir())
    assert files == [f"rank-{rank}-of-4" for rank in range(4)]


@pytest.mark.parametrize("size", [None, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_run_is_resumed_with_another_node_size(four_ranks: Ranks, tmp_path: Path, size: Any) -> None:
    """Nothing is in the way, which strict_resume would say."""
    job = four_ranks(everything_at_once, "lightning.pytorch", "adamw", tmp_path, size)
    for found in job:
        assert found["second"]["steps"] == 4
        for name, weight in found["second"]["weights"].items():
            assert torch.equal(weight, job[0]["second"]["weights"][name])


def with_callbacks(path: Path) -> list[Any]:
    """Logged quantities and weights of a run with callbacks, and of a second one of the same model."""
    from pytorch_lightning.loggers import CSVLogger

    module, found = module_of("pytorch_lightning", "momentum"), []
    for number in range(2):
        trainer = make_trainer(
            "pytorch_lightning",
            devices=4,
            strategy=classes("pytorch_lightning")[0](**SETTINGS),
            logger=CSVLogger(path, name=f"run{number}"),
            callbacks=[ls.SparsityMonitor(), ls.FlushResidual()],
            log_every_n_steps=1,
        )
        trainer.fit(module, make_data(64))
        logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
        found.append((trainer.strategy.engine.step, logged, weights(module)))
    return found


def test_callbacks_see_nodes_and_a_second_trainer_trains_on(four_ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = four_ranks(with_callbacks, tmp_path)
    for found in of_ranks:
        for (steps, logged, now), (_, _, first) in zip(found, of_ranks[0], strict=True):
            assert steps == 4
            assert {"sparse/density", "sparse/residual_norm"} <= logged.keys()
            assert all(torch.equal(now[name], first[name]) for name in now)
        assert not torch.equal(found[0][2]["net.0.weight"], found[1][2]["net.0.weight"])


def in_fabric(package: str, path: Path) -> dict[str, Any]:
    """Weights of a loop of four steps, and of one that another one has gone on from after two."""
    kind = classes(package)[1]
    fabric_of = importlib.import_module("lightning_fabric" if package == "pytorch_lightning" else "lightning.fabric")

    def start() -> tuple[Any, Any, Any]:
        fabric = fabric_of.Fabric(accelerator="cpu", devices=4, strategy=kind(**SETTINGS))
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
    [engine] = fabric.strategy.engines
    straight, steps = go(*run, range(2, 4)), engine.step
    engine.close()
    run = fabric, net, optimizer = start()
    state = {"net": net, "optimizer": optimizer, "note": 0}
    fabric.load(path, state)
    [engine] = fabric.strategy.engines
    found = {"straight": straight, "resumed": go(*run, range(2, 4)), "steps": (steps, engine.step)}
    engine.close()
    return {**found, "note": state["note"]}


@pytest.mark.parametrize(
    "package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.thorough)]
)
def test_a_loop_in_fabric_is_resumed_bit_for_bit(four_ranks: Ranks, tmp_path: Path, package: str) -> None:
    job = four_ranks(in_fabric, package, tmp_path / "saved")
    for found in job:
        assert found["steps"] == (4, 4) and found["note"] == 3
        for name, weight in found["straight"].items():
            assert torch.equal(weight, found["resumed"][name])
            assert torch.equal(weight, job[0]["straight"][name])


def test_sharded_replicas_have_no_nodes_of_their_own() -> None:
    with pytest.raises(ValueError, match="node_size"):
        ls.SparseHSDPStrategy(node_size=2)
