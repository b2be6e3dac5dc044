"""`node_size=2` in the strategies for the Trainer and for Fabric, on four real processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_sparse as ls
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
from tests.trainers import HALF, make_data, make_trainer, straight_and_resumed

SETTINGS: dict[str, Any] = {"density": 0.05, "rules": ls.Rules(dense_numel=0), "node_size": 2}


def fit(package: str, kind: str, size: Any, ckpt: Path | None = None, **options: Any) -> Any:
    module = module_of(package, kind)
    made = classes(package, "SparseDDPStrategy")[0](**{**SETTINGS, "node_size": size, "strict_resume": True})
    trainer = make_trainer(package, devices=4, strategy=made, **options)
    trainer.fit(module, make_data(64), ckpt_path=ckpt)
    return trainer, module


def everything_at_once(package: str, kind: str, path: Path, resumed_size: Any) -> dict[str, Any]:
    """Weights of a run of four epochs, and of one of two that another one has gone on from."""
    first, second = (partial(fit, package, kind, size) for size in (2, resumed_size))
    return straight_and_resumed(package, path, weights, first, second, **EVERYTHING)


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
    check_resumed(four_ranks(everything_at_once, package, kind, tmp_path, 2), kind)
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


def two_trainings(path: Path) -> list[Any]:
    strategies = [classes("pytorch_lightning", "SparseDDPStrategy")[0](**SETTINGS) for _ in range(2)]
    return with_callbacks(path, module_of("pytorch_lightning", "momentum"), strategies)


@pytest.mark.thorough
def test_callbacks_see_nodes_and_a_second_trainer_trains_on(four_ranks: Ranks, tmp_path: Path) -> None:
    check_callbacks(four_ranks, two_trainings, tmp_path)


def loop(package: str, path: Path) -> dict[str, Any]:
    fabric, _, found = in_fabric(package, path, lambda: classes(package, "SparseDDPStrategy")[1](**SETTINGS))
    fabric.strategy.engine.close()
    return found


@pytest.mark.parametrize(
    "package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.thorough)]
)
def test_a_loop_in_fabric_is_resumed_bit_for_bit(four_ranks: Ranks, tmp_path: Path, package: str) -> None:
    check_loop(four_ranks(loop, package, tmp_path / "saved"))


def test_sharded_replicas_have_no_nodes_of_their_own() -> None:
    with pytest.raises(ValueError, match="node_size"):
        ls.SparseHSDPStrategy(node_size=2)
