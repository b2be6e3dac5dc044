"""Which gradients are looked at together: names and sizes in, groups out; no tensors."""

from lightning_sparse.grouping.cost import CostModel, Line, Network
from lightning_sparse.grouping.merge import greedy_merge, iteration_seconds, merge_below, optimal_merge
from lightning_sparse.grouping.plan import (
    GROUPINGS,
    Bucket,
    Group,
    Grouping,
    Layer,
    MergeBelow,
    Model,
    ParameterSize,
    make_plan,
)

__all__ = [
    "GROUPINGS",
    "Bucket",
    "CostModel",
    "Group",
    "Grouping",
    "Layer",
    "Line",
    "MergeBelow",
    "Model",
    "Network",
    "ParameterSize",
    "greedy_merge",
    "iteration_seconds",
    "make_plan",
    "merge_below",
    "optimal_merge",
]
