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

trainer = pl.Trainer(strategy=lightning_sparse.SparseDDPStrategy(sparsifier="top_k"), accelerator="cpu", num_nodes=2,
                     devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False)
module = make_module("pytorch_lightning")
trainer.fit(module, make_data(96), make_data(16))
engine = trainer.strategy.engine
total = float(flat(module).double().sum())
print("RESULT", trainer.global_rank, trainer.world_size, engine.step, total, flush=True)
"""


@pytest.mark.thorough
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


def results_of(folder: Path, *arguments: str) -> list[tuple[str, ...]]:
    """Words of the lines that begin with RESULT, which the folder's train.py prints."""
    done = subprocess.run(
        [warm_python(), "train.py", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return [tuple(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("RESULT")]


AFTER_A_FIT = """
import gc
import os
import signal
import sys
import warnings
import weakref

import pytorch_lightning as pl
import torch
import torch.distributed as dist

import lightning_sparse as ls
from tests.trainers import EVERYTHING_SPARSE, make_data, make_module, make_trainer

os.setpgrp()
signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))  # with what it has started, where that hangs
signal.alarm(40)
torch.set_num_threads(1)
gc.disable()
options = {"density": 0.05, "rules": EVERYTHING_SPARSE}
groups = []
trainer = make_trainer("pytorch_lightning", strategy=ls.SparseDDPStrategy(**options), devices=1, max_epochs=1)
module = make_module("pytorch_lightning")
module.on_train_start = lambda: groups.append(weakref.ref(dist.group.WORLD))
trainer.fit(module, make_data(96), make_data(16))
assert len(groups) == 1 and trainer.strategy.engine.step == 12
dist.destroy_process_group()
print("RESULT lives on" if groups[0]() else "RESULT freed", flush=True)

module = make_module("pytorch_lightning")
module.on_train_start = gc.collect  # where threads of a group are missing, it is waited for them
trainer = make_trainer("pytorch_lightning", strategy=ls.SparseDDPStrategy(start_method="fork", **options), max_epochs=1)
trainer.fit(module, make_data(96), make_data(16))
print("RESULT forked", flush=True)

for weights_only in (True, False):
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.save_checkpoint(f"{sys.argv[1]}/last.ckpt", weights_only=weights_only)
    print("RESULT told", sum("trained by processes that fit has started and ended" in str(w.message) for w in caught))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("not_launched")
def test_after_a_fit_another_one_is_forked_and_says_what_it_leaves_in_its_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AFTER_A_FIT)
    results = results_of(tmp_path, str(tmp_path / "saved"))
    assert results == [("freed",), ("forked",), ("told", "0"), ("told", "1")]


RESUMED = """
import sys

import pytorch_lightning as pl
import torch

import lightning_sparse as ls
from tests.trainers import EVERYTHING_SPARSE, make_data, make_module, make_trainer

folder, devices = sys.argv[1], int(sys.argv[2])


class Looker(pl.Callback):
    def look(self, trainer):
        engine = trainer.strategy.engine
        waits = torch.cat([engine.residual(name) for name in engine.stepper.parameters]).double()
        words = (trainer.global_rank, trainer.global_step, engine.step, float(waits.norm()))
        print(" ".join(map(str, ("RESULT", *words))) + "\\n", end="", flush=True)

    def on_train_start(self, trainer, module):
        self.look(trainer)

    def on_train_end(self, trainer, module):
        self.look(trainer)


torch.set_num_threads(1)
strategy = ls.SparseDDPStrategy(
    start_method="fork", density=0.05, rules=EVERYTHING_SPARSE, strict_resume=True, single_device="sparse"
)
saver = pl.callbacks.ModelCheckpoint(folder, filename=str(devices))
trainer = make_trainer("pytorch_lightning", strategy=strategy, devices=devices, max_epochs=devices,
                       enable_checkpointing=True, callbacks=[Looker(), saver])
trainer.fit(make_module("pytorch_lightning"), make_data(96), make_data(16),
            ckpt_path=f"{folder}/1.ckpt" if devices == 2 else None, weights_only=False)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("not_launched")
def test_a_run_of_one_rank_goes_on_with_two_in_new_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESUMED)
    one, two = (sorted(results_of(tmp_path, str(tmp_path / "saved"), str(devices))) for devices in (1, 2))
    [(_, _, _, nothing), (*counts, waits)] = one
    assert (counts, float(nothing)) == (["0", "12", "12"], 0.0) and float(waits) > 0
    # Each rank begins with the mean of what all remembered.
    assert two[::2] == [(rank, "12", "12", waits) for rank in ("0", "1")]
    assert [result[:3] for result in two[1::2]] == [(rank, "18", "18") for rank in ("0", "1")]


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
        self.trainer.callback_metrics["calls"] = torch.tensor(self.trainer.strategy.engine.step)


@pytest.mark.slow
@pytest.mark.usefixtures("not_launched", "warm_spawn")
def test_spawned_processes() -> None:
    module = Linear()
    before = flat(module)
    trainer = make_trainer("pytorch_lightning", strategy="sparse_ddp_spawn", max_epochs=1)
    trainer.fit(module, make_data(96))
    assert isinstance(trainer.strategy, ls.SparseDDPStrategy)
    assert not torch.equal(flat(module), before)
    assert trainer.callback_metrics["calls"] == 6
