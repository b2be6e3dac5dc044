"""Cost of collectives between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_sparse.core.checks import Settings, check_integer
from lightning_sparse.tuning.performance.cost import Line


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
