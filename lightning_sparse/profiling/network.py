"""What collectives cost between these ranks."""

from __future__ import annotations

from functools import partial
from statistics import median

import torch

from lightning_sparse.collective import Collective
from lightning_sparse.grouping.cost import NOTHING, Line, Network
from lightning_sparse.profiling.together import busy_processor, measure

SMALLEST, LEAST, LARGEST = 1 << 10, 1 << 16, 1 << 28
"""Bytes: of the message that tells the price of a message, of the largest one at least, and at most."""
ENOUGH = 1 << 20
"""Bytes from which the price of a byte stands out; small models are timed with such messages, too."""


def measure_network(
    comm: Collective,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    most: int = 1 << 25,
    seconds: float = 8.0,
    busy: bool = False,
) -> Network:
    """Time all-reduces and all-gathers: a small one for the price of a message, a large one for the price of a byte.

    Ranks start each operation together and the slowest counts. Sizes grow fourfold up to what a model sends, or until
    time runs out, so that a slow link does not hold up training for long; small sizes alone would flatter links that
    let short bursts pass.

    Args:
        comm: the ranks; all of them must call this.
        device: where gradients live.
        dtype: of gradients, for the all-reduce.
        most: bytes of the largest message that is of interest.
        seconds: about how long this may take.
        busy: with every rank's processor at work, see :func:`~lightning_sparse.profiling.busy_processor`.
    """
    if busy:
        with busy_processor():
            return measure_network(comm, device, dtype, most, seconds)
    if comm.world_size == 1:
        return Network(NOTHING, NOTHING, 1)
    lines: dict[str, Line] = {}
    for name, kind in (("all_reduce", dtype), ("all_gather", torch.uint8)):
        by_size: dict[int, list[float]] = {}
        size, spent = SMALLEST, 0.0
        while True:
            message = torch.zeros(size // kind.itemsize, dtype=kind, device=device)
            by_size[size] = measure(partial(getattr(comm, name), message), comm, device, 7, seconds / 10)
            spent += sum(by_size[size])
            # The next size takes about four times as long, three times at least.
            late = spent + 12 * by_size[size][-1] > seconds / 2
            size *= 4
            if size > min(LARGEST, max(ENOUGH, most)) or (late and size > LEAST):
                break
        small = median(by_size.pop(SMALLEST))
        large = max(by_size)  # smaller ones are often faster for a moment than the link is for long
        beta = max(0.0, (median(by_size[large]) - small) / (large - SMALLEST))
        lines[name] = Line(max(0.0, small - beta * SMALLEST), beta)
    return Network(**lines, ranks=comm.world_size)
