"""Which gradients are looked at together: names and sizes in, groups out; no tensors."""

from lightning_sparse.grouping.cost import CostModel, Line, Network
from lightning_sparse.grouping.merge import greedy_merge, iteration_seconds, merge_below, optimal_merge
from lightning_sparse.grouping.plan import GROUPINGS, Group, ParameterSize, make_plan

__all__ = [
    "CostModel",
    "GROUPINGS",
    "Group",
    "Line",
    "Network",
    "ParameterSize",
    "greedy_merge",
    "iteration_seconds",
    "make_plan",
    "merge_below",
    "optimal_merge",
]
