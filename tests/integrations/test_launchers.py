"""The ways in which ranks are started other than by these tests."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from tests.trainers import flat, make_data, make_trainer
from tests.warm import warm_python

ROOT = Path(__file__).parent.parent.parent

SCRIPT = """
import sys
import pytorch_lightning as pl
import torch
import lightning_sparse
from tests.trainers import flat, make_data, make_module

trainer = pl.Trainer(strategy="sparse_ddp_topk", accelerator="cpu", num_nodes=2, devices=1, max_epochs=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
module = make_module("pytorch_lightning")
trainer.fit(module, make_data(), make_data(16))
engine = trainer.strategy.engine
total = float(flat(module).double().sum())
print("RESULT", trainer.global_rank, trainer.world_size, engine.hook_calls, total, flush=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("not_launched")
def test_two_nodes_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *(warm_python(), "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
                *("--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", str(script)),
            ],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=100)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    results = sorted(line.split() for output in outputs for line in output.splitlines() if line.startswith("RESULT"))
    assert [result[1:4] for result in results] == [["0", "2", "6"], ["1", "2", "6"]]
    assert results[0][4] == results[1][4], "both nodes hold the same parameters"


class Linear(pl.LightningModule):
    """At module level, because a spawned process must find it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(10, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        # The strategy stays in the worker; a callback metric is what comes back from there.
        self.trainer.callback_metrics["calls"] = torch.tensor(self.trainer.strategy.engine.hook_calls)


@pytest.mark.slow
@pytest.mark.usefixtures("not_launched", "warm_spawn")
def test_spawned_processes() -> None:
    module = Linear()
    before = flat(module)
    trainer = make_trainer("pytorch_lightning", strategy="sparse_ddp_exdyna_spawn", max_epochs=1)
    trainer.fit(module, make_data())
    assert isinstance(trainer.strategy, ls.SparseDDPStrategy)
    assert not torch.equal(flat(module), before)
    assert trainer.callback_metrics["calls"] == 6
