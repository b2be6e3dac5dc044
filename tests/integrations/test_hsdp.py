"""`SparseHSDPStrategy` and `FabricSparseHSDPStrategy` on four real processes: two replicas of two ranks."""

from __future__ import annotations

import importlib
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import lightning_sparse as ls
from lightning_sparse.integrations.base import CHECKPOINT_KEY as KEY
from tests.covering import by_default
from tests.hsdp.model import weights
from tests.integrations.everything import (
    EVERYTHING,
    check_callbacks,
    check_loop,
    check_resumed,
    classes,
    in_fabric,
    module_of,
    with_callbacks,
)
from tests.ranks import Ranks
from tests.trainers import HALF, PACKAGES, make_data, make_trainer, straight_and_resumed

SETTINGS: dict[str, Any] = {
    "density": 0.05,
    "rules": ls.Rules(dense_numel=0),
    "replicate_size": 2,
    "data_parallel_size": 2,
    "watch": None,
}


def shard(net: nn.Module, mesh: Any) -> nn.Module:
    fully_shard(net[0], mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


def shard_once(module: Any) -> None:
    if not any(hasattr(p, "to_local") for p in module.net.parameters()):
        shard(module.net, module.device_mesh)


def fit(package: str, kind: str, strategy: dict[str, Any], ckpt: Path | None = None, **options: Any) -> Any:
    module = module_of(package, kind, shard_once)
    made = classes(package, "SparseHSDPStrategy")[0](**{**SETTINGS, **strategy})
    trainer = make_trainer(package, devices=4, strategy=made, **options)
    trainer.fit(module, make_data(64), ckpt_path=ckpt)
    return trainer, module


def resumed(package: str, kind: str, path: Path, strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Weights of a run of four epochs, and of one of two that another one has gone on from."""
    train = partial(fit, package, kind, strategy)
    return straight_and_resumed(package, path, weights, train, train, **options)


@pytest.mark.parametrize(
    ("package", "kind"),
    by_default(
        [
            ("pytorch_lightning", "adamw"),
            pytest.param("lightning.pytorch", "momentum", marks=pytest.mark.thorough),
        ]
    ),
)
def test_a_run_with_everything_at_once_is_resumed_bit_for_bit(
    four_ranks: Ranks, tmp_path: Path, package: str, kind: str
) -> None:
    check_resumed(four_ranks(everything_at_once, package, kind, tmp_path), kind)
    saves = list((tmp_path / HALF / "sparse").iterdir())
    assert len(saves) == 1 and (saves[0] / ".metadata").is_file()


def everything_at_once(package: str, kind: str, path: Path) -> dict[str, Any]:
    return resumed(package, kind, path, {}, **EVERYTHING)


def in_one_file(path: Path) -> dict[str, Any]:
    return resumed("lightning.pytorch", "momentum", path, {"save_distributed_checkpoint": False})


def test_a_checkpoint_of_one_file_has_residuals_beside_it(four_ranks: Ranks, tmp_path: Path) -> None:
    for found in four_ranks(in_one_file, tmp_path):
        for name, weight in found["first"]["weights"].items():
            assert torch.equal(weight, found["second"]["weights"][name])
    assert (tmp_path / HALF).is_file() and (tmp_path / f"{HALF}.sparse").is_dir()


def put(field: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda checkpoint: checkpoint[KEY]["residuals"].update({field: value})


MARKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "save '../../../etc'": put("save", "../../../etc"),
    "save '/etc'": put("save", "/etc"),
    "save None": put("save", None),
    "step 'x'": put("step", "x"),
    "step -5": put("step", -5),
    "step 10000000": put("step", 10**30),
    "of step 4, and the checkpoint of 3": put("step", 3),
    "format None": lambda checkpoint: checkpoint[KEY]["residuals"].pop("format"),
    "a list": lambda checkpoint: checkpoint[KEY].update(residuals=[1]),
    "damaged, and has 'x'": lambda checkpoint: checkpoint.update({KEY: "x"}),
    "damaged, and has 'y'": lambda checkpoint: checkpoint[KEY].update(totals="y"),
}


def markers_that_are_none(path: Path, names: list[str]) -> list[tuple[str, list[str], str]]:
    """What resumed runs warn of, and what strict ones raise, for each damage of a checkpoint."""
    train = partial(fit, "pytorch_lightning", "momentum")
    saver = importlib.import_module("pytorch_lightning").callbacks.ModelCheckpoint(
        path, filename="good", every_n_epochs=2
    )
    train({}, max_epochs=2, enable_checkpointing=True, callbacks=[saver])
    found = []
    for number, name in enumerate(names):
        if dist.get_rank() == 0:
            shutil.copytree(path / "good.ckpt", path / str(number))
            MARKERS[name](checkpoint := torch.load(path / str(number) / "meta.pt", weights_only=False))
            torch.save(checkpoint, path / str(number) / "meta.pt")
        dist.barrier()
        with warnings.catch_warnings(record=True, action="always") as caught:
            trainer, _ = train({}, path / str(number), max_epochs=3)
        assert trainer.strategy.engine.step in (2, 5, 6)  # as far as the marker knows
        with pytest.raises(RuntimeError) as error:
            train({"strict_resume": True}, path / str(number), max_epochs=3)
        found.append((name, [str(w.message) for w in caught if "esiduals" in str(w.message)], str(error.value)))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "names",
    [[*MARKERS][::4], pytest.param([name for n, name in enumerate(MARKERS) if n % 4], marks=pytest.mark.thorough)],
    ids=["some", "others"],
)
def test_a_marker_that_is_none_is_one_sentence_on_all_ranks(
    four_ranks: Ranks, tmp_path: Path, names: list[str]
) -> None:
    first, *others = four_ranks(markers_that_are_none, tmp_path, names)
    for number, (name, told, raised) in enumerate(first):
        assert len(told) == 1 and name in told[0] and "ranks 0, 1, 2, 3: " in told[0]
        assert all(rank[number] == (name, [], raised) for rank in others)
        assert name in raised and "ranks 0, 1, 2, 3: " in raised and "\n" not in raised


def by_name(package: str) -> tuple[str, bool, dict[str, Any]]:
    """A run by the strategy's name alone: on one node there is one replica, of all ranks."""
    module = module_of(package, "adamw", shard_once)
    trainer = make_trainer(package, devices=4, strategy="sparse_hsdp", max_epochs=1)
    trainer.fit(module, make_data(64))
    return (
        type(trainer.strategy).__module__,
        trainer.strategy.engine.stepper.direct,
        trainer.strategy.distributed_sampler_kwargs,
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_the_name_alone_trains_one_replica_on_one_node(four_ranks: Ranks, package: str) -> None:
    for rank, (module, direct, samplers) in enumerate(four_ranks(by_name, package)):
        assert module == f"lightning_sparse.integrations.{package.removesuffix('.pytorch')}"
        assert direct
        assert samplers == {"num_replicas": 4, "rank": rank}


def two_trainings(path: Path) -> list[Any]:
    strategies = [classes("pytorch_lightning", "SparseHSDPStrategy")[0](**SETTINGS) for _ in range(2)]
    return with_callbacks(path, module_of("pytorch_lightning", "momentum", shard_once), strategies)


@pytest.mark.thorough
def test_callbacks_see_sharded_replicas_and_a_second_trainer_trains_on(four_ranks: Ranks, tmp_path: Path) -> None:
    check_callbacks(four_ranks, two_trainings, tmp_path)


def loop(package: str, path: Path) -> dict[str, Any]:
    kind = classes(package, "SparseHSDPStrategy")[1]
    fabric, _, found = in_fabric(package, path, lambda: kind(shard, **SETTINGS))
    fabric.strategy.engine.close()
    return found


@pytest.mark.parametrize(
    "package", ["pytorch_lightning", pytest.param("lightning.pytorch", marks=pytest.mark.thorough)]
)
def test_a_loop_in_fabric_is_resumed_bit_for_bit(four_ranks: Ranks, tmp_path: Path, package: str) -> None:
    check_loop(four_ranks(loop, package, tmp_path / "saved"))


def scaled(package: str) -> tuple[int, int, float, dict[str, Any]]:
    """Steps, skipped ones, and the scale after a run in float16, whose first scale is too large; with its weights."""
    precision = importlib.import_module(f"{package}.plugins.precision").MixedPrecision
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    plugins = [precision("16-mixed", "cpu", scaler)]
    trainer, module = fit(package, "momentum", {}, max_epochs=8, plugins=plugins, gradient_clip_val=1.0)
    engine = trainer.strategy.engine
    return engine.step, engine.skipped_steps, scaler.get_scale(), weights(module)


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_a_loss_scale_is_the_same_on_all_parts(four_ranks: Ranks) -> None:
    of_ranks = four_ranks(scaled, "pytorch_lightning")
    for steps, skipped, scale, found in of_ranks:
        assert (steps, skipped, scale) == of_ranks[0][:3]
        assert skipped > 0 and steps > 0 and scale == 2.0 ** (22 - skipped)
        assert all(w.isfinite().all() and torch.equal(w, of_ranks[0][3][name]) for name, w in found.items())


def test_what_cannot_be_is_refused_before_a_fit() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        ls.SparseHSDPStrategy(tensor_parallel_size=2)
    with pytest.raises(ValueError, match="replicate_size"):
        ls.SparseHSDPStrategy(replicate_size=0)
    with pytest.raises(ValueError, match="fallback"):
        ls.SparseHSDPStrategy(fallback=True)
    with pytest.raises(ValueError, match="memory to be one of gradients"):
        ls.SparseHSDPStrategy(memory="drift")
    with pytest.raises(TypeError, match="replicate_size"):
        ls.SparseHSDPStrategy(replicate_sise=2)
