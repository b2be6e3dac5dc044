"""What collectives cost between these ranks."""

from __future__ import annotations

from functools import partial

import torch

from lightning_sparse.collective import Collective
from lightning_sparse.grouping.cost import NOTHING, Line, Network
from lightning_sparse.profiling.together import measure

SIZES = tuple(4**i for i in range(4, 12))
"""Bytes that a rank gives: 256 to 4 Mi."""


def measure_network(
    comm: Collective, device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = 4.0
) -> Network:
    """Time all-reduces and all-gathers of growing sizes and put a line through each.

    Ranks start each operation together and the slowest counts. Sizes stop growing when time runs out, but not before
    64 KiB, so that a slow link does not hold up training for long.

    Args:
        comm: the ranks; all of them must call this.
        device: where gradients live.
        dtype: of gradients, for the all-reduce.
        seconds: about how long this may take.
    """
    if comm.world_size == 1:
        return Network(NOTHING, NOTHING, 1)
    by_bytes: dict[str, Line] = {}
    for name, kind in (("all_reduce", dtype), ("all_gather", torch.uint8)):
        amounts: list[float] = []
        taken: list[float] = []
        for size in SIZES:
            message = torch.zeros(size // kind.itemsize, dtype=kind, device=device)
            times = measure(partial(getattr(comm, name), message), comm, device, 7, seconds / 8)
            amounts += [float(size)] * len(times)
            taken += times
            # The next size takes about four times as long, twice at least.
            if size >= 1 << 16 and sum(taken) + 8 * times[-1] > seconds / 2:
                break
        by_bytes[name] = Line.fit(amounts, taken)
    return Network(**by_bytes, ranks=comm.world_size)
