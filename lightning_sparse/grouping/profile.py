"""What was measured of a model, its ranks and a way to exchange, and what follows from it. Numbers only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from lightning_sparse.grouping.cost import NOTHING, CostModel, Curve, Line, Network
from lightning_sparse.grouping.merge import greedy_merge, iteration_seconds, optimal_merge

Overlap = Literal["nothing", "transfer", "all"]
"""What goes on beside backward: ``nothing`` (exchanges inside backward), the ``transfer`` only (another thread, but no
processor to spare for it), or ``all`` of selection and exchange (a stream or a processor of their own)."""
Timeline = tuple[Sequence[int], Sequence[float]]
"""Coordinates of each group, and the seconds of backward from one group to the next, in the order of backward."""
MergeRule = Literal["optimal", "published"]
"""How to merge layers: exactly, or by OMGS-SGD's greedy rule."""


class LayerTime(NamedTuple):
    """A module that owns parameters, and how long its backward pass takes."""

    name: str
    parameters: tuple[str, ...]
    numel: int
    backward_seconds: float
    """From the last gradient of the layer before to the last gradient of this one."""


class Traffic(NamedTuple):
    """What a group puts through one kind of collective operation in a step."""

    operation: str
    """A method of :class:`~lightning_sparse.collective.Collective`."""
    calls: float
    nbytes: Line
    """Bytes of a rank's messages, all calls together, by coordinates of the group; of a tree, all rounds."""

    def seconds(self, network: Network) -> Line:
        """Seconds by coordinates on a network."""
        line = network.line(self.operation)
        return Line(self.calls * line.alpha + line.beta * self.nbytes.alpha, line.beta * self.nbytes.beta)


@dataclass(frozen=True)
class GroupCost:
    """Seconds that a group takes with one sparsifier at one density, by its coordinates.

    Args:
        density: of the group.
        select: from the gradient to the selection, what ranks ask each other left out.
        process: what a rank computes around the exchange.
        transfer: inside collective operations.
        traffic: what is transferred, for other networks.
    """

    density: float
    select: Line | Curve
    process: Line | Curve
    transfer: Line
    traffic: tuple[Traffic, ...] = ()

    @property
    def compute(self) -> Line | Curve:
        """All but the transfer."""
        return self.select + self.process

    def model(self, overlap: Overlap) -> CostModel:
        """The cost model, by what goes on beside backward."""
        if overlap == "nothing":
            return CostModel(NOTHING, self.compute + self.transfer)
        if overlap == "transfer":
            return CostModel(self.transfer, self.compute)
        return CostModel(self.compute.line() + self.transfer)

    def on(self, network: Network) -> GroupCost:
        """The same traffic on another network of as many ranks; unchanged where traffic is not known."""
        if not self.traffic:
            return self
        transfer = NOTHING
        for part in self.traffic:
            transfer += part.seconds(network)
        return replace(self, transfer=transfer)

    def towards(self, other: GroupCost, share: float) -> GroupCost:
        """On the straight line to another cost: this one at 0, the other one at 1."""

        def between(a: float, b: float) -> float:
            return a + share * (b - a)

        def line(a: Line, b: Line) -> Line:
            return Line(between(a.alpha, b.alpha), between(a.beta, b.beta))

        def either(a: Line | Curve, b: Line | Curve) -> Line | Curve:
            if isinstance(a, Line) and isinstance(b, Line):
                return line(a, b)
            amounts = sorted({x for one in (a, b) if isinstance(one, Curve) for x in one.amounts})
            return Curve(tuple(amounts), tuple(between(a(x), b(x)) for x in amounts))

        return GroupCost(
            between(self.density, other.density),
            either(self.select, other.select),
            either(self.process, other.process),
            line(self.transfer, other.transfer),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers."""
        return asdict(self) | {"traffic": [[part.operation, part.calls, asdict(part.nbytes)] for part in self.traffic]}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> GroupCost:
        """The inverse of :meth:`as_dict`; KeyError or TypeError for anything else."""
        return cls(
            plain["density"],
            _from_dict(plain["select"]),
            _from_dict(plain["process"]),
            Line(**plain["transfer"]),
            tuple(Traffic(operation, calls, Line(**line)) for operation, calls, line in plain["traffic"]),
        )


def _from_dict(plain: dict[str, Any]) -> Line | Curve:
    return Curve(**plain) if "amounts" in plain else Line(**plain)


@dataclass(frozen=True)
class Profile:
    """A training step, taken apart: layers, network, and the cost of groups at some densities.

    Args:
        fingerprint: of the model, the settings and the ranks that this was measured with.
        layers: in the order in which backward finishes them, at least one.
        rest_seconds: of a step without any exchange, all that is not backward.
        network: the collectives between these ranks.
        costs: of a group, at one density or more; put in order of density.
        overlap: what goes on beside backward.
        bucket_numels: coordinates of DDP's first bucket and of the others. Gradients are handed over bucket by bucket,
            so that a layer cannot be exchanged before its bucket is full.

    Raises:
        ValueError: if there are no layers or no costs, a time is negative, or ``overlap`` is unknown.

    Example:
        >>> network = Network.ring(ranks=4, latency=50e-6, bits_per_second=1e9)
        >>> head, body = LayerTime("head", ("h",), 500_000, 2e-3), LayerTime("body", ("b",), 9_000, 1e-4)
        >>> costs = [GroupCost(d, Line(30e-6, 2e-9), NOTHING, network.gather_pairs(d)) for d in (0.001, 0.1)]
        >>> profile = Profile("", [head, body], 10e-3, network, costs, "transfer")
        >>> profile.merge(0.01)
        [[0, 1]]
        >>> [round(profile.step_seconds(groups, 0.1), 4) for groups in ([[0], [1]], [[0, 1]])]
        [0.0231, 0.0231]
        >>> round(profile.exposed_seconds([[0, 1]], 0.1), 4)
        0.011
    """

    fingerprint: str
    layers: Sequence[LayerTime]
    rest_seconds: float
    network: Network
    costs: Sequence[GroupCost]
    overlap: Overlap
    bucket_numels: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if not self.layers or not self.costs:
            raise ValueError("Expected a profile of at least one layer, at one density at least, but got none.")
        if self.overlap not in get_args(Overlap):
            raise ValueError(f"Expected overlap to be one of {', '.join(get_args(Overlap))} but got {self.overlap!r}.")
        if not self.rest_seconds >= 0:
            raise ValueError(f"Expected rest_seconds to be at least 0 but got {self.rest_seconds!r}.")
        for layer in self.layers:
            if not layer.backward_seconds >= 0:
                raise ValueError(f"Expected backward_seconds to be at least 0 but got {layer!r}.")
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "costs", tuple(sorted(self.costs, key=lambda cost: cost.density)))

    @property
    def numels(self) -> list[int]:
        """Coordinates of each layer."""
        return [layer.numel for layer in self.layers]

    @property
    def backward_seconds(self) -> list[float]:
        """Backward of each layer."""
        return [layer.backward_seconds for layer in self.layers]

    @property
    def delivery_seconds(self) -> list[float]:
        """From the moment when DDP hands over one layer to the moment when it hands over the next; the same in sum."""
        seconds: list[float] = []
        waiting, filled, cap = 0, 0.0, self.bucket_numels[0]
        for layer in self.layers:
            seconds.append(0.0)
            seconds[waiting] += layer.backward_seconds
            filled += layer.numel
            if filled >= cap:
                waiting, filled, cap = len(seconds), 0.0, self.bucket_numels[1]
        return seconds

    @property
    def compute_seconds(self) -> float:
        """A step without any exchange."""
        return self.rest_seconds + sum(self.backward_seconds)

    def group_cost(self, density: float) -> GroupCost:
        """The cost of a group at a density; between measured ones a straight line, outside them the nearest."""
        low = self.costs[0]
        for high in self.costs:
            if density <= high.density:
                known = high is low or density == high.density
                return high if known else low.towards(high, (density - low.density) / (high.density - low.density))
            low = high
        return low

    def cost(self, density: float) -> CostModel:
        """The cost model at a density."""
        return self.group_cost(density).model(self.overlap)

    def merge(
        self,
        density: float,
        rule: MergeRule = "optimal",
        numels: Sequence[int] | None = None,
        backward_seconds: Sequence[float] | None = None,
    ) -> list[list[int]]:
        """Layers to exchange together, by their positions.

        Args:
            density: at which they are exchanged.
            rule: "optimal", or "published" for OMGS-SGD's greedy rule.
            numels: of other layers than the profile's.
            backward_seconds: of these, as they are handed over.
        """
        merge = {"optimal": optimal_merge, "published": greedy_merge}[rule]
        return merge(numels or self.numels, backward_seconds or self.delivery_seconds, self.cost(density))

    def step_seconds(self, groups: Sequence[Sequence[int]], density: float) -> float:
        """A whole step with these groups of layers."""
        iteration = iteration_seconds(groups, self.numels, self.delivery_seconds, self.cost(density))
        return self.rest_seconds + iteration

    def timeline_seconds(self, timeline: Timeline, density: float | Sequence[float]) -> float:
        """A whole step with these groups, whatever they are made of; at one density, or each at its own."""
        numels, backward = timeline
        densities = density if isinstance(density, Sequence) else [density] * len(numels)
        costs = {one: self.cost(one) for one in densities}
        ready = done = 0.0
        for numel, seconds, one in zip(numels, backward, densities, strict=True):
            ready += seconds + costs[one].select_seconds(numel)
            done = max(ready, done) + costs[one].exchange_seconds(numel)
        return self.rest_seconds + max(done, sum(self.backward_seconds))

    def exposed_seconds(self, groups: Sequence[Sequence[int]], density: float) -> float:
        """How much longer a step is than one without any exchange."""
        return self.step_seconds(groups, density) - self.compute_seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers; for checkpoints and JSON."""
        layers, costs = [list(layer) for layer in self.layers], [cost.as_dict() for cost in self.costs]
        return asdict(self) | {"layers": layers, "costs": costs}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Profile:
        """The inverse of :meth:`as_dict`.

        Raises:
            ValueError: if something is missing or of another kind.
        """
        try:
            lines = {name: Line(**plain["network"][name]) for name in ("all_reduce", "all_gather")}
            return cls(
                plain["fingerprint"],
                [LayerTime(name, tuple(names), numel, seconds) for name, names, numel, seconds in plain["layers"]],
                plain["rest_seconds"],
                Network(**lines, ranks=plain["network"]["ranks"]),
                [GroupCost.from_dict(cost) for cost in plain["costs"]],
                plain["overlap"],
                tuple(plain["bucket_numels"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"Expected a profile as Profile.as_dict() gives it, but: {error!r}.") from error
