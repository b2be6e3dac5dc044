"""Patterns by which picks travel: one file each."""

from lightning_sparse.methods.exchanges.balanced import Balanced
from lightning_sparse.methods.exchanges.base import EXCHANGES, Exchange
from lightning_sparse.methods.exchanges.base import as_exchange as as_exchange  # not one of the package's public names
from lightning_sparse.methods.exchanges.dense import Dense
from lightning_sparse.methods.exchanges.follow_leader import FollowLeader
from lightning_sparse.methods.exchanges.gather_pairs import GatherPairs
from lightning_sparse.methods.exchanges.packed_union import PackedUnion
from lightning_sparse.methods.exchanges.reduce_shared import ReduceShared
from lightning_sparse.methods.exchanges.reduce_union import ReduceUnion
from lightning_sparse.methods.exchanges.tree import Tree

__all__ = [
    "EXCHANGES",
    "Balanced",
    "Dense",
    "Exchange",
    "FollowLeader",
    "GatherPairs",
    "PackedUnion",
    "ReduceShared",
    "ReduceUnion",
    "Tree",
]
