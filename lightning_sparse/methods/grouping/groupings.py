"""Groupings: rules that cut a run of parameters into groups, by names and sizes alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_sparse.core.checks import Settings, expect, is_number
from lightning_sparse.core.registry import Registry


class ParameterSize(NamedTuple):
    """Name and size of a parameter, for plans."""

    name: str
    numel: int
    element_size: int
    """Bytes of one element."""
    kind: Hashable
    """Parameters of different kinds (dtype, device) are never in one group."""
    ndim: int = 2
    """Dimensions of its shape."""

    @classmethod
    def of(cls, name: str, p: Any) -> ParameterSize:
        """Return the size of a torch parameter."""
        return cls(name, p.numel(), p.element_size(), f"{p.dtype}.{p.device}".removeprefix("torch."), p.dim())


MIB = 1 << 20
DDP_BUCKET_MB = 25
"""Default size of DDP's buckets in MiB."""
OVERLAPPED_MB = 4
"""Size of DDP's buckets in MiB where exchanges hide behind backward: gradients come in small deliveries."""
CUDA_BUCKET_MB = 1024
"""Default least size in MiB of groups that are cut by bucket, on CUDA. All groups travel in the same messages, and the
host takes more than a millisecond to launch the local step of each (docs/reports/gpu.md)."""
LARGEST_GROUP = 2**30 - 1
"""Coordinates: kernels count twice as many in 31 bits. Only a parameter that is larger is a larger group."""

Cut = list[tuple[str, list[ParameterSize]]]
"""Named runs of parameters."""


class Grouping(Settings, ABC):
    """A rule that cuts parameters into groups. A frozen dataclass of settings, nothing else."""

    @abstractmethod
    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Cut a run of parameters.

        Args:
            parameters: in the order in which backward is expected to finish them; may be empty.
            bucket_cap_mb: size of DDP's buckets in MiB.

        Returns:
            Unique names, and the parameters of each group; all of them, in order.
        """

    needs_profile = False
    """True if groups are final only with a profile of a step, by :meth:`cut_by`; of training with ``overlap=True``."""

    def cut_by(self, profile: Any, density: float, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Cut a run of parameters, given a profile; by :meth:`cut` unless overridden.

        Args:
            profile: a :class:`~lightning_sparse.tuning.performance.profile.Profile` of these parameters.
            density: at which they are exchanged.
            parameters: as for :meth:`cut`.
            bucket_cap_mb: size of DDP's buckets in MiB.
        """
        return self.cut(parameters, bucket_cap_mb)


GROUPINGS: Registry[Grouping] = Registry("grouping", Grouping)  # type: ignore[type-abstract]
"""Groupings by name."""


@GROUPINGS.register
@dataclass(frozen=True)
class Bucket(Grouping):
    """Runs of about ``bucket_cap_mb`` MiB; if that is at most 25, the first is of 1 MiB, to start early, as DDP's is.

    Above 25 MiB, all groups have that size, the first one, too; a last one of less than half of it joins the one
    before.
    """

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Close a run when it is full."""
        few, most = bucket_cap_mb > DDP_BUCKET_MB, bucket_cap_mb * MIB
        groups: list[list[ParameterSize]] = []
        filled, cap = math.inf, most if few else min(MIB, most)
        for p in parameters:
            if filled >= cap:
                cap = most if groups else cap
                groups.append([])
                filled = 0
            groups[-1].append(p)
            filled += p.numel * p.element_size
        if few and len(groups) > 1 and filled < most / 2:
            groups[-2:] = [groups[-2] + groups[-1]]
        return [(f"bucket{i}", group) for i, group in enumerate(groups)]


@GROUPINGS.register
@dataclass(frozen=True)
class Layer(Grouping):
    """One group per module that owns parameters (its weight and its bias together): LAGS-SGD.

    Each parameter of the model itself, which is in no module within it, is a group of its own: backward may finish one
    at its beginning and another at its end.
    """

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Collect the parameters of each module."""
        groups: dict[str, list[ParameterSize]] = {}
        for p in parameters:
            groups.setdefault(p.name.rpartition(".")[0] or p.name, []).append(p)
        return list(groups.items())


@GROUPINGS.register
@dataclass(frozen=True)
class Model(Grouping):
    """One group for all parameters: SLGS-SGD."""

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Return one group, or none without parameters."""
        return [("model", list(parameters))] if parameters else []


@GROUPINGS.register
@dataclass(frozen=True)
class MergeBelow(Grouping):
    """Layers, merged with their neighbours until a group has enough coordinates: MGS-SGD.

    Small layers have few coordinates to select from; large ones stay alone. See
    :func:`~lightning_sparse.methods.grouping.merge_below`.

    Args:
        numel: coordinates that close a group, at least 0. 0: one group per layer; infinity: one group for all.

    Raises:
        ValueError: if ``numel`` is negative or no number.

    Example:
        >>> from lightning_sparse.methods.grouping import make_plan
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
        expect(is_number(self.numel) and self.numel >= 0, "numel", "a number of coordinates of at least 0", self.numel)

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Merge modules; name a group after its first and last one."""
        layers = Layer().cut(parameters, bucket_cap_mb)
        merged = merge_below([sum(p.numel for p in members) for _, members in layers], self.numel)
        return join(layers, merged)


def merge_below(numels: Sequence[int], threshold: float) -> list[list[int]]:
    """Merge layers, given by position, until a group has enough coordinates; the last group may be smaller.

    Example:
        >>> merge_below([5000, 5000, 9000, 10, 20], 8192)
        [[0, 1], [2], [3, 4]]
    """
    groups: list[list[int]] = []
    size: float = math.inf
    for layer, numel in enumerate(numels):
        if size >= threshold:
            groups.append([])
            size = 0
        groups[-1].append(layer)
        size += numel
    return groups


def join(layers: Cut, groups: Sequence[Sequence[int]]) -> Cut:
    """Merge neighbours; name a group after its first and last layer."""
    return [
        (
            layers[group[0]][0] + (f"..{layers[group[-1]][0]}" if len(group) > 1 else ""),
            [p for i in group for p in layers[i][1]],
        )
        for group in groups
    ]
