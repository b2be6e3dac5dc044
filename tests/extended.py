"""What the parts of docs/extending.md do in a copy of the repository that has them; started by test_extending.py."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

import lightning_sparse as ls
from tests.trainers import make_data, make_module, make_trainer

PACKAGE = "pytorch_lightning"


def test_this_is_the_copy() -> None:
    root = Path(ls.__file__).parents[1]
    assert Path(__file__).parents[1] == root == Path.cwd()


@pytest.mark.usefixtures("not_launched")
def test_the_strategy_trains_and_logs_the_quantity(tmp_path: Path) -> None:
    from pytorch_lightning.loggers import CSVLogger

    module, logger = make_module(PACKAGE), CSVLogger(tmp_path)
    named = make_trainer(PACKAGE, strategy="sparse_ddp_leader_blocks", devices=1).strategy.config.sparsifier
    trainer = make_trainer(
        PACKAGE,
        strategy=ls.SparseDDPStrategy(sparsifier=named, single_device="sparse"),
        devices=1,
        max_steps=2,
        limit_val_batches=0,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[ls.SparsityMonitor()],
    )
    trainer.fit(module, make_data(), make_data())
    assert trainer.global_step == 2
    assert trainer.strategy.config.sparsifier == ls.sparsifiers.LeaderBlocks()
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        logged = [row["sparse/idle_ranks"] for row in csv.DictReader(file) if row["sparse/idle_ranks"]]
    assert [float(value) for value in logged] == [0.0, 0.0]


@pytest.mark.usefixtures("not_launched")
def test_exchange_and_memory_are_chosen_by_name() -> None:
    names = {"sparsifier": "leader_blocks", "exchange": "gather_shared", "memory": "bounded"}
    strategy = ls.SparseDDPStrategy(single_device="sparse", **names)
    assert (strategy.config.exchange, strategy.config.memory) == (ls.exchanges.GatherShared(), ls.memories.Bounded())
    trainer = make_trainer(PACKAGE, strategy=strategy, devices=1, max_steps=2, limit_val_batches=0)
    trainer.fit(make_module(PACKAGE), make_data(), make_data())
    assert trainer.global_step == 2


def test_simulate_has_all_of_them() -> None:
    stream = torch.randn(3, 4, 1000, generator=torch.Generator().manual_seed(0))
    parts = {"sparsifier": "leader_blocks", "exchange": "gather_shared", "memory": "bounded"}
    for trace in ls.simulate(stream, density=0.02, **parts):
        assert trace.counts.tolist() == [24] * 4  # 20 in blocks of 8
        assert trace.quantities["idle_ranks"] == 0


def test_the_command_compares_the_sparsifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("jsonargparse", "docstring_parser", "rich"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    import lightning_sparse_cli as cli
    from lightning_sparse.tools.compare import figures

    monkeypatch.setattr(figures, "simulate_figures", lambda *_: [])
    command = ["simulate", "--streams", "heavy_tail", "--ranks", "2", "--densities", "0.01", "--steps", "2"]
    cli.main([*command, "--methods", "leader_blocks", f"--out={tmp_path}"])
    with (tmp_path / "simulate.csv").open(newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["leader_blocks"]
