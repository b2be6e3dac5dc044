"""How picks travel: one file per pattern."""

from lightning_sparse.exchanges.base import EXCHANGES, Exchange, as_exchange
from lightning_sparse.exchanges.dense import Dense
from lightning_sparse.exchanges.gather_pairs import GatherPairs
from lightning_sparse.exchanges.reduce_union import ReduceUnion

__all__ = ["EXCHANGES", "Dense", "Exchange", "GatherPairs", "ReduceUnion", "as_exchange"]
