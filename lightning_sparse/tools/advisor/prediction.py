"""Predicted step times for every method, grouping and network, from measurements. Numbers only."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_sparse import Rules
from lightning_sparse.core.checks import check_integer, check_number, check_positive, plain
from lightning_sparse.grouping import DDP_BUCKET_MB, OVERLAPPED_MB, ParameterSize, bucket_numels, make_plan
from lightning_sparse.memories import SecondMoment
from lightning_sparse.tools.advisor.networks import between, farther, on, ring
from lightning_sparse.tools.advisor.plain import Plain
from lightning_sparse.tools.traffic import count_bytes
from lightning_sparse.tuning.performance.cost import Line
from lightning_sparse.tuning.performance.network import Network
from lightning_sparse.tuning.performance.profile import GroupCost, Overlap, Profile, Traffic
from lightning_sparse.tuning.unsuited import Unsuited

TRIED = ("layer", "bucket", "merge_below", "model")
"""Predicted groupings."""
ALL_SPARSE = Rules(dense_ndim=0, dense_numel=0)
"""Small parameters count as sparsified; if they stay dense, they are one more short message."""
HALVED = ("fp16", "bf16")
"""DDP's hooks that send 16 bits of each value."""
EVERYTHING = "everything"
"""Dense exchange in this package's groups instead of DDP's buckets."""
MARGIN = 0.05
"""A step must be shorter by this share to be worth a change of the exchange."""
LATENCY = 30e-6
"""Seconds from one rank to the next, if no network could be measured."""
COUNTED = 1_000_000
"""Coordinates of the group whose messages are counted."""
BEST_TRAINED = (
    "union_top_k",
    "shared_top_k",
    "clt_k",
    "dgc",
    "top_k",
    "striped_top_k",
    "ok_top_k",
    "redsync",
    "sidco_gp",
)
"""Sparsifiers of docs/reports/equal-bytes.md, the best at equal traffic first; others come after them."""


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients, and the cost of a group with it.

    Args:
        name: of a sparsifier, or "dense", "fp16", "bf16", "powersgd" for those of DDP.
        density: of a sparsifier; 1 for the others.
        cost: measured, at the number of present ranks.
        builtin: part of DDP: exchanged in DDP's buckets, which overlaps with backward.
        second_moments: True if Adam's second moments travel with the averages, see
            :class:`.SecondMoment`.
    """

    name: str
    density: float
    cost: GroupCost
    builtin: bool = False
    second_moments: bool = False

    def between(self, known: int, ranks: int, network: Network, value_bytes: int = 4) -> Method:
        """Extrapolate the method to another number of ranks, on another network.

        Messages are scaled by the counts of a dry run (:func:`~lightning_sparse.tools.traffic.count_bytes`); messages
        that ``known`` ranks do not send are taken as counted. With thresholds, measured messages may be longer than at
        the density: a sum is at most as long as the group.

        Args:
            known: number of measured ranks.
            ranks: the other number.
            network: between these.
            value_bytes: bytes of a value.
        """
        traffic = {part.operation: part for part in self.cost.traffic}
        if not self.builtin:
            before, after = (_counted(self.name, self.density, n, self.second_moments) for n in (known, ranks))
            for operation, (calls, each) in after.items():
                if operation not in before:
                    traffic[operation] = Traffic(operation, calls, Line(0.0, each))
                elif (part := traffic.get(operation)) is not None:
                    fixed, slope, growth = part.nbytes.alpha, part.nbytes.beta, each / before[operation][1]
                    most = max(slope, value_bytes) if operation == "all_reduce" else math.inf
                    nbytes = Line(fixed * growth, min(slope * growth, most))
                    traffic[operation] = Traffic(operation, part.calls * calls / before[operation][0], nbytes)
        return replace(self, cost=on(network, replace(self.cost, traffic=tuple(traffic.values()))))


@functools.cache
def _counted(sparsifier: str, density: float, ranks: int, second_moments: bool) -> dict[str, tuple[int, float]]:
    """Count calls, and bytes per coordinate, by operation."""
    calls, nbytes = Counter[str](), Counter[str]()
    memory = SecondMoment() if second_moments else None
    for operation, size in count_bytes(sparsifier, COUNTED, ranks, density, memory=memory).messages:
        calls[operation] += 1
        nbytes[operation] += size
    return {operation: (calls[operation], nbytes[operation] / COUNTED) for operation in calls}


@dataclass(frozen=True)
class Measured(Plain):
    """Input of predictions, as measured on one machine.

    Args:
        sizes: of all parameters, in order of registration.
        profile: of a step whose exchange comes after backward, with the cost of dense groups.
        methods: with their costs.
        unsuited: an optimizer that trains worse behind error feedback, or None.
        refused: sparsifiers that were not measured, because the optimizer's second moments do not go with them.
    """

    sizes: Sequence[ParameterSize]
    profile: Profile
    methods: Sequence[Method]
    unsuited: Unsuited | None = None
    refused: Sequence[str] = ()

    @property
    def on_cpu(self) -> bool:
        """True if the parameters are on a CPU."""
        return str(self.sizes[0].kind).endswith("cpu")

    def step_seconds(
        self,
        method: Method,
        grouping: str,
        rules: Rules = ALL_SPARSE,
        network: Network | None = None,
        overlap: bool = False,
    ) -> tuple[float, int]:
        """Return the seconds of a whole step with a method's cost, and the number of groups.

        Args:
            method: on that network.
            grouping: of its groups.
            rules: of the parameters that stay dense behind a sparsifier.
            network: of dense groups; None: as measured.
            overlap: whether a sparsifier exchanges within backward.
        """
        profile = replace(self._on(network), costs=[method.cost])
        rules = ALL_SPARSE if method.builtin else rules
        if method.builtin or overlap:  # DDP starts each bucket at once, and does not wait for it in backward
            beside: Overlap = "comm" if self.on_cpu else "full"
            buckets = bucket_numels(self.sizes, DDP_BUCKET_MB if method.builtin else OVERLAPPED_MB)
            profile = replace(profile, overlap=beside, messages="group", bucket_numels=buckets)
        plan = make_plan(self.sizes, grouping, rules, DDP_BUCKET_MB, profile, method.density)
        return profile.step_seconds(plan, method.density), len(plan)

    def _on(self, network: Network | None) -> Profile:
        return self.profile if network is None else replace(self.profile, network=network)


class Scenario(NamedTuple):
    """Ranks and their network."""

    ranks: int
    gbit: float | None
    """Gbit/s of a link in one direction; None: as measured."""
    rtt_ms: float = 0.0
    """Milliseconds that are added to each round trip."""

    @property
    def label(self) -> str:
        """Name of the scenario in tables."""
        rate = "measured" if self.gbit is None else f"{self.gbit:g} Gbit/s"
        return f"{self.ranks} ranks, {rate}" + (f", RTT + {self.rtt_ms:g} ms" if self.rtt_ms else "")


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
    overlapped_seconds: float
    """Step time with ``overlap=True``; with methods of DDP, which overlap anyway, that of the step."""

    @property
    def sparse(self) -> bool:
        """True if coordinates are left out."""
        return not self.builtin and self.method != EVERYTHING


def scenarios(known: int, ranks: Sequence[int], gbit: Sequence[float], rtt: Sequence[float] = ()) -> list[Scenario]:
    """Return the measured network, if there is one, and all pairs of given numbers; a missing one is that of here.

    Each is followed by itself with longer round trips.

    Args:
        known: number of present ranks.
        ranks: other numbers of ranks.
        gbit: rates.
        rtt: milliseconds that are added to each round trip.

    Raises:
        ValueError: if a number is out of its range, or there is one rank only and no rate is given.
    """
    ranks, gbit, rtt = plain((list(ranks), list(gbit), list(rtt)))
    for n in ranks:
        check_integer(n, "ranks")
    for rate in gbit:
        check_positive(rate, "gbit", infinite=True)
    for milliseconds in rtt:
        check_number(milliseconds, "rtt", "a finite number of milliseconds of at least 0")
    here = [Scenario(n, None) for n in (known, *([] if gbit else ranks))] if known > 1 else []
    others = [Scenario(n, rate) for n in (ranks or [known]) for rate in gbit]
    found = list(dict.fromkeys(one for one in here + others if one.ranks > 1))
    if not found:
        raise ValueError(
            "Expected a network to predict for, but there is one rank only: give ranks and gbit (--ranks 8 --gbit 10), "
            "or devices in the trainer."
        )
    return list(dict.fromkeys(one._replace(rtt_ms=float(added)) for one in found for added in (0.0, *rtt)))


def predict(measured: Measured, wanted: Sequence[Scenario], rules: Rules = ALL_SPARSE) -> Iterator[Prediction]:
    """Predict step times of all methods under all groupings; methods of DDP under DDP's buckets only.

    Args:
        measured: on one machine.
        wanted: what to predict for.
        rules: of the parameters that stay dense behind a sparsifier.
    """
    known = measured.profile.network.ranks
    for scenario in wanted:
        rows, network = [], None
        if scenario == Scenario(known, None):
            methods = list(measured.methods)
        else:
            rate = None if scenario.gbit is None else scenario.gbit * 1e9
            here = measured.profile.network if known > 1 else ring(2, LATENCY, float("inf"))
            network = farther(between(here, scenario.ranks, rate), scenario.rtt_ms / 1e3)
            value_bytes = measured.sizes[0].element_size
            methods = [method.between(known, scenario.ranks, network, value_bytes) for method in measured.methods]
        for method in methods:
            for grouping in ["bucket"] if method.builtin else list(TRIED):
                hidden, _ = measured.step_seconds(method, grouping, rules, network, overlap=True)
                rows.append((method, grouping, *measured.step_seconds(method, grouping, rules, network), hidden))
        dense = next(seconds for method, _, seconds, *_ in rows if method.name == "dense")
        for method, grouping, seconds, groups, hidden in rows:
            exposed = seconds - measured.profile.compute_seconds
            what = (method.name, method.density, method.builtin, grouping, groups)
            yield Prediction(scenario, *what, seconds, exposed, seconds / dense, hidden)


def best_groupings(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the fastest grouping of each method and density per scenario; of equally fast ones, the fewest groups."""
    best: dict[tuple[Scenario, str, float], Prediction] = {}
    for one in sorted(predictions, key=lambda p: (p.step_seconds, p.groups)):
        best.setdefault((one.scenario, one.method, one.density), one)
    return list(best.values())


def overlapped(predictions: Sequence[Prediction], best: Prediction) -> Prediction:
    """Return the grouping of a method and density whose step with ``overlap=True`` is the shortest in its scenario."""
    same = [p for p in predictions if p[:4] == best[:4]]
    return min(same, key=lambda p: (p.overlapped_seconds, p.groups))


def winner(
    predictions: Sequence[Prediction], scenario: Scenario, hooks: bool = True, suited: Collection[str] = ()
) -> Prediction:
    """Return dense DDP, unless its 16-bit hooks, other groups or a sparsifier shorten the step by 5 % at least.

    A sparsifier must be 5 % faster than every dense method. Of the sparsifiers within 5 % of the fastest one, the
    largest density wins, and then the sparsifier that trains best (``docs/reports/equal-bytes.md``): speed alone would
    always choose the lowest density. PowerSGD is for reference and never chosen.

    Args:
        predictions: at least that of dense DDP in this scenario.
        scenario: of the decision.
        hooks: True if DDP's hooks can be used; Lightning ignores them on CPUs.
        suited: names of sparsifiers that the optimizer needs; others win only where none of these is 5 % faster.
    """
    rows = best_groupings([p for p in predictions if p.scenario == scenario])
    dense = next(p for p in rows if p.method == "dense")
    others = [p for p in rows if p.method == EVERYTHING or (hooks and p.method in HALVED)]
    fastest = min(others, key=lambda p: p.step_seconds, default=dense)
    if fastest.step_seconds < (1 - MARGIN) * dense.step_seconds:
        dense = fastest
    most = (1 - MARGIN) * dense.step_seconds
    sparse = [p for p in rows if p.sparse and p.step_seconds <= most]
    sparse = [p for p in sparse if p.method in suited] or sparse
    if not sparse:
        return dense
    limit = min(most, (1 + MARGIN) * min(p.step_seconds for p in sparse))
    ranking = {name: place for place, name in enumerate(BEST_TRAINED)}
    close = [p for p in sparse if p.step_seconds <= limit]
    return min(close, key=lambda p: (-p.density, ranking.get(p.method, len(ranking)), p.step_seconds))
