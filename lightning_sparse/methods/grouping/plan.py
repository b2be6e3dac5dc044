"""Cut a model's parameters into groups.

Groups are a function of the model alone, not of DDP's buckets: these change after the first iteration, and a group's
state must not. Parameters are taken in reverse order of registration, roughly the order in which backward finishes
them, so that the first groups are complete while backward still runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_sparse.core.checks import check_positive, expect
from lightning_sparse.methods.density import check_density, count
from lightning_sparse.methods.grouping.groupings import (
    DDP_BUCKET_MB,
    GROUPINGS,
    LARGEST_GROUP,
    MIB,
    Bucket,
    Cut,
    Grouping,
    ParameterSize,
)
from lightning_sparse.methods.grouping.rules import Rules, as_rules


class Group(NamedTuple):
    """Parameters whose gradients form one flat vector, in this order."""

    name: str
    parameters: tuple[ParameterSize, ...]
    dense: bool
    """True if the group is averaged as DDP would, without sparsification."""
    density: float | None = None
    """Density of this group alone, in (0, 1]; None: the schedule's. None for dense groups."""

    @property
    def numel(self) -> int:
        """Coordinates of the flat vector."""
        return sum(p.numel for p in self.parameters)

    def offsets(self) -> dict[str, slice]:
        """Return the span of each parameter in the flat vector."""
        spans, start = {}, 0
        for p in self.parameters:
            spans[p.name] = slice(start, start + p.numel)
            start += p.numel
        return spans

    def resized(self, numels: Mapping[str, int]) -> Group:
        """Return it with other numbers of coordinates of the parameters that are named, as of parts of them.

        Example:
            >>> from lightning_sparse.methods.grouping import ParameterSize
            >>> group = Group("all", (ParameterSize("a", 10, 1, 4), ParameterSize("b", 7, 1, 4)), dense=True)
            >>> [p.numel for p in group.resized({"a": 5}).parameters]
            [5, 7]
        """
        return self._replace(parameters=tuple(p._replace(numel=numels.get(p.name, p.numel)) for p in self.parameters))

    def picks(self, density: float) -> int:
        """Return the count k at a density, see :func:`~lightning_sparse.methods.density.count`."""
        return self.numel if self.dense else count(self.density or density, self.numel)


def bucket_numels(sizes: Sequence[ParameterSize], delivery_mb: float, first_mb: float = 1.0) -> tuple[float, float]:
    """Return the coordinates of DDP's first bucket, which is shorter, and of the others."""
    element = sizes[0].element_size
    return min(first_mb, delivery_mb) * MIB / element, delivery_mb * MIB / element


def make_plan(
    parameters: Iterable[ParameterSize],
    grouping: Grouping | str = "bucket",
    rules: Rules | None = None,
    bucket_cap_mb: float = DDP_BUCKET_MB,
    profile: Any = None,
    density: float = 1.0,
    frozen: Iterable[str] = (),
) -> list[Group]:
    """Cut parameters into groups, in the order in which backward is expected to finish them.

    Parameters with a density of their own are cut apart from the others, by the same grouping, into groups such as
    ``density0.001.bucket0``; dense ones always by bucket, into groups such as ``dense.bucket0``, which come last.
    Parameters without elements are in no group. A group of more than ``2**30 - 1`` coordinates is cut between
    parameters.

    Args:
        parameters: in order of registration, as ``named_parameters()`` gives them.
        grouping: an instance such as ``MergeBelow(8192)``, or a name: "layer" (one group per module), "bucket" (about
            ``bucket_cap_mb`` each), "model" (all together), "merge_below" (layers of 8192 coordinates and more) or
            "optimal_merge".
        rules: which parameters stay dense, and which have densities of their own; None: the default ones, which keep
            small parameters dense, see :class:`~lightning_sparse.methods.grouping.Rules`.
        bucket_cap_mb: size of a bucket in MiB.
        profile: a :class:`.Profile` of these parameters, for groupings that use
        one.
        density: of groups without a density of their own, for groupings that use a profile.
        frozen: names of the model's other parameters, which patterns of the rules may mean, too.

    Raises:
        ValueError: for an unknown grouping, a pattern that matches no parameter, a parameter that is to be dense and
            sparsified, or an argument of another kind.

    Example:
        >>> sizes = [ParameterSize(name, numel, 4, "float32") for name, numel in
        ...          [("embed", 5000), ("conv.weight", 900), ("conv.bias", 10), ("head.weight", 500), ("head.bias", 5)]]
        >>> [(g.name, g.numel, g.dense) for g in make_plan(sizes, "layer", Rules(densities={"embed": 0.001}))]
        [('head', 500, False), ('conv', 900, False), ('density0.001.embed', 5000, False), ('dense.bucket0', 15, True)]
    """
    wanted, rules = GROUPINGS.resolve(grouping), as_rules(rules)
    check_positive(bucket_cap_mb, "bucket_cap_mb")
    check_density(density)
    ordered = list(parameters)[::-1] if isinstance(parameters, Iterable) else []
    sizes = isinstance(parameters, Iterable) and all(isinstance(p, ParameterSize) for p in ordered)
    expect(sizes, "parameters", "a ParameterSize for each parameter", parameters)
    rules.check([*(p.name for p in ordered), *frozen])
    ordered = [p for p in ordered if p.numel]  # others have nothing to exchange
    apart: dict[tuple[bool, float | None, Hashable], list[ParameterSize]] = {}
    for p in ordered:
        keep_dense = rules.keeps_dense(p.name, p.numel, p.ndim)
        apart.setdefault((keep_dense, rules.density_of(p.name), p.kind), []).append(p)
    kinds = list(dict.fromkeys(p.kind for p in ordered))
    plan = []
    # First groups of the schedule, then of own densities, then dense ones; otherwise in the order of backward.
    for keep_dense, own, kind in sorted(apart, key=lambda key: (key[0], key[1] is not None, kinds.index(key[2]))):
        prefix = "dense." if keep_dense else "" if own is None else f"density{own}."
        prefix += f"{kind}." if len(kinds) > 1 else ""
        rule, members = Bucket() if keep_dense else wanted, apart[keep_dense, own, kind]
        if profile is None:
            cut = rule.cut(members, bucket_cap_mb)
        else:
            cut = rule.cut_by(profile, own or density, members, bucket_cap_mb)
        plan += [Group(prefix + name, tuple(group), keep_dense, own) for name, group in _in_parts(cut)]
    return _with_names_apart(plan)


def _in_parts(cut: Cut) -> Iterator[tuple[str, list[ParameterSize]]]:
    """Cut groups that are too large between parameters."""
    for name, group in cut:
        parts: list[list[ParameterSize]] = [[]]
        for p in group:
            if parts[-1] and sum(one.numel for one in parts[-1]) + p.numel > LARGEST_GROUP:
                parts.append([])
            parts[-1].append(p)
        yield from [(name, group)] if len(parts) == 1 else [(f"{name}.part{i}", part) for i, part in enumerate(parts)]


def _with_names_apart(plan: Sequence[Group]) -> list[Group]:
    """Lengthen names that another group has: a module may be called as groups are, such as ``dense.bucket0``."""
    taken: set[str] = set()
    apart = []
    for group in plan:
        name = group.name
        while name in taken:
            name += "'"
        taken.add(name)
        apart.append(group._replace(name=name))
    return apart


def dense_plan(parameters: Iterable[ParameterSize], bucket_cap_mb: float) -> list[Group]:
    """Cut all parameters into dense groups by bucket; the arguments are those of :func:`make_plan`."""
    return make_plan(parameters, "bucket", Rules(dense=["*"]), bucket_cap_mb)
