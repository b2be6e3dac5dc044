"""Measured cost of collectives between ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.tuning.measuring.rank_sync import measure
from lightning_sparse.tuning.performance.cost import NOTHING, Line
from lightning_sparse.tuning.performance.network import Network

SMALLEST, LEAST, LARGEST = 1 << 10, 1 << 16, 1 << 28
"""Bytes: of the message for the price per message; least and most of the largest message."""
ENOUGH = 1 << 20
"""Bytes from which on the price per byte is measurable; small models are timed with such messages, too."""


def measure_network(
    comm: TorchCollective,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    most: int = 1 << 25,
    seconds: float = 8.0,
) -> Network:
    """Time all-reduces and all-gathers: a small one for the price per message, a large one for the price per byte.

    Ranks start each operation together and the slowest counts. Sizes grow fourfold up to the model's, or until time
    runs out, so that a slow link does not delay training for long. Small sizes alone would overrate links that let
    short bursts pass.

    Args:
        comm: the ranks; all of them must call this.
        device: of the gradients.
        dtype: of the gradients, for the all-reduce.
        most: bytes of the largest message to time.
        seconds: about the time that this may take.
    """
    if comm.world_size == 1:
        return Network(NOTHING, NOTHING, 1)
    lines: dict[str, Line] = {}
    jobs: dict[str, tuple[Callable[[Tensor], object], torch.dtype]] = {
        "all_reduce": (partial(comm.start_average, wait=True), dtype),
        "all_gather": (comm.all_gather, torch.uint8),
    }
    for name, (job, kind) in jobs.items():
        taken: dict[int, float] = {}
        size, spent, late = SMALLEST, 0.0, False
        while size <= LEAST or (size <= min(LARGEST, max(ENOUGH, most)) and not late):
            message = torch.zeros(size // kind.itemsize, dtype=kind, device=device)
            times = measure(partial(job, message), comm, device, 7, seconds / 10)
            taken[size] = median(times)
            spent += sum(times)
            # The next size takes about four times as long, three times at least.
            late = spent + 12 * times[-1] > seconds / 2
            size *= 4
        small, large = taken[SMALLEST], max(taken)  # sizes between may be short bursts, faster than the link
        beta = max(0.0, (taken[large] - small) / (large - SMALLEST))
        lines[name] = Line(max(0.0, small - beta * SMALLEST), beta)
    return Network(**lines, ranks=comm.world_size, one_hop=device.type == "cpu" and comm.one_hop)
