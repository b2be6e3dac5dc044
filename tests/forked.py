"""Fresh processes that come with torch and Lightning imported: starting one takes a moment instead of ten seconds.

They are not forked off the process of the tests, which may have run OpenMP code: that does not survive it.
"""

from __future__ import annotations

import functools
import multiprocessing
from typing import Any


@functools.cache
def forked() -> Any:
    """A context whose processes are forked off one that has imported what tests need, and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "pytorch_lightning", "lightning_sparse", "tests.trainers"])
    return context
