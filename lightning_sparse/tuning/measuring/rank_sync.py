"""Measurements that all ranks start together, with results that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.engine.metrics import Stamp
from lightning_sparse.engine.network import TorchCollective


def gathered(values: Sequence[float], comm: TorchCollective, device: torch.device) -> Tensor:
    """Gather the numbers of all ranks, equally many each, as (n, len(values)) float64 on the host."""
    return comm.all_gather(torch.tensor(list(values), dtype=torch.float64, device="cpu").to(device)).cpu()


def slowest(values: Sequence[float], comm: TorchCollective, device: torch.device) -> list[float]:
    """Return the maximum of each number over ranks."""
    return gathered(values, comm, device).amax(0).tolist()


def start_together(comm: TorchCollective, device: torch.device) -> None:
    """Wait until all ranks are here and idle."""
    comm.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    job: Callable[[], Any], comm: TorchCollective, device: torch.device, repeats: int = 5, seconds: float = 0.5
) -> list[float]:
    """Return the seconds of a job on the slowest rank, for each repetition; ranks start together.

    Args:
        job: work of all ranks.
        comm: the ranks.
        device: of the job.
        repeats: most repetitions.
        seconds: stop early after about this time; at least two repetitions.
    """
    taken: list[float] = []
    while len(taken) <= repeats:  # the first one warms up
        start_together(comm, device)
        begin = Stamp.now(device)
        job()
        taken.append(begin.until(Stamp.now(device)) / 1e3)
        if len(taken) == 1:
            repeats = max(2, min(repeats, round(seconds / max(slowest(taken, comm, device)[0], 1e-9))))
    return slowest(taken[1:], comm, device)
