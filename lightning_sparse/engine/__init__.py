"""From DDP's buckets to groups, through the pipeline, and back. Streams, threads and futures live only here."""

from lightning_sparse.engine.agreement import check_equal_on_ranks, failing_together
from lightning_sparse.engine.engine import Engine, StepObserver

__all__ = ["Engine", "StepObserver", "check_equal_on_ranks", "failing_together"]
