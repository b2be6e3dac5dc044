"""Ranks that are killed, that hang and that raise: the others end with an error, and the last checkpoint is good."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import by_default
from tests.forked import forked
from tests.warm import warm_python

TIMEOUT = 8.0
"""Seconds that ranks wait for each other."""
RANKS = 3


def run_rank(
    rank: int,
    port: int,
    folder: str,
    log: str,
    epochs: int,
    resume: str | None,
    behaviour: str,
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
        fit(folder, epochs, resume, behaviour)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def fit(folder: str, epochs: int, resume: str | None, behaviour: str) -> None:
    from pytorch_lightning import Callback
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.plugins.io import TorchCheckpointIO

    import lightning_sparse as ls
    from lightning_sparse.engine import network
    from tests.trainers import flat, make_data, make_module, make_trainer

    def digest(trainer: Any) -> str:
        """Of the weights, the optimizer and all that this rank remembers."""
        state = trainer.strategy.engine.state_dict()
        remembered = [v for _, vectors in sorted(state["parameters"].items()) for _, v in sorted(vectors.items())]
        momenta = [v["momentum_buffer"].flatten() for v in trainer.optimizers[0].state_dict()["state"].values()]
        everything = torch.cat([flat(trainer.lightning_module), *remembered, *momenta])
        return f"{state['step']} {hashlib.sha256(everything.numpy().tobytes()).hexdigest()[:16]}"

    class Slow(TorchCheckpointIO):  # type: ignore[misc]
        """Time to be killed, before a file is written, while it is, and after."""

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            print(f"\nsaving {Path(path).name}", flush=True)
            time.sleep(0.02)
            super().save_checkpoint(checkpoint, path, storage_options)
            time.sleep(0.02)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            print(f"\nloading {Path(path).name}", flush=True)
            time.sleep(0.02)
            return super().load_checkpoint(path, *args, **kwargs)

    class Progress(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if resume is not None:
                print(f"\ngoes on with {digest(trainer)}\n", flush=True)
            total = sum(
                float(trainer.strategy.engine.residual(n).abs().sum()) for n in ("net.0.weight", "net.2.weight")
            )
            print(f"\nstarted at step {trainer.global_step} with residual {total:.6f}", flush=True)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if behaviour == "slow saves":
                print(f"\nholds {digest(trainer)}\n", flush=True)
            print(f"\nstep {trainer.global_step}", flush=True)
            if trainer.global_step == 10 and trainer.global_rank == 1:
                if behaviour == "raise":
                    raise ValueError("rank 1 has had enough")
                if behaviour == "hang":
                    time.sleep(1000)
                if behaviour == "exit":
                    os._exit(7)

    if behaviour == "fewer batches":
        network.LEAVE = timedelta(seconds=0.5)  # what the test waits for is its end
    strategy = ls.SparseDDPStrategy(
        sparsifier="top_k",
        density=0.05,
        rules=ls.Rules(dense_ndim=0, dense_numel=0),
        strict_resume=True,
        timeout=timedelta(seconds=100 if behaviour == "fewer batches" else TIMEOUT),
    )
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=1, every_n_train_steps=3, monitor=None)
    trainer = make_trainer(
        "pytorch_lightning",
        strategy=strategy,
        devices=RANKS,
        max_epochs=epochs,
        enable_checkpointing=behaviour != "fewer batches",  # there, ranks would wait for each other to save
        callbacks=[Progress(), *([] if behaviour == "fewer batches" else [saver])],
        plugins=[Slow()] if behaviour == "slow saves" else None,
    )
    if behaviour == "fewer batches" and trainer.global_rank == 1:
        trainer.limit_train_batches = 2
    trainer.fit(make_module("pytorch_lightning"), make_data(96), ckpt_path=resume, weights_only=False)


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
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.logs = [folder / f"{name}-{rank}.log" for rank in range(RANKS)]
        where, options = str(folder / "ckpt"), (epochs, resume, behaviour)
        self.processes = [
            forked().Process(target=run_rank, args=(rank, port, where, str(log), *options), daemon=True)
            for rank, log in enumerate(self.logs)
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


def check_resume(launch: Any, tmp_path: Path, **options: Any) -> None:
    """The last checkpoint is whole, residuals included, and training goes on."""
    import torch

    last = tmp_path / "ckpt" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=False)
    step, epoch = checkpoint["global_step"], checkpoint["epoch"]
    run = launch("resumed", epochs=epoch + 3, resume=str(last), **options)
    run.join(list(range(RANKS)), 60)
    for rank in range(RANKS):
        assert run.processes[rank].exitcode == 0, run.said(rank)[-3000:]
        begin = run.said(rank).split("started at step ")[1].split("\n")[0]
        number, residual = begin.split(" with residual ")
        assert int(number) == step
        assert float(residual) > 0


def seeds(number: int) -> list[Any]:
    """The first one runs by default."""
    return [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, number))]


@pytest.mark.parametrize("seed", seeds(10))
def test_survivors_of_a_rank_that_is_killed_at_any_moment_end_and_training_resumes(
    launch: Any, tmp_path: Path, seed: int
) -> None:
    generator = random.Random(seed)
    run = launch(f"killed{seed}")
    run.wait_for("step 4\n")
    time.sleep(generator.uniform(0, 0.6))
    victim = generator.randrange(RANKS)
    os.kill(run.processes[victim].pid, signal.SIGKILL)
    survivors = [rank for rank in range(RANKS) if rank != victim]
    run.join(survivors, TIMEOUT + 20)
    check_errors(run, survivors)
    check_resume(launch, tmp_path)


def kill(run: Launch, victims: list[int]) -> None:
    for rank in victims:
        os.kill(run.processes[rank].pid, signal.SIGKILL)
    run.join(list(range(RANKS)), TIMEOUT + 20)
    check_errors(run, [rank for rank in range(RANKS) if rank not in victims])


@pytest.mark.parametrize("seed", seeds(6))
def test_killed_around_any_save_and_in_setup_the_last_checkpoint_goes_on_exactly(
    launch: Any, tmp_path: Path, seed: int
) -> None:
    """Kill -9 of one rank or of all around a save, then while the next run reads what is there; then go on exactly."""
    generator = random.Random(seed)
    everyone = list(range(RANKS))
    first = launch(f"saves{seed}", behaviour="slow saves")
    first.wait_for("saving last", seconds=60)  # of the first checkpoint; others follow every 3 steps
    first.wait_for(f"step {3 * generator.randint(1, 3) + 2}\n")
    time.sleep(generator.uniform(0, 0.2))
    kill(first, generator.choice([everyone, [generator.randrange(RANKS)]]))

    last = tmp_path / "ckpt" / "last.ckpt"
    step = torch.load(last, weights_only=False)["global_step"]
    second = launch(f"setup{seed}", behaviour="slow saves", epochs=1000, resume=str(last))
    second.wait_for("loading", rank=generator.randrange(RANKS))
    time.sleep(generator.uniform(0, 0.3))
    kill(second, generator.choice([everyone, [generator.randrange(RANKS)]]))

    checkpoint = torch.load(last, weights_only=False)
    assert checkpoint["global_step"] >= step
    step, epoch = checkpoint["global_step"], checkpoint["epoch"]
    third = launch(f"goes on{seed}", epochs=epoch + 1, resume=str(last))
    third.join(everyone, 60)
    for rank in everyone:
        assert third.processes[rank].exitcode == 0, third.said(rank)[-3000:]
        held = {line for run in (first, second) for line in run.said(rank).splitlines() if line.startswith("holds ")}
        [goes_on] = [line for line in third.said(rank).splitlines() if line.startswith("goes on with ")]
        assert goes_on.startswith(f"goes on with {step} ")
        assert goes_on.replace("goes on with", "holds") in held


@pytest.mark.parametrize("behaviour", by_default(["raise", "hang", "exit"], 1))
def test_a_rank_that_fails_ends_the_others(launch: Any, tmp_path: Path, behaviour: str) -> None:
    run = launch(behaviour, behaviour=behaviour)
    run.wait_for("step 10\n", rank=1)
    others = [0, 2] if behaviour == "hang" else [0, 1, 2]
    run.join(others, TIMEOUT + 20)
    check_errors(run, [0, 2])
    assert "lost another rank" in run.said(0) + run.said(2)
    if behaviour == "raise":
        assert "rank 1 has had enough" in run.said(1)
        assert run.processes[1].exitcode == 1
    run.end()
    if behaviour == "raise":  # the others end as if they were killed
        check_resume(launch, tmp_path)


def test_a_rank_with_fewer_batches_does_not_let_the_others_wait_for_their_timeout(launch: Any) -> None:
    run = launch("fewer", behaviour="fewer batches", epochs=1)
    run.join([0, 1, 2], 60)
    assert run.processes[1].exitcode == 0
    check_errors(run, [0, 2])
    for rank in (0, 2):
        assert "Where no rank has failed, ranks had different numbers of batches." in run.said(rank)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("not_launched")
def test_torchrun_starts_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    agents = ["--nproc-per-node=2", "--max-restarts=3", "--master-port=0", "--standalone"]
    command = ["-m", "torch.distributed.run", *agents]
    done = subprocess.run(
        [warm_python(), *command, "-m", "tests.integrations.elastic", str(tmp_path)],
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
        assert f"rank {rank} ends at 12" in told
