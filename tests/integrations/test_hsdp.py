"""`SparseHSDPStrategy` and `FabricSparseHSDPStrategy` on four real processes: two replicas of two ranks."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lightning_sparse as ls
from tests.covering import by_default
from tests.hsdp import weights
from tests.ranks import Ranks
from tests.trainers import HALF, INTEGRATIONS, PACKAGES, make_data, make_trainer, straight_and_resumed

SETTINGS: dict[str, Any] = {
    "density": 0.05,
    "rules": ls.Rules(dense_numel=0),
    "replicate_size": 2,
    "data_parallel_size": 2,
    "watch": None,
}


def classes(package: str) -> tuple[Any, Any]:
    """The strategies of a package, for the Trainer and for Fabric."""
    trainer, fabric = (
        importlib.import_module(f"lightning_sparse.integrations.{name}") for name in INTEGRATIONS[package]
    )
    return trainer.SparseHSDPStrategy, fabric.FabricSparseHSDPStrategy


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 21), nn.Tanh(), nn.Linear(21, 3))


def shard(net: nn.Module, mesh: Any) -> nn.Module:
    fully_shard(net[0], mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


def module_of(package: str, kind: str) -> Any:
    base: Any = importlib.import_module(package).LightningModule

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def configure_model(self) -> None:
            if not any(hasattr(p, "to_local") for p in self.net.parameters()):
                shard(self.net, self.device_mesh)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            if kind == "adamw":
                return torch.optim.AdamW(self.parameters(), lr=0.01)
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def fit(package: str, kind: str, strategy: dict[str, Any], ckpt: Path | None = None, **options: Any) -> Any:
    module = module_of(package, kind)
    made = classes(package)[0](**{**SETTINGS, **strategy})
    trainer = make_trainer(package, devices=4, strategy=made, **options)
    trainer.fit(module, make_data(64), ckpt_path=ckpt)
    return trainer, module


def resumed(package: str, kind: str, path: Path, strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Weights of a run of four epochs, and of one of two that another one has gone on from."""
    train = partial(fit, package, kind, strategy)
    return straight_and_resumed(package, path, weights, train, train, **options)


@pytest.mark.parametrize(
    ("package", "kind", "delay"),
    by_default(
        [
            ("pytorch_lightning", "adamw", 0),
            ("lightning.pytorch", "adamw", 1),
            pytest.param("lightning.pytorch", "momentum", 0, marks=pytest.mark.thorough),
            pytest.param("pytorch_lightning", "momentum", 1, marks=pytest.mark.thorough),
        ]
    ),
)
def test_a_run_with_everything_at_once_is_resumed_bit_for_bit(
    four_ranks: Ranks, tmp_path: Path, package: str, kind: str, delay: int
) -> None:
    job = four_ranks(everything_at_once, package, kind, tmp_path, delay)
    for found in job:
        first, second = found["first"], found["second"]
        assert first["steps"] == second["steps"] == 4  # 2 batches on a rank, 2 in a step, 4 epochs
        assert found["clipped"] or delay  # the step that applies the last averages ends it
        assert ("SecondMoment" in found["memory"]) == (kind == "adamw")
        for name, weight in first["weights"].items():
            assert torch.equal(weight, second["weights"][name])
            assert torch.equal(weight, job[0]["first"]["weights"][name])
    saves = list((tmp_path / HALF / "sparse").iterdir())
    assert len(saves) == 1 and (saves[0] / ".metadata").is_file()


def everything_at_once(package: str, kind: str, path: Path, delay: int) -> dict[str, Any]:
    options = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    return resumed(package, kind, path, {"delay": delay}, **options)


def in_one_file(package: str, path: Path) -> dict[str, Any]:
    return resumed(package, "momentum", path, {"save_distributed_checkpoint": False})


@pytest.mark.parametrize("package", ["lightning.pytorch"])
def test_a_checkpoint_of_one_file_has_residuals_beside_it(four_ranks: Ranks, tmp_path: Path, package: str) -> None:
    for found in four_ranks(in_one_file, package, tmp_path):
        for name, weight in found["first"]["weights"].items():
            assert torch.equal(weight, found["second"]["weights"][name])
    assert (tmp_path / HALF).is_file() and (tmp_path / f"{HALF}.sparse").is_dir()


def by_name(package: str) -> tuple[str, bool, dict[str, Any]]:
    """A run by the strategy's name alone: on one node there is one replica, of all ranks."""
    module = module_of(package, "adamw")
    trainer = make_trainer(package, devices=4, strategy="sparse_hsdp_top_k", max_epochs=1)
    trainer.fit(module, make_data(64))
    return (
        type(trainer.strategy).__module__,
        trainer.strategy.engine._direct,
        trainer.strategy.distributed_sampler_kwargs,
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_the_name_alone_trains_one_replica_on_one_node(four_ranks: Ranks, package: str) -> None:
    for rank, (module, direct, samplers) in enumerate(four_ranks(by_name, package)):
        assert module == f"lightning_sparse.integrations.{package.removesuffix('.pytorch')}"
        assert direct
        assert samplers == {"num_replicas": 4, "rank": rank}


def with_callbacks(path: Path) -> list[tuple[int, set[str], dict[str, Tensor]]]:
    """Steps, logged quantities and weights of a run with callbacks, and of a second one of the same model."""
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
        found.append((trainer.strategy.engine.step, set(trainer.logged_metrics), weights(module)))
    return found


def test_callbacks_see_sharded_replicas_and_a_second_trainer_trains_on(four_ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = four_ranks(with_callbacks, tmp_path)
    for found in of_ranks:
        for (steps, logged, now), (_, _, first) in zip(found, of_ranks[0], strict=True):
            assert steps == 4
            assert {"sparse/density", "sparse/residual_norm"} <= logged
            assert all(torch.equal(now[name], first[name]) for name in now)
        assert not torch.equal(found[0][2]["net.0.weight"], found[1][2]["net.0.weight"])


def in_fabric(package: str, path: Path) -> dict[str, Any]:
    """Weights of a loop of four steps, and of one that another one has gone on from after two."""
    kind = classes(package)[1]
    fabric_of = importlib.import_module(
        INTEGRATIONS[package][1] if package == "pytorch_lightning" else "lightning.fabric"
    )

    def start() -> tuple[Any, Any, Any]:
        fabric = fabric_of.Fabric(accelerator="cpu", devices=4, strategy=kind(shard, **SETTINGS))
        fabric.launch()
        net = fabric.setup(network())
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
    scaled = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))
    try:
        fabric.strategy._attach_shards(net, scaled)
    except ValueError as error:
        found["refused"] = str(error)
    fabric.strategy.engine.close()
    return {**found, "note": state["note"]}


@pytest.mark.parametrize(
    "package", ["pytorch_lightning", pytest.param("lightning.pytorch", marks=pytest.mark.thorough)]
)
def test_a_loop_in_fabric_is_resumed_bit_for_bit(four_ranks: Ranks, tmp_path: Path, package: str) -> None:
    for found in four_ranks(in_fabric, package, tmp_path / "saved"):
        assert found["steps"] == (4, 4) and found["note"] == 3
        assert "bf16-mixed" in found["refused"]
        for name, weight in found["straight"].items():
            assert torch.equal(weight, found["resumed"][name])


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        ls.SparseHSDPStrategy(tensor_parallel_size=2)
    with pytest.raises(ValueError, match="replicate_size"):
        ls.SparseHSDPStrategy(replicate_size=0)
    with pytest.raises(ValueError, match="fallback"):
        ls.SparseHSDPStrategy(fallback=True)
    with pytest.raises(TypeError, match="replicate_size"):
        ls.SparseHSDPStrategy(replicate_sise=2)
