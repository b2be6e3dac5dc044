"""Ranks that are killed, that hang and that raise: the others end with an error, and the last checkpoint is good."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import forked

TIMEOUT = 6.0
"""Seconds that ranks wait for each other."""
RANKS = 3


def run_rank(
    rank: int, port: int, folder: str, log: str, epochs: int, resume: str | None, behaviour: str, executor: str
) -> None:
    """A process of its own, as torchrun would start it."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "RANK": str(rank),
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
    }
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    torch.set_num_threads(1)
    try:
        fit(folder, epochs, resume, behaviour, executor)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def fit(folder: str, epochs: int, resume: str | None, behaviour: str, executor: str) -> None:
    from pytorch_lightning import Callback
    from pytorch_lightning.callbacks import ModelCheckpoint

    import lightning_sparse as ls
    from tests.trainers import make_data, make_module, make_trainer

    class Progress(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            total = sum(
                float(trainer.strategy.engine.residual(n).abs().sum()) for n in ("net.0.weight", "net.2.weight")
            )
            print(f"\nstarted at step {trainer.global_step} with residual {total:.6f}", flush=True)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            print(f"\nstep {trainer.global_step}", flush=True)
            if trainer.global_step == 10 and trainer.global_rank == 1:
                if behaviour == "raise":
                    raise ValueError("rank 1 has had enough")
                if behaviour == "hang":
                    time.sleep(1000)
                if behaviour == "exit":
                    os._exit(7)

    strategy = ls.SparseDDPStrategy(
        sparsifier="topk",
        density=0.05,
        rules=ls.Rules(dense_ndim=0, dense_numel=0),
        executor=executor,
        strict_resume=True,
        timeout=timedelta(seconds=TIMEOUT),
    )
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=1, every_n_train_steps=3, monitor=None)
    trainer = make_trainer(
        "pytorch_lightning",
        strategy=strategy,
        devices=RANKS,
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[Progress(), saver],
    )
    trainer.fit(make_module("pytorch_lightning"), make_data(), ckpt_path=resume, weights_only=False)


class Launch:
    """Three ranks and what they printed."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        epochs: int = 1000,
        resume: str | None = None,
        behaviour: str = "",
        executor: str = "inline",
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.logs = [folder / f"{name}-{rank}.log" for rank in range(RANKS)]
        self.processes = [
            forked().Process(
                target=run_rank,
                args=(rank, port, str(folder / "ckpt"), str(self.logs[rank]), epochs, resume, behaviour, executor),
                daemon=True,
            )
            for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()

    def wait_for(self, text: str, rank: int = 0, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.said(rank):
            assert time.monotonic() < deadline, f"no {text!r} from rank {rank}: {self.said(rank)[-3000:]}"
            assert self.processes[rank].is_alive(), self.said(rank)[-3000:]
            time.sleep(0.01)

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""

    def join(self, ranks: list[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for rank in ranks:
            self.processes[rank].join(max(0, deadline - time.monotonic()))
            assert self.processes[rank].exitcode is not None, f"rank {rank} hangs: {self.said(rank)[-3000:]}"

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launched: list[Launch] = []

    def start(name: str, **options: Any) -> Launch:
        launched.append(Launch(tmp_path, name, **options))
        return launched[-1]

    yield start
    for one in launched:
        one.end()


def check_errors(run: Launch, ranks: list[int]) -> None:
    for rank in ranks:
        assert run.processes[rank].exitcode not in (0, None)
        assert "Error" in run.said(rank), run.said(rank)[-3000:]


def check_resume(launch: Any, tmp_path: Path) -> None:
    """The last checkpoint is whole, residuals included, and training goes on."""
    import torch

    last = tmp_path / "ckpt" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=False)
    step, epoch = checkpoint["global_step"], checkpoint["epoch"]
    run = launch("resumed", epochs=epoch + 3, resume=str(last))
    run.join(list(range(RANKS)), 60)
    for rank in range(RANKS):
        assert run.processes[rank].exitcode == 0, run.said(rank)[-3000:]
        begin = run.said(rank).split("started at step ")[1].split("\n")[0]
        number, residual = begin.split(" with residual ")
        assert int(number) == step
        assert float(residual) > 0


def kill_one(launch: Any, tmp_path: Path, seed: int) -> None:
    """Kill -9 of one rank at a random moment after the first checkpoint."""
    generator = random.Random(seed)
    run = launch(f"killed{seed}", executor=generator.choice(["inline", "thread"]))
    run.wait_for("step 4\n")
    time.sleep(generator.uniform(0, 0.6))
    victim = generator.randrange(RANKS)
    os.kill(run.processes[victim].pid, signal.SIGKILL)
    survivors = [rank for rank in range(RANKS) if rank != victim]
    run.join(survivors, TIMEOUT + 5)
    check_errors(run, survivors)
    check_resume(launch, tmp_path)


@pytest.mark.parametrize("seed", range(2))
def test_survivors_of_a_killed_rank_end_and_training_resumes(launch: Any, tmp_path: Path, seed: int) -> None:
    kill_one(launch, tmp_path, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2, 20))
def test_survivors_of_a_killed_rank_end_at_any_moment(launch: Any, tmp_path: Path, seed: int) -> None:
    kill_one(launch, tmp_path, seed)


@pytest.mark.parametrize("behaviour", ["raise", "exit", "hang"])
def test_a_rank_that_fails_ends_the_others(launch: Any, tmp_path: Path, behaviour: str) -> None:
    run = launch(behaviour, behaviour=behaviour)
    run.wait_for("step 10\n", rank=1)
    others = [0, 2] if behaviour == "hang" else [0, 1, 2]
    run.join(others, TIMEOUT + 5)
    check_errors(run, [0, 2])
    assert "lost another rank" in run.said(0) + run.said(2)
    if behaviour == "raise":
        assert "rank 1 has had enough" in run.said(1)
        assert run.processes[1].exitcode == 1
    run.end()
    check_resume(launch, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("not_launched")
def test_torchrun_starts_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=3",
        "--master-port=0",
        "--standalone",
    ]
    done = subprocess.run(
        [sys.executable, *command, "-m", "tests.strategy.elastic", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=Path(__file__).parents[2],
        # Else torch 2.13 gives ranks that start again a store with the addresses of those before.
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told[-3000:]
    for rank in range(2):
        assert f"rank {rank} starts at 0 with False" in told
        assert f"rank {rank} starts at 6 with True" in told
        assert f"rank {rank} ends at 18" in told
