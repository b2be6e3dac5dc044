"""Fresh processes that come with torch and Lightning imported: starting one takes a moment instead of ten seconds.

They are not forked off the process of the tests, which may have run OpenMP code: that does not survive it.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, spawn
from typing import Any

from tests.warm import warm_python


@functools.cache
def forked() -> Any:
    """A context whose processes are forked off one that has imported what tests need, and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "pytorch_lightning", "lightning_sparse", "tests.trainers"])
    with spawned_warm():
        forkserver.ensure_running()
    return context


@contextmanager
def spawned_warm() -> Iterator[None]:
    """Processes that multiprocessing spawns come with what takes long to import."""
    before = spawn.get_executable()
    spawn.set_executable(warm_python())
    yield
    spawn.set_executable(before)
