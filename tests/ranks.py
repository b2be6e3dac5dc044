"""Real ranks for tests: a few processes with gloo between them, started once and given many jobs.

Ranks are forked off a process that has imported torch and Lightning, and stay: a job takes milliseconds. Jobs are
functions of a module with picklable arguments; `rank` and `world_size` are what `torch.distributed` says inside.
Engines that a job leaves open are closed after it.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import socket
import sys
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from tests.forked import forked

JOB_SECONDS = 90
"""A job that takes longer has hung: its ranks are killed and the test fails."""


START_SECONDS = 100
"""Importing torch and Lightning takes ten on a quiet machine."""


class RankError(AssertionError):
    """A job raised on at least one rank; the message holds every rank's traceback."""


class Pickler(ForkingPickler):
    """Sends a tensor as its bytes: torch would open a file for each, which takes longer than most jobs."""

    def reducer_override(self, value: Any) -> Any:
        """For a plain tensor on the CPU; NotImplemented leaves all else as it is."""
        import torch

        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg() or not value.is_contiguous():
            return NotImplemented
        flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        content = bytearray(flat.view(torch.uint8).numpy().tobytes())
        return tensor_of, (content, value.dtype, tuple(value.shape))


def tensor_of(content: bytearray, dtype: Any, shape: tuple[int, ...]) -> Any:
    """The tensor that has these bytes."""
    import torch

    return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)


def send(pipe: Any, value: Any) -> None:
    """What ``pipe.recv()`` at the other end gives."""
    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    pipe.send_bytes(file.getbuffer())


class Ranks:
    """n processes that have joined one group.

    Args:
        world_size: n.
        backend: of the group; with NCCL, ranks take devices in turns.
        environment: by rank, what is set before they join.
    """

    def __init__(
        self, world_size: int, backend: str = "gloo", environment: Callable[[int], dict[str, str]] = lambda rank: {}
    ) -> None:
        self.world_size, self.backend, self.environment = world_size, backend, environment
        self.workers: list[Any] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __call__(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `job(*args)` on all ranks; return the results by rank.

        Once more, in new processes, where gloo has not managed to connect them: on a busy machine that happens once in
        thousands of new groups.
        """
        try:
            return self._run(job, *args)
        except RankError as error:
            if "connectFullMesh" not in str(error):
                raise
        return self._run(job, *args)

    def _run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.workers:
            self._start()
        for _, pipe in self.workers:
            send(pipe, (job, args))
        results: list[Any] = [None] * self.world_size
        errors: dict[int, str] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers)}
        deadline = time.monotonic() + JOB_SECONDS
        while waiting and (ready := wait(list(waiting), max(0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, results[rank] = pipe.recv()
                except EOFError:
                    ok, results[rank] = False, f"the process ended with exit code {self.workers[rank][0].exitcode}"
                if not ok:
                    errors[rank] = results[rank]
                    deadline = min(deadline, time.monotonic() + 3)  # the others may wait for this one for ever
        for rank in waiting.values():
            errors[rank] = "no answer"
        if errors:
            self.stop()  # a rank that failed may have left the others inside a collective
            raise RankError("\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())))
        return results

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = forked()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            given = theirs, rank, self.world_size, port, self.backend, self.environment(rank)
            process = context.Process(target=_work, args=given, daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        for _, pipe in self.workers:  # what follows is the time of jobs alone
            if not pipe.poll(START_SECONDS):
                self.stop()
                raise RankError(f"ranks did not start within {START_SECONDS} s")
            pipe.recv()

    def stop(self) -> None:
        """End the processes; the next job starts new ones."""
        for process, pipe in self.workers:
            pipe.close()
            process.kill()  # they hold nothing that would have to be put in order
        for process, _ in self.workers:
            process.join()
        self.workers = []


def error_of(call: Callable[..., Any], *args: Any) -> str:
    """What a call that ought to fail says, after the kind of its error; "nothing" if it does not fail."""
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def strict_warnings() -> None:
    """The filters of pyproject.toml, which pytest applies in its own process only."""
    options = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["tool"]["pytest"]
    warnings.resetwarnings()
    for entry in options["ini_options"]["filterwarnings"]:
        action, _, rest = entry.partition(":")
        message, _, category = rest.rpartition(":")
        kind = getattr(__import__("builtins"), category) if category else Warning
        warnings.filterwarnings(action, message=message, category=kind)


def _work(pipe: Any, rank: int, world_size: int, port: int, backend: str, environment: dict[str, str]) -> None:
    os.environ |= environment | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        # Lightning takes a process that has these for one that somebody else started.
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
    }
    import torch

    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.distributed.init_process_group(backend, rank=rank, world_size=world_size)
    import pytorch_lightning  # noqa: F401  # once, outside the time of any job

    from tests.engines import closing

    strict_warnings()
    gc.freeze()  # torch and Lightning stay: each look at them for garbage takes as long as a short job
    modules = len(sys.modules)
    pipe.send("ready")
    while True:
        if len(sys.modules) > modules + 100:  # so does what a job has imported, such as torch's compiler
            gc.collect()
            gc.freeze()
            modules = len(sys.modules)
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        try:
            with closing():
                result = job(*args)
            send(pipe, (True, result))
            del result
        except BaseException:
            pipe.send((False, traceback.format_exc()))
