"""From DDP's buckets to groups, through the pipeline, and back. Streams, threads and futures live only here."""

from lightning_sparse.reducer.agreement import check_equal_on_ranks, failing_together
from lightning_sparse.reducer.engine import Engine
from lightning_sparse.reducer.observer import StepObserver

__all__ = ["Engine", "StepObserver", "check_equal_on_ranks", "failing_together"]
