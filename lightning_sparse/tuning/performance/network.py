"""Cost of collectives between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparse.core.checks import Settings, check_integer
from lightning_sparse.tuning.performance.cost import Line


@dataclass(frozen=True)
class Network(Settings):
    """Cost of collectives between ranks.

    Args:
        all_reduce: seconds by bytes of the vector that DDP or another user of the library sums.
        all_gather: seconds by bytes of each rank.
        ranks: number n of measured ranks, at least 1.
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
