"""What collectives cost between these ranks."""

from __future__ import annotations

from functools import partial

import torch

from lightning_sparse.collective import Collective
from lightning_sparse.grouping.cost import NOTHING, Line, Network
from lightning_sparse.profiling.together import measure

SMALLEST, LEAST, LARGEST = 1 << 10, 1 << 16, 1 << 28
"""Bytes: of the message that tells the price of a message, of the largest one at least, and at most."""
ENOUGH = 1 << 20
"""Bytes from which the price of a byte stands out; small models are timed with such messages, too."""
KEPT = 4
"""Largest sizes that decide about the line; below them, links are often faster for a moment than they are for long."""


def measure_network(
    comm: Collective,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    most: int = 1 << 25,
    seconds: float = 4.0,
) -> Network:
    """Time all-reduces and all-gathers of growing sizes and put a line through each.

    Ranks start each operation together and the slowest counts. Sizes grow fourfold up to what a model sends, or until
    time runs out, so that a slow link does not hold up training for long; small sizes alone would flatter links that
    let short bursts pass.

    Args:
        comm: the ranks; all of them must call this.
        device: where gradients live.
        dtype: of gradients, for the all-reduce.
        most: bytes of the largest message that is of interest.
        seconds: about how long this may take.
    """
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
        sizes = sorted(by_size)
        points = [(float(s), t) for s in {sizes[0], *sizes[-KEPT:]} for t in by_size[s]]
        lines[name] = Line.fit(*zip(*points, strict=True))
    return Network(**lines, ranks=comm.world_size)
