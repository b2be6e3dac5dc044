"""Groups of parameters that are exchanged together, made from names and sizes; no tensors."""

from lightning_sparse.methods.grouping.groupings import (
    DDP_BUCKET_MB,
    GROUPINGS,
    OVERLAPPED_MB,
    Bucket,
    Cut,
    Grouping,
    Layer,
    MergeBelow,
    Model,
    ParameterSize,
    merge_below,
)
from lightning_sparse.methods.grouping.plan import Group, bucket_numels, dense_plan, make_plan
from lightning_sparse.methods.grouping.rules import Rules, as_rules

__all__ = [
    "DDP_BUCKET_MB",
    "GROUPINGS",
    "Bucket",
    "Cut",
    "Group",
    "Grouping",
    "Layer",
    "MergeBelow",
    "Model",
    "OVERLAPPED_MB",
    "ParameterSize",
    "Rules",
    "as_rules",
    "bucket_numels",
    "dense_plan",
    "make_plan",
    "merge_below",
]
