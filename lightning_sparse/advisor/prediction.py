"""How long a step would take: from what was measured, for every method, grouping and network. Numbers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_sparse.grouping import (
    Bucket,
    GroupCost,
    Grouping,
    Layer,
    LayerTime,
    Line,
    MergeBelow,
    Model,
    Network,
    OptimalMerge,
    Overlap,
    ParameterSize,
    Profile,
    ProfiledMerge,
    Rules,
    Traffic,
    make_plan,
    timeline,
)
from lightning_sparse.grouping.plan import DDP_BUCKET_MB, bucket_numels
from lightning_sparse.memory.first_moment import FirstMoment
from lightning_sparse.types import Agreement

GROUPINGS: dict[str, Grouping] = {
    "layer": Layer(),
    "bucket": Bucket(),
    "merge_below": MergeBelow(),
    "model": Model(),
    "optimal_merge": OptimalMerge(),
}
ALL_SPARSE = Rules(dense_ndim=0, dense_numel=0)
"""Small parameters are counted as sparsified: kept dense, they are one short message more."""
HALVED = ("fp16", "bf16")
"""DDP's hooks that send 16 bits of each value."""
EVERYTHING = "everything"
"""Dense in groups of ours instead of DDP's buckets."""
MARGIN = 0.05
"""A step must be shorter by this share to be worth a change of the exchange."""
LATENCY = 30e-6
"""Seconds from one rank to the next, where no network could be measured."""
BEST_TRAINED = ("union_topk", "shared_topk", "clt_k", "dgc", "topk", "striped_topk", "ok_topk", "redsync", "sidco_gp")
"""Sparsifiers from docs/comparison.md, the one that trains best at equal traffic first; others come after them."""


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients, and what a group costs with it.

    Args:
        name: of a sparsifier, or "dense", "fp16", "bf16", "powersgd" for what comes with DDP.
        density: of a sparsifier; 1 for the others.
        agreement: how selections of ranks relate, which decides how messages grow with ranks.
        cost: measured, at the number of ranks that took part.
        builtin: comes with DDP: exchanged in DDP's buckets, beside backward.
    """

    name: str
    density: float
    agreement: Agreement
    cost: GroupCost
    builtin: bool = False

    @property
    def label(self) -> str:
        """Name and density."""
        return self.name if self.builtin or self.agreement is Agreement.EVERYTHING else f"{self.name} {self.density:g}"

    def between(self, known: int, ranks: int, network: Network, value_bytes: int = 4) -> Method:
        """The same method between another number of ranks, on another network.

        Messages per coordinate of a group change like this: picks of methods in which each rank picks by itself stay as
        long as they are, and their union grows with the ranks, up to everything; where ranks share a budget, or each
        adds up a region for all, one rank's message shrinks and the union stays. A tree has one round more with each
        doubling.
        """
        rounds = _doublings(ranks) / max(1, _doublings(known))
        by_region = any(part.operation == "all_to_all" for part in self.cost.traffic)
        together = by_region or self.agreement in (Agreement.SHARED, Agreement.DISJOINT)
        parts = []
        for part in self.cost.traffic:
            fixed, each, calls = part.nbytes.alpha, part.nbytes.beta, part.calls
            if part.operation == "send_on":
                fixed, each, calls = fixed * rounds, each * rounds, calls * rounds
            elif part.operation == "all_gather" and together:
                each *= known / ranks
            elif part.operation == "all_reduce" and self.agreement is Agreement.INDEPENDENT:
                each = min(max(each, value_bytes), each * ranks / known)
            parts.append(Traffic(part.operation, calls, Line(fixed, each)))
        return replace(self, cost=replace(self.cost, traffic=tuple(parts)).on(network))


def _doublings(ranks: int) -> int:
    return max(0, ranks - 1).bit_length()


@dataclass(frozen=True)
class Measured:
    """Everything that predictions start from, as one machine saw it.

    Args:
        sizes: of all parameters, in order of registration.
        layers: in the order of backward, with their times.
        rest_seconds: of a step without any exchange, all that is not backward.
        network: between the ranks; of one rank if there was none.
        overlap: what goes on beside backward where the engine exchanges.
        bucket_numels: in which DDP hands over gradients to the engine.
        methods: with their costs.
        moment: that an optimizer of Adam's family keeps; None if none does.
    """

    sizes: Sequence[ParameterSize]
    layers: Sequence[LayerTime]
    rest_seconds: float
    network: Network
    overlap: Overlap
    bucket_numels: tuple[float, float]
    methods: Sequence[Method]
    moment: FirstMoment | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return {
            "sizes": [list(size) for size in self.sizes],
            "profile": self._profile(self.methods[0].cost).as_dict(),
            "methods": [[m.name, m.density, m.agreement.value, m.builtin, m.cost.as_dict()] for m in self.methods],
            "moment": None if self.moment is None else list(self.moment),
        }

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Measured:
        """The inverse of :meth:`as_dict`."""
        first = Profile.from_dict(plain["profile"])
        methods = [
            Method(name, density, Agreement(agreement), GroupCost.from_dict(cost), builtin)
            for name, density, agreement, builtin, cost in plain["methods"]
        ]
        return cls(
            [ParameterSize(*size) for size in plain["sizes"]],
            first.layers,
            first.rest_seconds,
            first.network,
            first.overlap,
            first.bucket_numels,
            methods,
            None if plain["moment"] is None else FirstMoment(*plain["moment"]),
        )

    def _profile(self, cost: GroupCost) -> Profile:
        return Profile("", self.layers, self.rest_seconds, self.network, [cost], self.overlap, self.bucket_numels)

    @property
    def on_cpu(self) -> bool:
        """Whether the parameters live on a CPU."""
        return str(self.sizes[0].kind).endswith("cpu")

    @property
    def compute_seconds(self) -> float:
        """A step without any exchange."""
        return self.rest_seconds + sum(layer.backward_seconds for layer in self.layers)

    def step_seconds(self, method: Method, grouping: str) -> tuple[float, int]:
        """A whole step with a method's cost as it stands, and the number of groups."""
        profile = self._profile(method.cost)
        if method.builtin:  # DDP begins each of its buckets at once, and never waits for it in backward
            beside: Overlap = "all" if self.overlap == "all" else "transfer"
            profile = replace(profile, overlap=beside, bucket_numels=bucket_numels(self.sizes, DDP_BUCKET_MB))
        rule = GROUPINGS[grouping]
        if isinstance(rule, OptimalMerge):
            rule = ProfiledMerge(profile, method.density)
        groups, times = timeline(make_plan(self.sizes, rule, ALL_SPARSE, DDP_BUCKET_MB), profile)
        return profile.timeline_seconds(times, method.density), len(groups)


class Scenario(NamedTuple):
    """Ranks and their network."""

    ranks: int
    gbit: float | None
    """Gbit/s of a link in one direction; None: as measured."""

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.ranks} ranks, " + ("measured" if self.gbit is None else f"{self.gbit:g} Gbit/s")


class Prediction(NamedTuple):
    """One method with one grouping in one scenario."""

    scenario: Scenario
    method: str
    density: float
    builtin: bool
    grouping: str
    groups: int
    step_seconds: float
    exposed_seconds: float
    over_dense: float
    """Step time / that of dense DDP."""

    @property
    def sparse(self) -> bool:
        """Whether anything is left out."""
        return not self.builtin and self.method != EVERYTHING


def scenarios(known: int, ranks: Sequence[int], gbit: Sequence[float]) -> list[Scenario]:
    """The network as it is, if there is one, and all pairs of the given numbers; where one is missing, that of here.

    Args:
        known: ranks that there are.
        ranks: other numbers of ranks.
        gbit: rates.

    Raises:
        ValueError: if a number is not positive, or there is one rank only and no rate is given.
    """
    for name, values, kind in (("ranks", ranks, int), ("gbit", gbit, (int, float))):
        for value in values:
            if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
                raise ValueError(f"Expected {name} to be positive numbers but got {value!r}.")
    here = [Scenario(n, None) for n in (known, *([] if gbit else ranks))] if known > 1 else []
    others = [Scenario(n, rate) for n in (ranks or [known]) for rate in gbit]
    found = list(dict.fromkeys(one for one in here + others if one.ranks > 1))
    if not found:
        raise ValueError(
            "Expected a network to predict for, but there is one rank only: give ranks and gbit (--ranks 8 --gbit 10), "
            "or devices in the trainer."
        )
    return found


def predict(measured: Measured, wanted: Sequence[Scenario]) -> Iterator[Prediction]:
    """Step times of all methods under all groupings; those that come with DDP under DDP's buckets only."""
    known = measured.network.ranks
    for scenario in wanted:
        rows = []
        if scenario == (known, None):
            methods = list(measured.methods)
        else:
            rate = None if scenario.gbit is None else scenario.gbit * 1e9
            here = measured.network if known > 1 else Network.ring(2, LATENCY, float("inf"))
            network = here.between(scenario.ranks, rate)
            value_bytes = measured.sizes[0].element_size
            methods = [method.between(known, scenario.ranks, network, value_bytes) for method in measured.methods]
        for method in methods:
            for grouping in ["bucket"] if method.builtin else list(GROUPINGS):
                rows.append((method, grouping, *measured.step_seconds(method, grouping)))
        dense = next(seconds for method, _, seconds, _ in rows if method.name == "dense")
        for method, grouping, seconds, groups in rows:
            exposed = seconds - measured.compute_seconds
            yield Prediction(
                scenario,
                method.name,
                method.density,
                method.builtin,
                grouping,
                groups,
                seconds,
                exposed,
                seconds / dense,
            )


def best_groupings(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Of each method and density in each scenario, the fastest grouping; of equally fast ones, the fewest groups."""
    best: dict[tuple[Scenario, str, float], Prediction] = {}
    for one in sorted(predictions, key=lambda p: (p.step_seconds, p.groups)):
        best.setdefault((one.scenario, one.method, one.density), one)
    return list(best.values())


def winner(predictions: Sequence[Prediction], scenario: Scenario, hooks: bool = True) -> Prediction:
    """What to use: dense DDP, unless its 16-bit hooks, other groups or a sparsifier shorten the step by 5 % at least.

    A sparsifier must be 5 % faster than every dense way. Of the sparsifiers within 5 % of the fastest one, the mildest
    density wins, and then the sparsifier that trains best (``docs/comparison.md``): speed alone would always choose the
    lowest density. PowerSGD is for reference and never chosen.

    Args:
        predictions: at least that of dense DDP in this scenario.
        scenario: to decide for.
        hooks: whether DDP's hooks can be used; Lightning ignores them on CPUs.
    """
    rows = best_groupings([p for p in predictions if p.scenario == scenario])
    dense = next(p for p in rows if p.method == "dense")
    others = [p for p in rows if p.method == EVERYTHING or (hooks and p.method in HALVED)]
    fastest = min(others, key=lambda p: p.step_seconds, default=dense)
    if fastest.step_seconds < (1 - MARGIN) * dense.step_seconds:
        dense = fastest
    sparse = [p for p in rows if p.sparse]
    fastest = min(sparse, key=lambda p: p.step_seconds, default=dense)
    if fastest.step_seconds > (1 - MARGIN) * dense.step_seconds:
        return dense
    limit = min(fastest.step_seconds * (1 + MARGIN), (1 - MARGIN) * dense.step_seconds)
    ranking = {name: place for place, name in enumerate(BEST_TRAINED)}
    close = [p for p in sparse if p.step_seconds <= limit]
    return min(close, key=lambda p: (-p.density, ranking.get(p.method, len(ranking)), p.step_seconds))
