"""Measurements that all ranks start together and agree on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.core.clock import Stamp
from lightning_sparse.engine.network import TorchCollective


def gathered(values: Sequence[float], comm: TorchCollective, device: torch.device) -> Tensor:
    """(n, len(values)) float64 on the host: the numbers of each rank, equally many."""
    return comm.all_gather(torch.tensor(list(values), dtype=torch.float64, device="cpu").to(device)).cpu()


def slowest(values: Sequence[float], comm: TorchCollective, device: torch.device) -> list[float]:
    """The largest of each number over ranks."""
    return gathered(values, comm, device).amax(0).tolist()


def start_together(comm: TorchCollective, device: torch.device) -> None:
    """Return when all ranks are here and have nothing left to do."""
    comm.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    job: Callable[[], Any], comm: TorchCollective, device: torch.device, repeats: int = 5, seconds: float = 0.5
) -> list[float]:
    """Seconds that a job takes on the slowest rank, for each repetition; ranks start together.

    Args:
        job: what all ranks do.
        comm: the ranks.
        device: where the job runs.
        repeats: how often, at most.
        seconds: stop early when about this much time is spent; twice at least.
    """
    taken: list[float] = []
    for _ in range(repeats + 1):  # the first one warms up
        start_together(comm, device)
        begin = Stamp.now(device)
        job()
        taken.append(begin.until(Stamp.now(device)) / 1e3)
        if len(taken) == 1:
            first = slowest(taken, comm, device)[0]
            repeats = max(2, min(repeats, round(seconds / max(first, 1e-9))))
        if len(taken) > repeats:
            break
    return slowest(taken[1:], comm, device)


@contextmanager
def busy_processor() -> Iterator[None]:
    """Keep this rank's processor at work meanwhile, as backward does where exchanges go on beside it.

    Where ranks have to share processors, a message then waits until the other ranks' threads get their turn, which can
    take several times as long as the message itself.
    """
    stop = threading.Event()

    def work() -> None:
        x = torch.ones(256, 256, device="cpu")
        while not stop.is_set():
            x @ x

    thread = threading.Thread(target=work, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
