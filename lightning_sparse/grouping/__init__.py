"""Which gradients are looked at together: names and sizes in, groups out; no tensors."""

from lightning_sparse.grouping.plan import GROUPINGS, Group, ParameterSize, make_plan

__all__ = ["GROUPINGS", "Group", "ParameterSize", "make_plan"]
