"""Measurements of a model, its ranks and a method, and predictions from them. Numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, get_args

from lightning_sparse.core.checks import expect
from lightning_sparse.methods.grouping import Group
from lightning_sparse.tuning.performance.cost import NOTHING, CostModel, Curve, Line, Timeline, end_seconds
from lightning_sparse.tuning.performance.network import Network

Overlap = Literal["none", "comm", "full"]
"""Overlap with backward: ``none`` (exchanges inside backward), ``comm``, the communication only (another thread without
a free processor), or ``full``, selection as well (its own stream or processor)."""
Messages = Literal["group", "step"]
"""Messages that travel together: those of each group, or those of all groups of a step, when the last one is ready."""


class LayerTime(NamedTuple):
    """A module that owns parameters, and the time of its backward pass."""

    name: str
    parameters: tuple[str, ...]
    numel: int
    backward_seconds: float
    """Seconds from the last gradient of the layer before to the last gradient of this one."""


class Traffic(NamedTuple):
    """Traffic of a group through one kind of collective operation in a step."""

    operation: str
    """Such as all_reduce; library_all_reduce is DDP's own."""
    calls: float
    nbytes: Line
    """Bytes of a rank's messages, all calls together, by coordinates of the group; of a tree, all rounds."""


@dataclass(frozen=True)
class GroupCost:
    """Seconds that a group takes with one sparsifier at one density, by its coordinates.

    Args:
        density: of the group.
        select: from the gradient to the selection, without its messages.
        process: computation around the exchange.
        transfer: inside collective operations.
        traffic: messages, for other networks.
    """

    density: float
    select: Line | Curve
    process: Line | Curve
    transfer: Line
    traffic: tuple[Traffic, ...] = ()

    @property
    def compute(self) -> Line | Curve:
        """Seconds of selection and processing, without the transfer."""
        return self.select + self.process

    def model(self, overlap: Overlap) -> CostModel:
        """Return the cost model for an overlap with backward."""
        if overlap == "none":
            return CostModel(NOTHING, self.compute + self.transfer)
        if overlap == "comm":
            return CostModel(self.transfer, self.compute)
        return CostModel(self.compute.line() + self.transfer)

    def joined(self, overlap: Overlap) -> tuple[CostModel, Line]:
        """Return the cost of the group's own work and of its part of the messages, if those of a step travel together.

        Messages from rank to rank are never joined, and keep their price in each group.
        """
        apart = any(part.operation == "send_recv" for part in self.traffic)
        local = self.compute + Line(self.transfer.alpha, 0.0) if apart else self.compute
        messages = replace(self.transfer, alpha=0.0) if apart else self.transfer
        return CostModel(local.line()) if overlap == "full" else CostModel(NOTHING, local), messages

    def towards(self, other: GroupCost, share: float) -> GroupCost:
        """Interpolate linearly to another cost: this one at 0, the other one at 1."""

        def between(a: Any, b: Any) -> Any:
            match a, b:
                case Line(), Line():
                    return Line(between(a.alpha, b.alpha), between(a.beta, b.beta))
                case ((Line() | Curve()), (Line() | Curve())):
                    amounts = sorted({x for one in (a, b) if isinstance(one, Curve) for x in one.amounts})
                    return Curve(tuple(amounts), tuple(between(a(x), b(x)) for x in amounts))
            return a + share * (b - a)

        pairs = [(a, b) for a, b in zip(self.traffic, other.traffic, strict=False) if a.operation == b.operation]
        traffic = tuple(Traffic(a.operation, between(a.calls, b.calls), between(a.nbytes, b.nbytes)) for a, b in pairs)
        names = ("density", "select", "process", "transfer")
        return GroupCost(
            **{name: between(getattr(self, name), getattr(other, name)) for name in names}, traffic=traffic
        )


@dataclass(frozen=True)
class Profile:
    """The parts of a training step: layers, network, and the cost of groups at some densities.

    Args:
        layers: in the order in which backward finishes them, at least one.
        rest_seconds: of a step without any exchange, outside backward.
        network: the collectives between these ranks.
        costs: of a group, at one density or more; sorted by density.
        overlap: with backward.
        bucket_numels: coordinates of DDP's first bucket and of the others. Gradients come bucket by bucket, so that a
            layer cannot be exchanged before its bucket is full.
        messages: that travel together in the predicted steps.

    Raises:
        ValueError: if there are no layers or no costs, a time is negative, or ``overlap`` or ``messages`` is unknown.

    Example:
        >>> from lightning_sparse.methods.grouping import ParameterSize, make_plan
        >>> network = Network(all_reduce=Line(3e-4, 1.2e-8), all_gather=Line(1.5e-4, 2.4e-8), ranks=4)
        >>> head, body = LayerTime("head", ("h",), 500_000, 2e-3), LayerTime("body", ("b",), 9_000, 1e-4)
        >>> costs = [GroupCost(d, Line(30e-6, 2e-9), NOTHING, network.all_gather.per(8 * d)) for d in (0.001, 0.1)]
        >>> profile = Profile([head, body], 10e-3, network, costs, "comm", (0, 0))
        >>> sizes = [ParameterSize("b", 9_000, 4, "float32"), ParameterSize("h", 500_000, 4, "float32")]
        >>> [round(profile.step_seconds(make_plan(sizes, grouping), 0.1), 4) for grouping in ("layer", "model")]
        [0.0231, 0.0231]
    """

    layers: Sequence[LayerTime]
    rest_seconds: float
    network: Network
    costs: Sequence[GroupCost]
    overlap: Overlap
    bucket_numels: tuple[float, float]
    messages: Messages = "group"

    def __post_init__(self) -> None:
        if not self.layers or not self.costs:
            raise ValueError("Expected a profile of at least one layer, at one density at least, but got none.")
        for name, allowed in (("overlap", get_args(Overlap)), ("messages", get_args(Messages))):
            given = getattr(self, name)
            expect(given in allowed, name, f"one of {', '.join(allowed)}", given)
        expect(self.rest_seconds >= 0, "rest_seconds", "at least 0", self.rest_seconds)
        for layer in self.layers:
            expect(layer.backward_seconds >= 0, "backward_seconds", "at least 0", layer)
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "costs", tuple(sorted(self.costs, key=lambda cost: cost.density)))

    @property
    def backward_seconds(self) -> list[float]:
        """Seconds of backward of each layer."""
        return [layer.backward_seconds for layer in self.layers]

    @property
    def delivery_seconds(self) -> list[float]:
        """Seconds from DDP's delivery of one layer to that of the next; the sum is that of :attr:`backward_seconds`."""
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
        """Seconds of a step without any exchange."""
        return self.rest_seconds + sum(self.backward_seconds)

    def group_cost(self, density: float) -> GroupCost:
        """Return the cost of a group at a density: linear between measured ones, the nearest outside them."""
        low = self.costs[0]
        for high in self.costs:
            if density <= high.density:
                known = high is low or density == high.density
                return high if known else low.towards(high, (density - low.density) / (high.density - low.density))
            low = high
        return low

    def cost(self, density: float) -> CostModel:
        """Return the cost model at a density; if messages travel together, that of the group's own work."""
        return self._parts(density)[0]

    def _parts(self, density: float) -> tuple[CostModel, Line]:
        """Return the cost model, and the line of messages that travel with those of other groups."""
        cost = self.group_cost(density)
        return (cost.model(self.overlap), NOTHING) if self.messages == "group" else cost.joined(self.overlap)

    def timeline(self, plan: Sequence[Group]) -> tuple[list[Group], Timeline]:
        """Return sparsified groups in the order in which they are complete, and the times.

        Args:
            plan: groups; dense ones are left out. Parameters that the profile does not know take no time.

        Returns:
            The groups in order, with their coordinates and the seconds of backward from one to the next.
        """
        moment: dict[str, float] = {}
        for layer, elapsed in zip(self.layers, accumulate(self.delivery_seconds), strict=True):
            moment |= dict.fromkeys(layer.parameters, elapsed)
        complete = {g.name: max(moment.get(p.name, 0.0) for p in g.parameters) for g in plan if not g.dense}
        groups = sorted((g for g in plan if not g.dense), key=lambda g: complete[g.name])
        moments = [0.0, *(complete[g.name] for g in groups)]
        return groups, ([g.numel for g in groups], [later - before for before, later in pairwise(moments)])

    def step_seconds(self, plan: Sequence[Group], density: float) -> float:
        """Return the seconds of a whole step with these groups, at one density or at a group's own; dense ones, too."""
        groups, timeline = self.timeline(plan)
        sparse = self.timeline_seconds(timeline, [group.density or density for group in groups])
        return sparse + self.dense_seconds(plan)

    def dense_seconds(self, plan: Sequence[Group]) -> float:
        """Return the seconds of one all-reduce of all groups that stay dense, which nothing hides."""
        nbytes = sum(p.numel * p.element_size for group in plan if group.dense for p in group.parameters)
        return self.network.all_reduce(nbytes)

    def timeline_seconds(self, timeline: Timeline, density: float | Sequence[float]) -> float:
        """Return the seconds of a whole step with groups of these numbers, at one density or each at its own."""
        densities = density if isinstance(density, Sequence) else [density] * len(timeline[0])
        parts = {one: self._parts(one) for one in densities}
        done = end_seconds(timeline, [parts[one][0] for one in densities], [parts[one][1] for one in densities])
        return self.rest_seconds + max(done, sum(self.backward_seconds))
