"""Cut a model's parameters into groups.

Groups are a function of the model alone, not of DDP's buckets: those change after the first iteration, and state that
belongs to a group must not. Parameters are taken in reverse order of registration, roughly the order in which backward
finishes them, so that the first groups are complete while backward still runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, get_args

from lightning_sparse.density import count
from lightning_sparse.grouping.merge import merge_below
from lightning_sparse.grouping.profile import MergeRule, Profile, Timeline
from lightning_sparse.grouping.rules import Rules, as_rules
from lightning_sparse.registry import Registry


class ParameterSize(NamedTuple):
    """What a plan needs to know of a parameter."""

    name: str
    numel: int
    element_size: int
    """Bytes of one element."""
    kind: Hashable
    """Parameters of different kinds (dtype, device) are never in one group."""
    ndim: int = 2
    """Dimensions of its shape."""


class Group(NamedTuple):
    """Parameters whose gradients are looked at together, as one flat vector in this order."""

    name: str
    parameters: tuple[ParameterSize, ...]
    dense: bool
    """True if the group is averaged as DDP would, without sparsification."""
    density: float | None = None
    """Of this group alone, in (0, 1]; None: what the schedule says. None for dense groups."""

    @property
    def numel(self) -> int:
        """Coordinates of the flat vector."""
        return sum(p.numel for p in self.parameters)

    def offsets(self) -> dict[str, slice]:
        """Where each parameter lies in the flat vector."""
        spans, start = {}, 0
        for p in self.parameters:
            spans[p.name] = slice(start, start + p.numel)
            start += p.numel
        return spans

    def picks(self, density: float) -> int:
        """The count k at this density; see :func:`~lightning_sparse.density.count`."""
        return self.numel if self.dense else count(self.density or density, self.numel)


MIB = 1 << 20
DDP_BUCKET_MB = 25
"""Size of DDP's buckets in MiB, where none is given."""
LARGEST_GROUP = 2**31 - 2
"""Coordinates: indices travel as 32-bit words, and one of them stands for none."""

Cut = list[tuple[str, list[ParameterSize]]]
"""Named runs of parameters."""


class Grouping(ABC):
    """A rule that cuts parameters into groups. A frozen dataclass of settings, nothing else."""

    @abstractmethod
    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Cut a run of parameters.

        Args:
            parameters: in the order in which backward is expected to finish them; may be empty.
            bucket_cap_mb: size of DDP's buckets in MiB.

        Returns:
            Names, different ones, and the parameters of each group; all of them, in order.
        """


GROUPINGS: Registry[Grouping] = Registry("grouping", Grouping)  # type: ignore[type-abstract]
"""Groupings by name."""


@GROUPINGS.register
@dataclass(frozen=True)
class Bucket(Grouping):
    """Runs of about ``bucket_cap_mb`` MiB, the first of at most 1 MiB to start communication early: DDP's rule."""

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Close a run when it is full."""
        groups: list[list[ParameterSize]] = []
        filled = cap = 0.0
        for p in parameters:
            if not groups or filled >= cap:
                cap = min(MIB, bucket_cap_mb * MIB) if not groups else bucket_cap_mb * MIB
                groups.append([])
                filled = 0
            groups[-1].append(p)
            filled += p.numel * p.element_size
        return [(f"bucket{i}", group) for i, group in enumerate(groups)]


@GROUPINGS.register
@dataclass(frozen=True)
class Layer(Grouping):
    """One group per module that owns parameters (its weight and its bias together): LAGS-SGD."""

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Collect the parameters of each module."""
        groups: dict[str, list[ParameterSize]] = {}
        for p in parameters:
            groups.setdefault(p.name.rpartition(".")[0] or p.name, []).append(p)
        return list(groups.items())


@GROUPINGS.register
@dataclass(frozen=True)
class Model(Grouping):
    """Everything together: SLGS-SGD."""

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """One group, if there is anything."""
        return [("model", list(parameters))] if parameters else []


@GROUPINGS.register
@dataclass(frozen=True)
class MergeBelow(Grouping):
    """Layers, merged with their neighbours until a group has enough coordinates: MGS-SGD.

    Small layers cost a message each and hold little to choose from; large ones stay alone, and their exchange overlaps
    with backward. See :func:`~lightning_sparse.grouping.merge_below`.

    Args:
        numel: coordinates that close a group, at least 0. 0: a group for each layer; infinity: one for all.

    Raises:
        ValueError: if ``numel`` is negative or no number.

    Example:
        >>> sizes = [ParameterSize(name, numel, 4, "float32") for name, numel in
        ...          [("a.weight", 9000), ("b.weight", 5000), ("c.weight", 5000), ("d.weight", 300)]]
        >>> [(g.name, g.numel) for g in make_plan(sizes, MergeBelow(8192))]
        [('d..b', 10300), ('a', 9000)]

    References:
        Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs
        (OMGS-SGD), INFOCOM 2020, whose code uses 8192.
    """

    numel: float = 8192

    def __post_init__(self) -> None:
        number = isinstance(self.numel, (int, float)) and not isinstance(self.numel, bool)
        if not number or math.isnan(self.numel) or self.numel < 0:
            raise ValueError(f"Expected numel to be a number of coordinates of at least 0, but got {self.numel!r}.")

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Merge modules; a group is named after its first and last one."""
        layers = Layer().cut(parameters, bucket_cap_mb)
        merged = merge_below([sum(p.numel for p in members) for _, members in layers], self.numel)
        return _join(layers, merged)


@GROUPINGS.register
@dataclass(frozen=True)
class OptimalMerge(Grouping):
    """Layers, merged so that a step ends soonest on the machine and the network at hand.

    The first steps run with everything in one group, while backward is timed layer by layer. Then the collectives and
    the sparsifier are timed between the ranks, and layers are merged by these numbers, exactly
    (:func:`~lightning_sparse.grouping.optimal_merge`). Training goes on with the new groups; no residual is lost. The
    profile is kept in Lightning's checkpoints, and a run that continues with the same model, settings and number of
    ranks uses it from the start.

    Args:
        rule: "optimal", or "published" for the greedy rule of OMGS-SGD, which is not always the best.
        warmup: steps that are not timed, at least 1.
        steps: steps that are timed, at least 2; medians count.

    Raises:
        ValueError: for an unknown rule or numbers of steps outside their ranges.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.SparseDDPStrategy(grouping=ls.OptimalMerge(), executor="thread")

    References:
        Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs
        (OMGS-SGD), INFOCOM 2020.
    """

    rule: MergeRule = "optimal"
    warmup: int = 5
    steps: int = 10

    def __post_init__(self) -> None:
        if self.rule not in get_args(MergeRule):
            raise ValueError(
                f"Expected rule to be one of {', '.join(map(repr, get_args(MergeRule)))}, but got {self.rule!r}."
            )
        for name, value, least in (("warmup", self.warmup, 1), ("steps", self.steps, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Expected {name} to be an integer of at least {least}, but got {value!r}.")

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Before there is a profile: one group, or buckets where that would be too large."""
        whole = sum(p.numel for p in parameters) <= LARGEST_GROUP
        return (Model() if whole else Bucket()).cut(parameters, bucket_cap_mb)


@dataclass(frozen=True)
class ProfiledMerge(Grouping):
    """Layers, merged by a profile: what :class:`OptimalMerge` turns into.

    Args:
        profile: of these parameters.
        density: at which groups are exchanged.
        rule: as in :class:`OptimalMerge`.
    """

    profile: Profile
    density: float
    rule: MergeRule = "optimal"

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Merge the layers that have such parameters.

        Raises:
            ValueError: if the profile does not know a parameter.
        """
        wanted = {p.name: p for p in parameters}
        layers: Cut = []
        seconds: list[float] = []
        passed = 0.0
        for layer, taken in zip(self.profile.layers, self.profile.delivery_seconds, strict=True):
            passed += taken
            if members := [wanted.pop(name) for name in layer.parameters if name in wanted]:
                layers.append((layer.name, members))
                seconds.append(passed)
                passed = 0.0
        if wanted:
            raise ValueError(f"The profile does not know the parameters {', '.join(list(wanted)[:5])}.")
        if not layers:
            return []
        numels = [max(1, sum(p.numel for p in members)) for _, members in layers]
        groups = self.profile.merge(self.density, self.rule, numels, seconds)
        return _join(layers, [part for group in groups for part in _split(group, numels)])


def bucket_numels(sizes: Sequence[ParameterSize], delivery_mb: float, first_mb: float = 1.0) -> tuple[float, float]:
    """Coordinates of DDP's first bucket, which is cut short, and of the others."""
    element = sizes[0].element_size
    return min(first_mb, delivery_mb) * MIB / element, delivery_mb * MIB / element


def timeline(plan: Sequence[Group], profile: Profile) -> tuple[list[Group], Timeline]:
    """Sparsified groups in the order in which they are complete, and when.

    Args:
        plan: groups; dense ones are left out.
        profile: of their parameters; those that it does not know take no time.

    Returns:
        The groups in order, with their coordinates and the seconds of backward from one to the next.
    """
    moment: dict[str, float] = {}
    elapsed = 0.0
    for layer, taken in zip(profile.layers, profile.delivery_seconds, strict=True):
        elapsed += taken
        moment |= dict.fromkeys(layer.parameters, elapsed)
    complete = {g.name: max(moment.get(p.name, 0.0) for p in g.parameters) for g in plan if not g.dense}
    groups = sorted((g for g in plan if not g.dense), key=lambda g: complete[g.name])
    moments = [0.0, *(complete[g.name] for g in groups)]
    return groups, ([g.numel for g in groups], [later - before for before, later in pairwise(moments)])


def _split(group: list[int], numels: Sequence[int]) -> list[list[int]]:
    """Cut a group that would be too large."""
    parts: list[list[int]] = [[]]
    for layer in group:
        if parts[-1] and sum(numels[i] for i in parts[-1]) + numels[layer] > LARGEST_GROUP:
            parts.append([])
        parts[-1].append(layer)
    return parts


def _join(layers: Cut, groups: Sequence[Sequence[int]]) -> Cut:
    """Merge neighbours; a group is named after its first and last layer."""
    return [
        (
            layers[group[0]][0] + (f"..{layers[group[-1]][0]}" if len(group) > 1 else ""),
            [p for i in group for p in layers[i][1]],
        )
        for group in groups
    ]


def make_plan(
    parameters: Iterable[ParameterSize],
    grouping: Grouping | str = "bucket",
    rules: Rules | None = None,
    bucket_cap_mb: float = DDP_BUCKET_MB,
) -> list[Group]:
    """Cut parameters into groups, in the order in which backward is expected to finish them.

    Parameters with a density of their own are cut apart from the others, by the same grouping, into groups such as
    ``density0.001.bucket0``; dense ones by bucket, whatever the grouping, into groups such as ``dense.bucket0``, which
    come last. Parameters without elements are in no group.

    Args:
        parameters: in order of registration, as ``named_parameters()`` gives them.
        grouping: an instance such as ``MergeBelow(8192)``, or a name: "layer" (one group per module), "bucket" (about
            ``bucket_cap_mb`` each), "model" (all together), "merge_below" (layers of 8192 coordinates and more) or
            "optimal_merge".
        rules: which parameters stay dense, and which have densities of their own; None: the default ones, which keep
            small parameters dense, see :class:`~lightning_sparse.grouping.Rules`.
        bucket_cap_mb: size of a bucket in MiB.

    Raises:
        ValueError: for an unknown grouping, a pattern that matches no parameter, or a parameter that is to be dense and
            sparsified.

    Example:
        >>> sizes = [ParameterSize(name, numel, 4, "float32") for name, numel in
        ...          [("embed", 5000), ("conv.weight", 900), ("conv.bias", 10), ("head.weight", 500), ("head.bias", 5)]]
        >>> [(g.name, g.numel, g.dense) for g in make_plan(sizes, "layer", Rules(densities={"embed": 0.001}))]
        [('head', 500, False), ('conv', 900, False), ('density0.001.embed', 5000, False), ('dense.bucket0', 15, True)]
    """
    wanted, rules = GROUPINGS.resolve(grouping), as_rules(rules)
    ordered = list(parameters)[::-1]
    rules.check([p.name for p in ordered])
    ordered = [p for p in ordered if p.numel]  # of others there is nothing to exchange
    apart: dict[tuple[bool, float | None, Hashable], list[ParameterSize]] = {}
    for p in ordered:
        keep_dense = rules.keeps_dense(p.name, p.numel, p.ndim)
        apart.setdefault((keep_dense, rules.density_of(p.name), p.kind), []).append(p)
    kinds = list(dict.fromkeys(p.kind for p in ordered))
    plan = []
    # First what follows the schedule, then own densities, then what is dense; otherwise in the order of backward.
    for keep_dense, own, kind in sorted(apart, key=lambda key: (key[0], key[1] is not None, kinds.index(key[2]))):
        prefix = "dense." if keep_dense else "" if own is None else f"density{own}."
        prefix += f"{kind}." if len(kinds) > 1 else ""
        for name, group in _rule(wanted, keep_dense, own).cut(apart[keep_dense, own, kind], bucket_cap_mb):
            plan.append(Group(prefix + name, tuple(group), keep_dense, own))
    return plan


def _rule(wanted: Grouping, keep_dense: bool, own: float | None) -> Grouping:
    """The grouping for parameters that are dense, or have a density of their own."""
    if keep_dense:
        return Bucket()
    if own is not None and isinstance(wanted, ProfiledMerge):
        return replace(wanted, density=own)
    return wanted
