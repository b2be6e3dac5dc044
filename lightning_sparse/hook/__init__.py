"""From DDP's buckets to groups, through the pipeline, and back. Streams, threads and futures live only here."""

from lightning_sparse.hook.agreement import check_equal_on_ranks, failing_together
from lightning_sparse.hook.engine import Engine, Tuner
from lightning_sparse.hook.settings import EXECUTORS, Settings

__all__ = ["EXECUTORS", "Engine", "Settings", "Tuner", "check_equal_on_ranks", "failing_together"]
