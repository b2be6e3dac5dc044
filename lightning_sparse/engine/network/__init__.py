"""The network: the process groups of a training, and the drivers that send messages through them."""

from lightning_sparse.core.messages import ring_all_reduce_bytes, together
from lightning_sparse.engine.network.drivers import drive_mirrored, drive_ranks
from lightning_sparse.engine.network.process_group import LostRankError, TorchCollective, drive, drive_together, send

__all__ = [
    "LostRankError",
    "TorchCollective",
    "drive",
    "drive_mirrored",
    "drive_ranks",
    "drive_together",
    "ring_all_reduce_bytes",
    "send",
    "together",
]
