"""The first job of a new cluster: it measures links and says what an exchange of gradients will take on them."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lightning_sparse import FabricSparseDDPStrategy
from lightning_sparse.core.checks import expect, is_number
from lightning_sparse.core.console import Table, plain
from lightning_sparse.density import check_density
from lightning_sparse.tools.advisor.networks import between, farther, on
from lightning_sparse.tools.advisor.prediction import MARGIN, Method, Scenario, scenarios
from lightning_sparse.tools.links import Links, measure_links

BACKWARD = 2 / 3
"""Share of backward in the computation of a step: dense all-reduces go on beside it."""
FEW = 16
"""Most ranks of which every link is shown."""


class Expectation(NamedTuple):
    """Exchanges of a model's gradients on a network."""

    ranks: int
    gbit: float | None
    rtt_ms: float
    """These three are fields of a :class:`~lightning_sparse.tools.advisor.prediction.Scenario`."""
    parameters: int
    dense_seconds: float
    """All-reduce of 32 bits of each parameter."""
    half_seconds: float
    """All-reduce of 16 bits of each parameter."""
    sparse_seconds: float
    """The default at the given density, its computation included."""
    pays_below_seconds: float
    """Computation of a step below which the sparse step is shorter than DDP's; 0: never."""
    messages_seconds: float
    """Of the sparse exchange, the part that ``overlap=True`` may hide behind backward."""

    @property
    def label(self) -> str:
        """Name of the network in tables."""
        return Scenario(*self[:3]).label


class Probe(NamedTuple):
    """Measurements, and expectations by them."""

    links: Links
    density: float
    expected: tuple[Expectation, ...]

    def verdicts(self) -> list[str]:
        """Return a sentence for each expectation."""
        sentences = []
        for one in self.expected:
            dense, sparse = 1e3 * one.dense_seconds, 1e3 * one.sparse_seconds
            times = f"dense {plain(dense)} ms, sparse {plain(sparse)} ms a step"
            below = f"sparse pays if the computation of a step takes less than {plain(1e3 * one.pays_below_seconds)} ms"
            sentences.append(
                f"{one.label}, {plain(one.parameters / 1e6)} million parameters: {times}; "
                f"{below if one.pays_below_seconds > 0 else 'stay dense'}."
            )
        return sentences

    def assumptions(self) -> list[str]:
        """Return the assumptions of the expectations, one sentence each."""
        return [
            "Measured: the links from each rank to the next; all-reduces and all-gathers of all ranks; the default's "
            "exchange of up to 4 million made-up gradients, with AdamW's second moments.",
            f"DDP hides its all-reduce behind backward, which is {BACKWARD:.0%} of a step's computation. The sparse "
            "exchange hides nothing: messages of a step travel together, at its end. With overlap=True its messages "
            "may hide behind backward, too, but for those of the groups that backward finishes last.",
            f"Sparse pays if it makes the step at least {MARGIN:.0%} shorter than DDP's with 32 bits.",
            (
                "An added round trip delays each of the 2 (n - 1) hops of DDP's all-reduce, an exchange's all-gather "
                "once and its all-reduce twice."
                if self.links.network.one_hop
                else "An added round trip delays each hop by its half: n - 1 hops for an all-gather, 2 log2 n for an "
                "all-reduce."
            )
            + " Other rates are those of a ring.",
            "Step time is not training time. lightning-sparse advise predicts with your own model.",
        ]

    def tables(self) -> list[Table]:
        """Return the links and the expectations as tables."""
        rows = [
            [
                one.label,
                plain(one.parameters / 1e6),
                *(plain(1e3 * seconds) for seconds in (*one[4:7], one.messages_seconds)),
                _below(one),
            ]
            for one in self.expected
        ]
        header = [
            "network",
            "million parameters",
            "dense ms",
            "16 bits ms",
            f"sparse {self.density:g} ms",
            "messages of it ms",
            "pays below",
        ]
        return [self._links(), Table("Exchange of a step; computation of a step below which sparse pays", header, rows)]

    def _links(self) -> Table:
        known = self.links.links
        cells = [
            [f"{rank} to {(rank + 1) % len(known)}", f"{one.source} to {one.target}", *_numbers([one])]
            for rank, one in enumerate(known)
        ]
        if len(known) > FEW:
            within = [one for one in known if one.source == one.target]
            between = [one for one in known if one.source != one.target]
            named = (("within a host", within), ("between hosts", between))
            cells = [[name, f"{len(some)} links", *_numbers(some)] for name, some in named if some]
        return Table(
            "Links" + (", the slowest of each kind" if len(known) > FEW else ""),
            ["ranks", "hosts", "RTT ms", "Gbit/s"],
            cells,
        )


def _numbers(links: Sequence[Any]) -> list[str]:
    trip, rate = max(one.round_trip for one in links), min(one.bits_per_second for one in links)
    return [plain(1e3 * trip), plain(rate / 1e9)]


def _below(one: Expectation) -> str:
    return f"{plain(1e3 * one.pays_below_seconds)} ms" if one.pays_below_seconds > 0 else "never"


def expect_on(
    links: Links,
    density: float,
    parameters: Sequence[float],
    ranks: Sequence[int] = (),
    gbit: Sequence[float] = (),
    rtt: Sequence[float] = (),
) -> Iterator[Expectation]:
    """Say what exchanges take, on the measured network and on others.

    Args:
        links: the measurements.
        density: of the sparse exchange that was measured.
        parameters: numbers of parameters.
        ranks: other numbers of ranks.
        gbit: other rates of a link in one direction, in Gbit/s.
        rtt: milliseconds that are added to each round trip.

    Raises:
        ValueError: for numbers outside their ranges.
    """
    check_sizes(parameters)
    known = links.network.ranks
    method = Method("union_top_k", density, links.sparse, second_moments=True)
    for scenario in scenarios(known, ranks, gbit, rtt):
        n, rate, added = scenario
        near = links.network if (n, rate) == (known, None) else between(links.network, n, rate and rate * 1e9)
        cost = links.sparse if near is links.network else method.between(known, n, near).cost
        network = farther(near, added / 1e3)
        for count in map(int, parameters):
            dense, half = network.all_reduce(4 * count), network.all_reduce(2 * count)
            longer = on(network, cost).transfer(count) - on(near, cost).transfer(count)
            sparse = float(cost.compute(count) + cost.transfer(count)) + longer
            messages = float(cost.transfer(count)) + longer
            yield Expectation(*scenario, count, dense, half, sparse, pays_below(dense, sparse), messages)


def check_sizes(parameters: Sequence[float]) -> None:
    """Raise for numbers of parameters that cannot be.

    Raises:
        ValueError: naming the argument.
    """
    for count in parameters:
        several = is_number(count) and 1 <= count < math.inf
        expect(several, "parameters", "a number of parameters, at least 1, such as 14e6 for 14 million", count)


def pays_below(dense: float, sparse: float) -> float:
    """Return the computation of a step below which a sparse exchange pays, in seconds; 0 if it never does.

    A dense step takes ``C + max(0, dense - b C)`` for a computation of C, of which a share b is backward, and a sparse
    one ``C + sparse``. It pays if it is shorter by :data:`~lightning_sparse.tools.advisor.prediction.MARGIN`.

    Args:
        dense: seconds of the dense exchange.
        sparse: seconds of the sparse one.

    Example:
        >>> [round(pays_below(*seconds), 3) for seconds in ((1.0, 0.1), (1.0, 0.0), (0.1, 0.1))]
        [1.244, 1.39, 0.0]
    """
    kept = 1 - MARGIN
    return max(0.0, min((kept * dense - sparse) / (1 - kept * (1 - BACKWARD)), dense / BACKWARD))


def probe(
    devices: int | None = None,
    nodes: int | None = None,
    accelerator: str = "auto",
    density: float = 0.01,
    parameters: Sequence[float] = (14e6, 124e6, 1.5e9),
    ranks: Sequence[int] = (),
    gbit: Sequence[float] = (),
    rtt: Sequence[float] = (),
) -> Probe | None:
    """Start the ranks, or join those that a launcher has started, and measure.

    Args:
        devices: processes of a node; None: those of torchrun or SLURM, else all GPUs, or 2 processes without GPUs.
        nodes: number of nodes; None: those of torchrun or SLURM, else 1.
        accelerator: as of Lightning.
        density: of the sparse exchange, in (0, 1].
        parameters: see :func:`expect_on`, as are the rest.
        ranks: other numbers of ranks.
        gbit: other rates.
        rtt: added round trips.

    Returns:
        The result; None on ranks other than the first.

    Raises:
        ValueError: for numbers outside their ranges, one rank only, or devices that this machine has not.
    """
    here = _launched()
    devices, nodes = (known if given is None else given for given, known in zip((devices, nodes), here, strict=True))
    for name, value in (("devices", devices), ("nodes", nodes)):
        expect(value is None or value > 0, name, "at least 1", value)
    check_density(density)
    check_sizes(parameters)
    scenarios(2, ranks, gbit, rtt)  # for its errors, before anything is measured
    package = importlib.import_module(FabricSparseDDPStrategy.package)
    chosen: Any = devices
    if chosen is None:
        import torch

        chosen = "auto" if accelerator != "cpu" and torch.cuda.is_available() else 2
    try:
        fabric = package.Fabric(accelerator=accelerator, devices=chosen, num_nodes=nodes or 1, strategy="ddp")
    except Exception as error:  # of several kinds
        raise ValueError(f"Expected an accelerator and devices that this machine has. Lightning: {error}") from error
    fabric.launch()
    links = measure_links(fabric.device, density)
    expected = tuple(expect_on(links, density, parameters, ranks, gbit, rtt))
    return Probe(links, density, expected) if fabric.global_rank == 0 else None


def _launched() -> tuple[int | None, int | None]:
    """Return the processes of a node and the nodes that torchrun or SLURM have started."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if "SLURM_NTASKS" in os.environ and "SLURM_NNODES" in os.environ:
        nodes = int(os.environ["SLURM_NNODES"])
        return int(os.environ["SLURM_NTASKS"]) // nodes, nodes
    return None, None


__all__ = ["Expectation", "Probe", "expect_on", "pays_below", "probe"]
