"""Which gradients are looked at together: names and sizes in, groups out; no tensors."""

from lightning_sparse.grouping.adaptive import budget_density, hidden_densities
from lightning_sparse.grouping.cost import NOTHING, CostModel, Curve, Line, Network
from lightning_sparse.grouping.merge import greedy_merge, iteration_seconds, merge_below, optimal_merge
from lightning_sparse.grouping.plan import (
    GROUPINGS,
    Bucket,
    Group,
    Grouping,
    Layer,
    MergeBelow,
    Model,
    OptimalMerge,
    ParameterSize,
    ProfiledMerge,
    make_plan,
    timeline,
)
from lightning_sparse.grouping.profile import GroupCost, LayerTime, Overlap, Profile, Timeline, Traffic
from lightning_sparse.grouping.rules import Rules, as_rules

__all__ = [
    "GROUPINGS",
    "NOTHING",
    "Bucket",
    "CostModel",
    "Curve",
    "Group",
    "GroupCost",
    "Grouping",
    "Layer",
    "LayerTime",
    "Line",
    "MergeBelow",
    "Model",
    "Network",
    "OptimalMerge",
    "Overlap",
    "ParameterSize",
    "Profile",
    "ProfiledMerge",
    "Rules",
    "Timeline",
    "Traffic",
    "as_rules",
    "budget_density",
    "greedy_merge",
    "hidden_densities",
    "iteration_seconds",
    "make_plan",
    "merge_below",
    "optimal_merge",
    "timeline",
]
