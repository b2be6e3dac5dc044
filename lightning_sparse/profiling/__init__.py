"""Measurements between real ranks: the network, backward, and what an exchange costs. All of it is collective."""

from lightning_sparse.profiling.backward import BackwardTimer
from lightning_sparse.profiling.network import measure_network
from lightning_sparse.profiling.rehearsal import rehearse, sizes_up_to
from lightning_sparse.profiling.together import busy_processor, from_rank_zero, gathered, measure, slowest

__all__ = [
    "BackwardTimer",
    "busy_processor",
    "from_rank_zero",
    "gathered",
    "measure",
    "measure_network",
    "rehearse",
    "sizes_up_to",
    "slowest",
]
