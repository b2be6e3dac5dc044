"""Cut a model's parameters into groups.

Groups are a function of the model alone, not of DDP's buckets: those change after the first iteration, and state that
belongs to a group must not. Parameters are taken in reverse order of registration, roughly the order in which backward
finishes them, so that the first groups are complete while backward still runs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from lightning_sparse.density import count


class ParameterSize(NamedTuple):
    """What a plan needs to know of a parameter."""

    name: str
    numel: int
    element_size: int
    """Bytes of one element."""
    kind: Hashable
    """Parameters of different kinds (dtype, device) are never in one group."""


class Group(NamedTuple):
    """Parameters whose gradients are looked at together, as one flat vector in this order."""

    name: str
    parameters: tuple[ParameterSize, ...]
    dense: bool
    """True if the group is averaged as DDP would, without sparsification."""

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
        return self.numel if self.dense else count(density, self.numel)


MIB = 1 << 20


def by_bucket(parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> list[tuple[str, list[ParameterSize]]]:
    """Runs of about ``bucket_cap_mb`` MiB, the first of at most 1 MiB to start communication early: DDP's rule."""
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


def by_layer(parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> list[tuple[str, list[ParameterSize]]]:
    """One group per module that owns parameters (its weight and its bias together)."""
    groups: dict[str, list[ParameterSize]] = {}
    for p in parameters:
        groups.setdefault(p.name.rpartition(".")[0] or p.name, []).append(p)
    return list(groups.items())


def by_model(parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> list[tuple[str, list[ParameterSize]]]:
    """Everything together."""
    return [("model", list(parameters))] if parameters else []


GROUPINGS: Mapping[str, Callable[[Sequence[ParameterSize], float], list[tuple[str, list[ParameterSize]]]]] = {
    "bucket": by_bucket,
    "layer": by_layer,
    "model": by_model,
}
"""Groupings by name."""


def check_grouping(grouping: str) -> str:
    """Return the grouping if it is known.

    Raises:
        ValueError: naming the known ones and what is close.
    """
    if grouping in GROUPINGS:
        return grouping
    close = difflib.get_close_matches(str(grouping), list(GROUPINGS), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"Expected grouping to be one of {', '.join(map(repr, GROUPINGS))}, but got {grouping!r}.{hint}")


def make_plan(
    parameters: Iterable[ParameterSize], grouping: str = "bucket", dense: Sequence[str] = (), bucket_cap_mb: float = 25
) -> list[Group]:
    """Cut parameters into groups, in the order in which backward is expected to finish them.

    Args:
        parameters: in order of registration, as ``named_parameters()`` gives them.
        grouping: "layer" (one group per module), "bucket" (about ``bucket_cap_mb`` each) or "model" (all together).
        dense: shell-style patterns of parameter names that stay dense, such as ``"*.bias"``. Dense parameters get
            groups of their own, by bucket whatever the grouping.
        bucket_cap_mb: size of a bucket in MiB.

    Raises:
        ValueError: for an unknown grouping, or a pattern that matches no parameter.

    Example:
        >>> sizes = [ParameterSize(name, numel, 4, "float32") for name, numel in
        ...          [("conv.weight", 900), ("conv.bias", 10), ("head.weight", 500), ("head.bias", 5)]]
        >>> [(g.name, g.numel, g.dense) for g in make_plan(sizes, "layer", dense=["*.bias"])]
        [('head', 500, False), ('conv', 900, False), ('dense.bucket0', 15, True)]
    """
    check_grouping(grouping)
    ordered = list(parameters)[::-1]
    for pattern in dense:
        if not any(fnmatchcase(p.name, pattern) for p in ordered):
            close = difflib.get_close_matches(pattern, [p.name for p in ordered], n=3, cutoff=0.3)
            names = f" Names that are close: {', '.join(close)}." if close else ""
            raise ValueError(f"The pattern {pattern!r} in dense matches no parameter.{names}")
    kinds = list(dict.fromkeys(p.kind for p in ordered))
    plan = []
    for keep_dense in (False, True):
        for kind in kinds:
            chosen = [p for p in ordered if p.kind == kind and any(fnmatchcase(p.name, d) for d in dense) == keep_dense]
            cut = by_bucket if keep_dense else GROUPINGS[grouping]
            prefix = ("dense." if keep_dense else "") + (f"{kind}." if len(kinds) > 1 else "")
            for name, group in cut(chosen, bucket_cap_mb):
                plan.append(Group(prefix + name, tuple(group), keep_dense))
    return plan
