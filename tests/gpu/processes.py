"""A process group of one rank, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """NCCL for tensors on the device; gloo for those on the CPU, which what is compared with it needs."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, rank=0, world_size=1, store=store)
        try:
            yield
        finally:
            dist.destroy_process_group()
