"""Groupings by a profile of the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_sparse.core.checks import check_integer, expect
from lightning_sparse.methods.grouping import GROUPINGS, Bucket, Cut, Grouping, Model, ParameterSize
from lightning_sparse.methods.grouping.groupings import LARGEST_GROUP, join
from lightning_sparse.tuning.performance.merge import greedy_merge, optimal_merge
from lightning_sparse.tuning.performance.profile import Profile

MergeRule = Literal["optimal", "published"]
"""Rule to merge layers: the exact optimum, or OMGS-SGD's greedy rule."""


@GROUPINGS.register
@dataclass(frozen=True)
class OptimalMerge(Grouping):
    """Layers, merged for the shortest step on the given machine and network.

    The first steps run with all layers in one group, while backward is timed layer by layer. Then the collectives and
    the sparsifier are timed between the ranks, and layers are merged by these numbers, exactly
    (:func:`~lightning_sparse.tuning.performance.optimal_merge`). Training continues with the new groups; no residual is
    lost. With ``messages="auto"``, the best groups with separate messages are compared with the best ones with joined
    messages, and the shorter predicted step decides. The profile is kept in Lightning's checkpoints, and a run that
    continues with the same model, settings and number of ranks uses it from the start.

    Args:
        rule: "optimal", or "published" for the greedy rule of OMGS-SGD, which is not always the best, and has separate
            messages.
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
        rules = get_args(MergeRule)
        expect(self.rule in rules, "rule", f"one of {', '.join(map(repr, rules))}", self.rule)
        for name, value, least in (("warmup", self.warmup, 1), ("steps", self.steps, 2)):
            check_integer(value, name, least)

    needs_profile = True

    @property
    def separate_messages(self) -> bool:  # type: ignore[override]
        """True for the published rule, which has separate messages only."""
        return self.rule == "published"

    @property
    def profiled_steps(self) -> tuple[int, int]:
        """``warmup`` and ``steps``."""
        return self.warmup, self.steps

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Return the groups for the profiled steps: one, or buckets if that would be too large."""
        whole = sum(p.numel for p in parameters) <= LARGEST_GROUP
        return (Model() if whole else Bucket()).cut(parameters, bucket_cap_mb)

    def cut_by(
        self, profile: Profile, density: float, parameters: Sequence[ParameterSize], bucket_cap_mb: float
    ) -> Cut:
        """Merge the layers that own these parameters.

        Raises:
            ValueError: if the profile does not know a parameter.
        """
        wanted = {p.name: p for p in parameters}
        layers: Cut = []
        seconds: list[float] = []
        passed = 0.0
        for layer, taken in zip(profile.layers, profile.delivery_seconds, strict=True):
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
        merge = {"optimal": optimal_merge, "published": greedy_merge}[self.rule]
        groups = merge(numels, seconds, profile.cost(density))
        return join(layers, [part for group in groups for part in _split(group, numels)])


def _split(group: list[int], numels: Sequence[int]) -> list[list[int]]:
    """Cut a group that is too large."""
    parts: list[list[int]] = [[]]
    for layer in group:
        if parts[-1] and sum(numels[i] for i in parts[-1]) + numels[layer] > LARGEST_GROUP:
            parts.append([])
        parts[-1].append(layer)
    return parts
