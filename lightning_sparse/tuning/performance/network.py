"""Cost of collectives between ranks, as measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from lightning_sparse.core.checks import Settings, check_integer
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.tuning.performance.cost import NOTHING, Line
from lightning_sparse.tuning.performance.rank_sync import measure

SMALLEST, LEAST, LARGEST = 1 << 10, 1 << 16, 1 << 28
"""Bytes: of the message for the price per message; least and most of the largest message."""
ENOUGH = 1 << 20
"""Bytes from which on the price per byte is measurable; small models are timed with such messages, too."""


@dataclass(frozen=True)
class Network(Settings):
    """Cost of collectives between ranks.

    Args:
        all_reduce: seconds by bytes of the vector that DDP or another user of the library sums.
        all_gather: seconds by bytes of each rank.
        ranks: number n of measured ranks, at least 1; see :meth:`line`.
        one_hop: True if exchanges send from each rank to all others at once, see :attr:`.TorchCollective.one_hop`.

    Raises:
        ValueError: if ``ranks`` is no positive integer.

    Example:
        >>> network = Network(all_reduce=Line(3e-4, 1.2e-9), all_gather=Line(1.5e-4, 2.4e-9), ranks=4)
        >>> [f"{1e3 * seconds:.2f} ms" for seconds in (network.all_reduce(4_000_000), network.all_gather(80_000))]
        ['5.10 ms', '0.34 ms']
    """

    all_reduce: Line
    all_gather: Line
    ranks: int = 2
    one_hop: bool = False

    def __post_init__(self) -> None:
        check_integer(self.ranks, "ranks")

    def line(self, operation: str) -> Line:
        """Return the seconds of one operation by bytes of each rank.

        ``library_all_reduce`` and ``all_gather`` are known. The others, messages of exchanges, follow from one hop of
        the all-gather, a fixed price and a price for each byte: ``send_recv`` is one hop, ``all_to_all`` sends an n-th
        part to each other rank. In a ring, the all-gather has n - 1 hops, ``all_reduce`` is the library's, and
        ``broadcast`` passes through all ranks in pieces (n - 1 fixed prices, each byte once). Where each rank sends to
        all others at once, the all-gather has one fixed price, ``all_reduce`` two (one between two ranks), and a
        broadcast is a tree of ``log2 n`` hops.

        Raises:
            ValueError: for any other operation.
        """
        others = max(1, self.ranks - 1)
        hop = Line(self.all_gather.alpha / (1 if self.one_hop else others), self.all_gather.beta / others)
        part = Line(self.all_gather.alpha, others / self.ranks * hop.beta)
        levels = math.ceil(math.log2(others + 1))
        total = self.all_gather if self.ranks == 2 else Line(2 * part.alpha, 2 * part.beta)
        lines = {
            "library_all_reduce": self.all_reduce,
            "all_gather": self.all_gather,
            "all_to_all": part,
            "send_recv": hop,
            "all_reduce": total if self.one_hop else self.all_reduce,
            "broadcast": Line(levels * hop.alpha, levels * hop.beta)
            if self.one_hop
            else Line(others * hop.alpha, hop.beta),
        }
        if operation not in lines:
            raise ValueError(f"Expected operation to be one of {', '.join(lines)}, but got {operation!r}.")
        return lines[operation]


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
